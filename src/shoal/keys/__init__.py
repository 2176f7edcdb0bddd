"""API keys: what a key is (api_key.py), and how keys are read from a file and reach every process (file.py)."""
