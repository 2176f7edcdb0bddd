"""Shoal: an engine for large language models that rebuilds the batch at every forward pass."""

__version__ = "0.1.0"
