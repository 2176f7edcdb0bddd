"""Turns plans into tokens: the engine, and the loop that drives it."""
