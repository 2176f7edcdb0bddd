"""The simulator: the engine's own scheduler, KV manager, loop and router on a virtual clock. No torch."""
