"""Seeing what the engine does: readers of events. They change nothing and nobody waits for them."""
