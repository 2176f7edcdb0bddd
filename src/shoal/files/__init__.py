"""Where a model is found on this machine or on the hub, and what its files say.

Knows paths, JSON and the GGUF format. Does not know torch, requests or how a model is computed.
"""
