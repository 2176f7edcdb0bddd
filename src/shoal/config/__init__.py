"""Settings: the engine's (engine.py), the server's (serve.py) and those of known batching systems (presets.py)."""
