"""Row-wise operations in Triton: norms, the gated product, and everything between the QKV projection and attention.

Each kernel reads and writes its rows once. rows8.py has those around fp8 products. Knows tensors, not models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.fp8 import FP8, exponents_in
from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.rows8 import Product, exponent_for, power


@triton.jit
def _rms_norm(x, weight, out, eps, x_row, SIZE: tl.constexpr, ROOM: tl.constexpr, OVERLAP: tl.constexpr):
    settle(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROOM)
    mask = i < SIZE
    value = tl.load(x + row * x_row + i, mask=mask, other=0.0)
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
        flat, weight, out, eps, flat.stride(0), SIZE=size, ROOM=triton.next_power_of_2(size),
        num_warps=warps_for(size), **overlap(),
    )  # fmt: skip
    return out


def warps_for(size: int) -> int:
    return 1 if size <= 256 else 4 if size <= 4096 else 8


@triton.jit
def _silu_mul(both, out, SIZE: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    settle(OVERLAP)
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
    _silu_mul[(rows, triton.cdiv(size, tile))](both, out, SIZE=size, TILE=tile, num_warps=4, **overlap())
    return out


@triton.jit
def _store_fp8(
    left, right, cache, exponents, slot, head, i, mask, c_block, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads of one token into an fp8 cache; left, right: the halves of each head, 0 outside of it."""
    largest = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
    exponent = exponent_for(largest)
    inverse = power(254 - exponent)[:, None]
    block = slot // BLOCK * c_block
    to = cache + block + (slot % BLOCK * KV_HEADS + head)[:, None] * DIM + i[None, :]
    tl.store(to, (left * inverse).to(tl.float8e4nv), mask=mask)
    tl.store(to + DIM // 2, (right * inverse).to(tl.float8e4nv), mask=mask)
    whole = tl.max(mask.to(tl.int32), 1) > 0
    tl.store(exponents + block + head * BLOCK + slot % BLOCK, exponent.to(tl.uint8), mask=whole)


@triton.jit
def _rotate_and_store(
    qkv, row_scales, columns, bias, q_weight, k_weight, cos, sin, slots, q_out, k_cache, v_cache, k_exponents,
    v_exponents, eps, qkv_row, angle_row, c_block,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROOM: tl.constexpr, PER: tl.constexpr,
    BLOCK: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, TO_FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """PER heads of one token: queries, keys or values."""
    settle(OVERLAP)
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    h, i = tl.program_id(1) * PER + tl.arange(0, PER), tl.arange(0, ROOM)
    in_half = i < HALF
    there = (h < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    at = qkv + token * qkv_row + h[:, None] * DIM + i[None, :]
    left = tl.load(at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
    column = h[:, None] * DIM + i[None, :]
    if SCALED:
        row_scale = tl.load(row_scales + token)
        left = left * (row_scale * tl.load(columns + column, mask=there, other=0.0))
        right = right * (row_scale * tl.load(columns + column + HALF, mask=there, other=0.0))
    if HAS_BIAS:
        left += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        right += tl.load(bias + column + HALF, mask=there, other=0.0).to(tl.float32)
    is_query, is_value = (h < HEADS)[:, None], (h >= HEADS + KV_HEADS)[:, None]
    kind = q_out.dtype.element_ty
    if NORMED:
        factor = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)[:, None]
        q_left, q_right = tl.load(q_weight + i, in_half, 0.0), tl.load(q_weight + HALF + i, in_half, 0.0)
        k_left, k_right = tl.load(k_weight + i, in_half, 0.0), tl.load(k_weight + HALF + i, in_half, 0.0)
        w_left = tl.where(is_query, q_left[None, :], k_left[None, :])
        w_right = tl.where(is_query, q_right[None, :], k_right[None, :])
        left = tl.where(is_value, left, ((left * factor).to(kind) * w_left).to(tl.float32))
        right = tl.where(is_value, right, ((right * factor).to(kind) * w_right).to(tl.float32))
    c = tl.load(cos + token * angle_row + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_row + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
    new_left = tl.where(is_value, left, left * c - right * s)
    new_right = tl.where(is_value, right, right * c + left * s)
    to_query = q_out + (token * HEADS + h)[:, None] * DIM + i[None, :]
    tl.store(to_query, new_left.to(kind), mask=there & is_query)
    tl.store(to_query + HALF, new_right.to(kind), mask=there & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    stored = k_cache.dtype.element_ty
    kept = there & (slot >= 0)
    is_key = (h >= HEADS)[:, None] & (h < HEADS + KV_HEADS)[:, None]
    if TO_FP8:
        new_left, new_right = new_left.to(kind).to(tl.float32), new_right.to(kind).to(tl.float32)
        key, value = h - HEADS, h - HEADS - KV_HEADS
        _store_fp8(
            new_left, new_right, k_cache, k_exponents, slot, key, i, kept & is_key, c_block, KV_HEADS, DIM, BLOCK
        )
        _store_fp8(
            new_left, new_right, v_cache, v_exponents, slot, value, i, kept & is_value, c_block, KV_HEADS, DIM, BLOCK
        )
    else:
        to_key = k_cache + (slot * KV_HEADS + h - HEADS)[:, None] * DIM + i[None, :]
        tl.store(to_key, new_left.to(stored), mask=kept & is_key)
        tl.store(to_key + HALF, new_right.to(stored), mask=kept & is_key)
        to_value = v_cache + (slot * KV_HEADS + h - HEADS - KV_HEADS)[:, None] * DIM + i[None, :]
        tl.store(to_value, new_left.to(stored), mask=kept & is_value)
        tl.store(to_value + HALF, new_right.to(stored), mask=kept & is_value)


def rotate_and_store(
    qkv: Tensor | Product,
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """Queries and keys normed and rotated, keys and values into the caches → queries [T, heads, d].

    A cache is contiguous, or fp8.
    """
    tensors, flags = (Product(qkv, None, None, None) if isinstance(qkv, Tensor) else qkv).arguments()
    values, (k_cache, v_cache) = tensors[0], cache
    to_fp8 = k_cache.dtype == FP8
    exponents = (exponents_in(k_cache), exponents_in(v_cache)) if to_fp8 else cache
    _, block, kv_heads, dim = k_cache.shape
    heads = values.shape[1] // dim - 2 * kv_heads
    q_weight, k_weight, eps = norms or (values, values, 0.0)
    out = torch.empty((values.shape[0], heads, dim), dtype=values.dtype, device=values.device)
    per = 8
    _rotate_and_store[(values.shape[0], triton.cdiv(heads + 2 * kv_heads, per))](
        *tensors, q_weight, k_weight, rope[0], rope[1], slots, out, k_cache, v_cache, *exponents, eps, values.stride(0),
        rope[0].stride(0), k_cache.stride(0), HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        ROOM=triton.next_power_of_2(dim // 2), PER=per, BLOCK=block, NORMED=norms is not None, **flags, TO_FP8=to_fp8,
        num_warps=1 if dim <= 128 else 4, **overlap(),
    )  # fmt: skip
    return out
