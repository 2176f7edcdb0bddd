"""API keys: what a key is (api_key.py), how keys are read from a file and reach every process (file.py), the limits of
each (limits.py), and the ledger that keeps them: its rules (ledger.py), its process (ledger_service.py) and a front's
side of it (ledger_client.py)."""
