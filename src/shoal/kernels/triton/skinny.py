"""Linear layers for few rows, where the bandwidth of reading the weights counts, not the arithmetic.

One program computes some output columns from all or a part of the inputs; the program that finishes last adds up the
parts in a fixed order, so the result does not depend on which was first. cuBLAS computes larger batches.
Knows tensors, not models.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.triton.launch import overlap, settle

MOST_ROWS = 16  # above this cuBLAS is as fast or faster
MOST_GROUPS = 4096  # of columns, where their inputs are split


@dataclass(frozen=True)
class Shape:
    """How the work is split: rows, columns and inputs of a tile, parts of the inputs, warps, stages."""

    rows: int
    columns: int
    tile: int
    splits: int
    warps: int
    stages: int


@triton.jit
def _one_row(
    x, weight, bias, residual, out, size, w_row, COLUMNS: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n] = Σ x[k] weight[n, k], one row of x. The next tile of weights is loaded while one is used."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, TILE)
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    total = tl.zeros([COLUMNS, TILE], tl.float32)
    w = tl.load(line, mask=(k < size)[None, :], other=0.0)
    settle(OVERLAP)
    for start in range(0, size, TILE):
        after = tl.load(line + start + TILE, mask=(start + TILE + k < size)[None, :], other=0.0)
        value = tl.load(x + start + k, mask=start + k < size, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)[None, :]
        w = after
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n).to(tl.float32)
    if ADDS:
        result += tl.load(residual + n).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, residual, out, parts, arrived, rows, columns, size, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x by the matrix units; SPLITS programs share the inputs of one group of columns."""
    settle(OVERLAP)
    group, split = tl.program_id(0), tl.program_id(1)
    n = group * COLUMNS + tl.arange(0, COLUMNS)
    m, k = tl.arange(0, ROWS), tl.arange(0, TILE)
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    share = tl.cdiv(tl.cdiv(size, TILE), SPLITS) * TILE
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, size), TILE):
        there = start + k < size
        w = tl.load(line + start, mask=there[None, :], other=0.0)
        at = x + m[None, :] * x_row + (start + k)[:, None]
        value = tl.load(at, mask=(m < rows)[None, :] & there[:, None], other=0.0)
        total = tl.dot(w, value, total)
    to = m[None, :] * columns + n[:, None]
    live = (m < rows)[None, :]
    if SPLITS == 1:
        if HAS_BIAS:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        if ADDS:
            total += tl.load(residual + to, mask=live, other=0.0).to(tl.float32)
        tl.store(out + to, total.to(out.dtype.element_ty), mask=live)
    else:
        tl.store(parts + split * ROWS * columns + to, total)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        before = tl.atomic_add(arrived + group, 1, sem="acq_rel")
        if before == SPLITS - 1:  # the last one: all parts are stored
            tl.store(arrived + group, 0)
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(parts + part * ROWS * columns + to, cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias + n).to(tl.float32)[:, None]
            if ADDS:
                total += tl.load(residual + to, mask=live, other=0.0).to(tl.float32)
            tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, shape: Shape) -> Tensor:
    """x [1, in]; the outputs must be a multiple of the shape's columns."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _one_row[(weight.shape[0] // shape.columns,)](
        x, weight, weight if bias is None else bias, out if residual is None else residual, out, weight.shape[1],
        weight.stride(0), COLUMNS=shape.columns, TILE=shape.tile, HAS_BIAS=bias is not None, ADDS=residual is not None,
        num_warps=shape.warps, num_stages=shape.stages, **overlap(),
    )  # fmt: skip
    return out


@cache
def _zeros(device: torch.device) -> Tensor:
    """Counters of the stored parts of each group of columns; every launch leaves zeros."""
    return torch.zeros(MOST_GROUPS, dtype=torch.int32, device=device)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, shape: Shape) -> Tensor:
    """x [up to the shape's rows, in]; the outputs must be a multiple of its columns, and few enough if it splits."""
    rows, wide = x.shape[0], weight.shape[0]
    out = torch.empty((rows, wide), dtype=x.dtype, device=x.device)
    parts = out
    if shape.splits > 1:
        parts = torch.empty((shape.splits, shape.rows, wide), dtype=torch.float32, device=x.device)
    _few_rows[(wide // shape.columns, shape.splits)](
        x, weight, weight if bias is None else bias, out if residual is None else residual, out, parts,
        _zeros(x.device),
        rows, wide, weight.shape[1], x.stride(0), weight.stride(0), ROWS=shape.rows, COLUMNS=shape.columns,
        TILE=shape.tile, SPLITS=shape.splits, HAS_BIAS=bias is not None, ADDS=residual is not None,
        num_warps=shape.warps, num_stages=shape.stages, **overlap(),
    )  # fmt: skip
    return out


def shape_for(rows: int, inputs: int, outputs: int) -> Shape | None:
    """The fastest way found on an H200 (the table is in docs/lab/gpu.md); None: cuBLAS."""
    if rows > MOST_ROWS or outputs % 32:
        return None
    if rows == 1:
        if outputs > 4096 or inputs <= 1024:
            return Shape(1, 4, 512, 1, 2, 3)
        if outputs >= 3072:
            return Shape(1, 8, 512, 1, 8, 3)
        return Shape(1, 2, 1024, 1, 8 if outputs <= 1024 else 4, 3)
    if outputs <= 1024:
        return Shape(16, 32, 128, 4, 4, 5)
    if outputs <= 6144 and inputs <= 4096:
        return Shape(16, 16, 128, 1, 2, 6)
    if outputs >= 100_000:
        return Shape(16, 32, 256, 1, 4, 4)
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, plus a contiguous residual if there is one (which may be overwritten), by whichever is fastest."""
    shape = None if x.dtype == torch.float32 else shape_for(x.shape[0], weight.shape[1], weight.shape[0])
    if shape is not None:
        return (one_row if x.shape[0] == 1 else few_rows)(x, weight, bias, residual, shape)
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is not None:
        return F.linear(x, weight, bias).add_(residual)
    return residual.addmm_(x, weight.t())
