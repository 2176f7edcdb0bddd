"""What happens row by row, in Triton: norms, the gated product, rotation, and writing keys and values.

Each kernel reads and writes its rows once. Knows tensors, not models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, residual, weight, out, total, eps, x_row, SIZE: tl.constexpr, ROOM: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROOM)
    mask = i < SIZE
    value = tl.load(x + row * x_row + i, mask=mask, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row * SIZE + i, value, mask=mask)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    result = normed.to(value.dtype) * tl.load(weight + i, mask=mask, other=0.0)
    tl.store(out + row * SIZE + i, result, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; leading dimensions may be strided as one (heads of a wider row)."""
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x if x.dim() == 2 else x.reshape(-1, size)
    _rms_norm[(flat.shape[0],)](
        flat, flat, weight, out, out, eps, flat.stride(0), SIZE=size, ROOM=triton.next_power_of_2(size), ADD=False,
        num_warps=warps_for(size),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual)."""
    size = x.shape[-1]
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _rms_norm[(x.shape[0],)](
        x, residual, weight, out, total, eps, x.stride(0), SIZE=size, ROOM=triton.next_power_of_2(size), ADD=True,
        num_warps=warps_for(size),
    )  # fmt: skip
    return out, total


def warps_for(size: int) -> int:
    return 1 if size <= 256 else 4 if size <= 4096 else 8


@triton.jit
def _silu_mul(both, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = i < SIZE
    gate = tl.load(both + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0)
    tl.store(out + row * SIZE + i, (gate * tl.sigmoid(gate)).to(up.dtype) * up, mask=mask)


def silu_mul(both: Tensor) -> Tensor:
    """[T, 2n] → silu of the left half times the right half."""
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    tile = min(1024, triton.next_power_of_2(size))
    _silu_mul[(rows, triton.cdiv(size, tile))](both, out, SIZE=size, TILE=tile, num_warps=4)
    return out


@triton.jit
def _rotary(x, out, cos, sin, x_row, x_head, angle_row, HEADS: tl.constexpr, HALF: tl.constexpr, ROOM: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, ROOM)
    mask = i < HALF
    c = tl.load(cos + row * angle_row + i, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_row + i, mask=mask, other=0.0).to(tl.float32)
    at = row * x_row + head * x_head + i
    left = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(x + at + HALF, mask=mask, other=0.0).to(tl.float32)
    to = (row * HEADS + head) * 2 * HALF + i
    tl.store(out + to, (left * c - right * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + to + HALF, (right * c + left * s).to(out.dtype.element_ty), mask=mask)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn value i with value i + d/2 of every head."""
    rows, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    room = triton.next_power_of_2(dim // 2)
    _rotary[(rows, heads)](
        x, out, cos, sin, x.stride(0), x.stride(1), cos.stride(0), HEADS=heads, HALF=dim // 2, ROOM=room, num_warps=1
    )
    return out


@triton.jit
def _store(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_row,
    k_head,
    v_row,
    v_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROOM: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, ROOM)
    mask = i < DIM
    to = (slot * HEADS + head) * DIM + i
    tl.store(
        k_cache + to,
        tl.load(k + row * k_row + head * k_head + i, mask=mask, other=0.0).to(k_cache.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        v_cache + to,
        tl.load(v + row * v_row + head * v_head + i, mask=mask, other=0.0).to(v_cache.dtype.element_ty),
        mask=mask,
    )


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k and v [T, kv_heads, d] into the contiguous caches at slots."""
    rows, heads, dim = k.shape
    _store[(rows, heads)](
        k, v, k_cache, v_cache, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, DIM=dim, ROOM=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
