"""The programs that `shoal serve` starts: one engine (engine.py) and its fronts (front.py)."""
