"""Executor on torch: plans in, tokens out. Never sees the scheduler or the KV manager."""
