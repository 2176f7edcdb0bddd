"""Fused operations as a sequence of their parts, up to a decoder's layer, for devices that gain nothing by fusing them.

Knows the parts' meaning, not how a device computes them.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, split

from shoal.kernels import Batch, Layer, Ops


class Parts(Protocol):
    """What must be there."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn value i with value i + d/2. q [T, heads, d], k [T, kv_heads, d], cos and sin [T, d/2] or [T, d]."""

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Write k and v [T, kv_heads, d] into the cache at slots."""


def rotate_and_store(
    parts: Parts,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    turn: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """As Ops says."""
    tokens = qkv.shape[0]
    kv_heads, dim = cache[0].shape[2:]
    kv_size = kv_heads * dim
    flat_q, flat_k, flat_v = split(qkv, [qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    q, k, v = flat_q.view(tokens, -1, dim), flat_k.view(tokens, kv_heads, dim), flat_v.view(tokens, kv_heads, dim)
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = parts.rms_norm(q, q_weight, eps), parts.rms_norm(k, k_weight, eps)
    q, k = parts.rotary(q, k, *turn)
    parts.store_kv(k, v, *cache, slots)
    return q


def layers(
    ops: Ops,
    layers: Sequence[Layer],
    residual: Tensor,
    turn: tuple[Tensor, Tensor],
    batch: Batch,
    kv: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """As Ops says: the order of operations in a decoder's layer."""
    for layer, cache in zip(layers, kv, strict=True):
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, layer.eps)
        x = ops.rms_norm(residual, layer.attention_norm, layer.eps)
        q = ops.rotate_and_store(ops.linear(x, layer.qkv, layer.qkv_bias), norms, turn, cache, batch.slots)
        mixed = ops.attention(q, *cache, batch, layer.scale, layer.window).flatten(1)
        residual = ops.linear_add(mixed, layer.out, layer.out_bias, residual)
        x = ops.rms_norm(residual, layer.mlp_norm, layer.eps)
        inner = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
        residual = ops.linear_add(inner, layer.down, layer.down_bias, residual)
    return residual
