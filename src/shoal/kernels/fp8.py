"""8-bit floating point (e4m3): how rows become bytes with a scale, and how a KV cache of such bytes is laid out.

Owns the meaning, in plain torch; kernels for a device must give the same bytes. Knows tensors, not layers or models.

Every scale is a power of two: the least one with which the largest magnitude of a row fits below 448, the largest e4m3
number. So scaling never rounds: an implementation may scale before or after a sum and gets the same bits. Nothing is
lost by it, since floating-point numbers are as precise at every scale.

    a block of an fp8 KV cache   | values [block_size, kv_heads, head_dim] | exponents [kv_heads, block_size] |

An exponent is the byte that is the exponent field of the scale in float32. It belongs to one token and KV head, so that
what is stored does not depend on how a prompt was cut. Exponents lie behind the values of their block: whatever copies
a block copies them too. What is behind them, up to a multiple of 16 bytes, means nothing.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_CARRY = 0x1FFFFF  # added to a float32's bits, it raises the exponent if the mantissa is above that of 448 (1.75)


def exponents_for(largest: Tensor) -> Tensor:
    """int32: the exponent field of the least power of two s with largest ≤ 448 s; `largest` is not negative."""
    bits = largest.float().view(torch.int32)
    return (((bits + _CARRY) >> 23) - 8).clamp_(min=1)


def scales_of(exponents: Tensor) -> Tensor:
    """float32: the scales with these exponent fields."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] → (fp8 [..., n], exponents int32 [...]), one for each row."""
    wide = x.float()
    exponents = exponents_for(wide.abs().amax(dim=-1))
    inverse = ((254 - exponents) << 23).view(torch.float32)
    return (wide * inverse.unsqueeze(-1)).to(FP8), exponents


def block_bytes(block_size: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block of keys, or of values: whole units of 16, which are what GPUs load at once."""
    return -(-block_size * kv_heads * (head_dim + 1) // 16) * 16


def blocks_in(data: Tensor, block_size: int, kv_heads: int, head_dim: int) -> Tensor:
    """The values [blocks, block_size, kv_heads, head_dim] in bytes [blocks, block_bytes]; exponents_in has the rest."""
    values = data[:, : block_size * kv_heads * head_dim]
    return values.view(FP8).view(len(data), block_size, kv_heads, head_dim)


def exponents_in(cache: Tensor) -> Tensor:
    """uint8 [blocks, kv_heads, block_size] of an fp8 cache."""
    blocks, block_size, kv_heads, head_dim = cache.shape
    behind = cache.storage_offset() + block_size * kv_heads * head_dim
    return cache.view(torch.uint8).as_strided((blocks, kv_heads, block_size), (cache.stride(0), block_size, 1), behind)


def store(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    """x [T, kv_heads, d] into an fp8 cache at slots, none of them below 0."""
    values, exponents = quantize_rows(x)
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    cache.view(torch.uint8)[blocks, offsets] = values.view(torch.uint8)  # torch cannot index all types of 8 bits
    exponents_in(cache)[blocks, :, offsets] = exponents.to(torch.uint8)


def gathered(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Some blocks of a cache, [*blocks, block_size, kv_heads, head_dim], as numbers: as they are, or of an fp8 cache in
    this type (exact in bfloat16 and float32)."""
    if cache.dtype != FP8:
        return cache[blocks]
    scales = scales_of(exponents_in(cache)[blocks]).transpose(-1, -2).unsqueeze(-1)
    return (cache.view(torch.uint8)[blocks].view(FP8).float() * scales).to(dtype)
