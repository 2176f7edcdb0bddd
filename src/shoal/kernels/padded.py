"""Attention over a padded rectangle, in plain torch: what batching systems without ragged kernels compute.

Every row is as wide as the widest and attends to as many keys as the longest context; a mask drops the padding after it
has been computed. That is the point: this is the honest cost of padding, not a good kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from shoal.kernels.fp8 import gathered

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernels.ops import Batch


def padded_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
    """q [rows × width, heads, d], all rows' blocks gathered to the longest context → as q."""
    rows, width = batch.block_tables.shape[0], batch.width
    positions = batch.positions.view(rows, width)
    keys = gathered(k_cache, batch.block_tables, q.dtype).flatten(1, 2).transpose(1, 2)  # [rows, kv_heads, longest, d]
    values = gathered(v_cache, batch.block_tables, q.dtype).flatten(1, 2).transpose(1, 2)
    at = torch.arange(keys.shape[2], device=q.device)
    seen = at <= positions.unsqueeze(2)
    if window:
        seen &= at > positions.unsqueeze(2) - window
    queries = q.view(rows, width, *q.shape[1:]).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen.unsqueeze(1), scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(q.shape)
