"""Matrix products whose every sum has one order, whatever else is in the batch: the same bits for a row alone and
among thousands.

    inputs    0 ······· share ······· 2 share ······· size       parts: a number that the matrix alone decides
              └─ sum 0 ─┘└── sum 1 ──┘└── sum 2 ──┘              each by the same matrix instruction, from left to right
    result    ((0 + sum 0) + sum 1) + sum 2, then the bias, then the residual

Few rows: each part is a program, and the one that finishes last adds them up. Many rows: one program takes all parts of
its tile. Both add in the same order. The matrix is the left factor of the instruction and the rows are the right one,
so that tiles of few and of many rows are computed by instructions of one kind. Knows tensors, not models.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.triton.launch import overlap, settle

COLUMNS = 64  # of a program for few rows: the least that Hopper's matrix instructions take
SHARE = 256  # a part has a multiple of so many inputs, which is a multiple of every tile
ENOUGH = 256  # programs that keep a GPU busy
MOST_PARTS = 8
SPLIT_ROWS = 128  # up to so many rows, parts are programs
NEIGHBOURS = 8  # blocks of rows that are computed side by side, so that they read a weight from the cache


@dataclass(frozen=True)
class Tiles:
    """Of one program: rows, columns and inputs at a time; warps, stages."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


@triton.jit
def _finish(total, bias, residual, out, n, to, live, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """Add the bias, then the residual; store."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n >= 0, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        total += tl.load(residual + to, mask=live, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _in_parts(
    x, weight, bias, residual, out, parts, arrived, rows, columns, size, share, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows at most: one part of the inputs for one group of columns."""
    settle(OVERLAP)
    group, part = tl.program_id(0), tl.program_id(1)
    n = group * COLUMNS + tl.arange(0, COLUMNS)
    m, k = tl.arange(0, ROWS), tl.arange(0, TILE)
    in_matrix, live_rows = n < columns, m < rows
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    column = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, size), TILE):
        there = start + k < size
        w = tl.load(line + start, mask=in_matrix[:, None] & there[None, :], other=0.0)
        value = tl.load(column + start, mask=live_rows[None, :] & there[:, None], other=0.0)
        total = tl.dot(w, value, total, input_precision=PRECISION)
    to = m.to(tl.int64)[None, :] * columns + n[:, None]
    live = live_rows[None, :] & in_matrix[:, None]
    if PARTS == 1:
        _finish(total, bias, residual, out, tl.where(in_matrix, n, -1), to, live, HAS_BIAS, ADDS)
    else:
        tl.store(parts + part * rows * columns + to, total, mask=live)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        before = tl.atomic_add(arrived + group, 1, sem="acq_rel")
        if before == PARTS - 1:  # the last one: all parts are stored
            tl.store(arrived + group, 0)
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for one in tl.static_range(PARTS):
                total += tl.load(parts + one * rows * columns + to, mask=live, other=0.0, cache_modifier=".cg")
            _finish(total, bias, residual, out, tl.where(in_matrix, n, -1), to, live, HAS_BIAS, ADDS)


@triton.jit(do_not_specialize=["rows"])
def _whole(
    x, weight, bias, residual, out, rows, columns, size, share, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    SIDE: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile of rows and columns, with all parts of the inputs in turn."""
    settle(OVERLAP)
    groups, blocks = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    program, per = tl.program_id(0), SIDE * groups
    first = program // per * SIDE
    side = tl.minimum(blocks - first, SIDE)
    block, group = first + program % per % side, program % per // side
    n = group * COLUMNS + tl.arange(0, COLUMNS)
    m, k = block * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    in_matrix, live_rows = n < columns, m < rows
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    column = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    part = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, size, TILE):
        there = start + k < size
        w = tl.load(line + start, mask=in_matrix[:, None] & there[None, :], other=0.0)
        value = tl.load(column + start, mask=live_rows[None, :] & there[:, None], other=0.0)
        part = tl.dot(w, value, part, input_precision=PRECISION)
        if PARTS > 1 and (start + TILE) % share == 0:  # the end of a part
            total += part
            part = tl.zeros([COLUMNS, ROWS], tl.float32)
    total += part  # of the last one, or of nothing, which changes no bit
    to = m.to(tl.int64)[None, :] * columns + n[:, None]
    live = live_rows[None, :] & in_matrix[:, None]
    _finish(total, bias, residual, out, tl.where(in_matrix, n, -1), to, live, HAS_BIAS, ADDS)


def parts_for(inputs: int, outputs: int) -> int:
    """Parts of the inputs, by the matrix alone: enough programs for few rows, each with some inputs."""
    groups = -(-outputs // COLUMNS)
    return min(MOST_PARTS, -(-ENOUGH // groups), -(-inputs // SHARE))


def share_of(inputs: int, parts: int) -> int:
    """Inputs of a part; the last part may have fewer, or none."""
    return -(-inputs // (SHARE * parts)) * SHARE


def tiles_for(rows: int, itemsize: int) -> Tiles:
    """By the number of rows, which changes no order. Inputs are 256 bytes at a time for few rows, else 128."""
    if rows <= 16:
        return Tiles(16, COLUMNS, 256 // itemsize, 4, 5)
    if rows <= 64:
        return Tiles(32 if rows <= 32 else 64, COLUMNS, 256 // itemsize, 4, 4)
    if rows <= SPLIT_ROWS:
        return Tiles(128, COLUMNS, 128 // itemsize, 4, 4)
    return Tiles(128, 128, 128 // itemsize, 8, 4)


@cache
def _zeros(device: torch.device) -> Tensor:
    """Counters of the stored parts of each group of columns; every launch leaves zeros."""
    return torch.zeros(ENOUGH, dtype=torch.int32, device=device)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, plus a contiguous residual if there is one."""
    return multiply(x, weight, bias, residual, x.dtype)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """The same in a type of its own; tiles: others than measured."""
    (rows, size), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    tiles = tiles or tiles_for(rows, x.element_size())
    parts = parts_for(size, columns)
    share = share_of(size, parts)
    given = x, weight, out if bias is None else bias, out if residual is None else residual, out
    numbers = rows, columns, size, share, x.stride(0), weight.stride(0)
    options = {
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "TILE": tiles.inputs, "PARTS": parts,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32", "HAS_BIAS": bias is not None,
        "ADDS": residual is not None, "num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False,
        **overlap(),
    }  # fmt: skip
    groups = triton.cdiv(columns, tiles.columns)
    if rows > tiles.rows or tiles.columns != COLUMNS:
        blocks = triton.cdiv(rows, tiles.rows)
        _whole[(groups * blocks,)](*given, *numbers, SIDE=NEIGHBOURS, **options)
        return out
    sums = out
    if parts > 1:
        sums = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    _in_parts[(groups, parts)](*given, sums, _zeros(x.device), *numbers, **options)
    return out
