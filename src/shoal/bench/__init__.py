"""Benchmarks: each prints a figure, its floor and the fraction reached."""
