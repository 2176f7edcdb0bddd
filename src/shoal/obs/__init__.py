"""Seeing what the engine does: readers of events. They change nothing, and no request waits for them."""
