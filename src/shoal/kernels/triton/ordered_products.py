"""Matrix products whose every sum has one order, whatever else is in the batch: the same bits for a row alone and
among thousands.

A sum is one chain over the inputs, from left to right, by one program: nothing is split, so there is nothing to add up.
How many rows, columns and inputs a program takes at a time changes no bit. The matrix is the left factor of the
instruction and the rows are the right one, so that few rows are computed by the same kind of instruction as many.
Splitting the inputs, which cuBLAS does for few rows, would save 1 of 20 µs for most matrices of Llama-3.1-8B at 128
rows, and 9 of 48 for its longest sums (benchmarks/gpu_ordered.py). Knows tensors, not models.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shoal.kernels.triton.launch import overlap, settle

ENOUGH = 96  # programs that keep a GPU of 132 processors busy
NEIGHBOURS = 8  # blocks of rows that are computed side by side, so that they read a weight from the cache
STEP = 16  # bytes: a tensor is read by the copy engine if its lines begin at multiples of it


@dataclass(frozen=True)
class Tiles:
    """Of one program: rows, columns and bytes of inputs at a time; warps, stages."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


FEW = (Tiles(16, 64, 256, 4, 5), Tiles(32, 64, 256, 4, 4))
SMALL, MIDDLE, LARGE = Tiles(64, 64, 128, 4, 6), Tiles(128, 128, 128, 8, 4), Tiles(256, 128, 128, 8, 4)
WIDE = Tiles(128, 128, 128, 4, 3)  # one block of rows, many of columns


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, residual, out, rows, columns, size, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, SIDE: tl.constexpr,
    TILED: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile of rows and columns. TILED: x and weight are tensor descriptors, else pointers."""
    settle(OVERLAP)
    groups, blocks = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    program, per = tl.program_id(0), SIDE * groups
    first = program // per * SIDE
    side = tl.minimum(blocks - first, SIDE)
    block, group = first + program % per % side, program % per // side
    n = group * COLUMNS + tl.arange(0, COLUMNS)
    m, k = block * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    in_matrix, live_rows = n < columns, m < rows
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, size, TILE):
        if TILED:
            w = weight.load([group * COLUMNS, start])
            value = x.load([block * ROWS, start]).T
        else:
            there = start + k < size
            line = weight + n.to(tl.int64)[:, None] * w_row + (start + k)[None, :]
            column = x + m.to(tl.int64)[None, :] * x_row + (start + k)[:, None]
            w = tl.load(line, mask=in_matrix[:, None] & there[None, :], other=0.0)
            value = tl.load(column, mask=live_rows[None, :] & there[:, None], other=0.0)
        total = tl.dot(w, value, total, input_precision=PRECISION)
    to = m.to(tl.int64)[None, :] * columns + n[:, None]
    live = live_rows[None, :] & in_matrix[:, None]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=in_matrix, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        total += tl.load(residual + to, mask=live, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


def tiles_for(rows: int, columns: int) -> Tiles:
    """The fastest found on an H200: the largest tiles of which there are enough. They change no order."""
    for tiles in FEW:
        if rows <= tiles.rows:
            return tiles
    for tiles in (LARGE, MIDDLE):
        programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
        if rows > tiles.rows // 2 and programs >= ENOUGH:
            return WIDE if rows <= WIDE.rows else tiles
    return SMALL


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
    tiles = tiles or tiles_for(rows, columns)
    tile = tiles.inputs // x.element_size()
    described = is_aligned(x) and is_aligned(weight)
    factors: tuple[Any, Any] = (x, weight)
    if described:
        factors = tuple(
            TensorDescriptor(one, list(one.shape), list(one.stride()), [lines, tile])
            for one, lines in ((x, tiles.rows), (weight, tiles.columns))
        )
    programs = triton.cdiv(columns, tiles.columns) * triton.cdiv(rows, tiles.rows)
    _product[(programs,)](
        *factors, out if bias is None else bias, out if residual is None else residual, out, rows, columns, size,
        x.stride(0), weight.stride(0), ROWS=tiles.rows, COLUMNS=tiles.columns, TILE=tile,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", SIDE=NEIGHBOURS, TILED=described,
        HAS_BIAS=bias is not None, ADDS=residual is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out


def is_aligned(tensor: Tensor) -> bool:
    """Can the GPU's copy engine read it in tiles?"""
    return (
        tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % STEP == 0 and tensor.data_ptr() % STEP == 0
    )
