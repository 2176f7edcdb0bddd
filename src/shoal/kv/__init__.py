"""Which KV blocks are held by which requests: ids only, no tensors, no clock."""
