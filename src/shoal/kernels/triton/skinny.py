"""Linear layers for few rows: what counts is how fast the weights stream past, not the arithmetic.

One program takes some output columns and all or a part of the inputs; parts are added up by the program that ends
last, in a fixed order, so the result does not depend on who was first. Larger batches are cuBLAS's.
Knows tensors, not models.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

MOST_ROWS = 0  # above this cuBLAS is faster


@triton.jit
def _one_row(x, weight, bias, out, size, w_row, COLUMNS: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """out[n] = Σ x[k] weight[n, k], one row of x."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, TILE)
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    total = tl.zeros([COLUMNS, TILE], tl.float32)
    for start in range(0, size, TILE):
        there = start + k < size
        w = tl.load(line + start, mask=there[None, :], other=0.0)
        value = tl.load(x + start + k, mask=there, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, out, parts, arrived, rows, columns, size, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Up to ROWS rows of x at once, by the matrix units; SPLITS programs share the inputs of one group of columns."""
    group, split = tl.program_id(0), tl.program_id(1)
    n = group * COLUMNS + tl.arange(0, COLUMNS)
    m, k = tl.arange(0, ROWS), tl.arange(0, TILE)
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    share = tl.cdiv(tl.cdiv(size, TILE), SPLITS) * TILE
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, size), TILE):
        there = start + k < size
        w = tl.load(line + start, mask=there[None, :], other=0.0)
        value = tl.load(x + m[None, :] * x_row + (start + k)[:, None], mask=(m < rows)[None, :] & there[:, None], other=0.0)
        total = tl.dot(w, value, total)
    at = m[None, :] * columns + n[:, None]
    if SPLITS > 1:
        tl.store(parts + split * ROWS * columns + at, total)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        before = tl.atomic_add(arrived + group, 1, sem="acq_rel")
        if before == SPLITS - 1:
            tl.store(arrived + group, 0)
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(parts + part * ROWS * columns + at, cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias + n).to(tl.float32)[:, None]
            tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[None, :])
    else:
        if HAS_BIAS:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[None, :])


def one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int = 4, tile: int = 1024, warps: int = 4
) -> Tensor:
    """x [1, in]; out must be a multiple of `columns`."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _one_row[(weight.shape[0] // columns,)](
        x, weight, weight if bias is None else bias, out, weight.shape[1], weight.stride(0),
        COLUMNS=columns, TILE=tile, HAS_BIAS=bias is not None, num_warps=warps,
    )  # fmt: skip
    return out


@cache
def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(4096, dtype=torch.int32, device=device)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int = 16, tile: int = 256, splits: int = 1,
    warps: int = 4, stages: int = 4,
) -> Tensor:  # fmt: skip
    """x [up to 16, in]; out must be a multiple of `columns`, and with splits at most 4096 times that."""
    rows, wide = x.shape[0], weight.shape[0]
    out = torch.empty((rows, wide), dtype=x.dtype, device=x.device)
    parts = torch.empty((splits, 16, wide), dtype=torch.float32, device=x.device) if splits > 1 else out
    _few_rows[(wide // columns, splits)](
        x, weight, weight if bias is None else bias, out, parts, _zeros(x.device), rows, wide, weight.shape[1],
        x.stride(0), weight.stride(0), ROWS=16, COLUMNS=columns, TILE=tile, SPLITS=splits, HAS_BIAS=bias is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, by whichever is fastest for so many rows."""
    if x.shape[0] > MOST_ROWS or x.dtype == torch.float32 or weight.shape[0] % 64:
        return F.linear(x, weight, bias)
    return few_rows(x, weight, bias)
