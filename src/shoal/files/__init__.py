"""Model files: finding them on this machine or on the hub, and reading their metadata.

Knows paths, JSON and the GGUF format. Does not know torch, requests or how a model is computed.
"""
