"""Which KV blocks belong to whom: ids only, no tensors, no clock."""
