"""rotate_and_store as a sequence of its parts, for devices that gain nothing by fusing them.

Knows what the parts mean, not how a device computes them.
"""

from typing import Protocol

from torch import Tensor, split


class Parts(Protocol):
    """The operations that rotate_and_store is composed of."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate value i with value i + d/2. q [T, heads, d], k [T, kv_heads, d], cos and sin [T, d/2] or [T, d]."""

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Write k and v [T, kv_heads, d] into the cache at slots."""


def rotate_and_store(
    parts: Parts,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """See Ops."""
    tokens = qkv.shape[0]
    kv_heads, dim = cache[0].shape[2:]
    kv_size = kv_heads * dim
    flat_q, flat_k, flat_v = split(qkv, [qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    q, k, v = flat_q.view(tokens, -1, dim), flat_k.view(tokens, kv_heads, dim), flat_v.view(tokens, kv_heads, dim)
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = parts.rms_norm(q, q_weight, eps), parts.rms_norm(k, k_weight, eps)
    q, k = parts.rotary(q, k, *rope)
    parts.store_kv(k, v, *cache, slots)
    return q
