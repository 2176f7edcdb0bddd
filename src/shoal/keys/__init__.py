"""API keys: what a key is (api_key.py), how keys are read from a file and reach every process (file.py), and the limits
of each (limits.py)."""
