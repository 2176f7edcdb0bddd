"""Products with weights in blocks of 4 bits, which are unpacked in the kernel that multiplies them.

    one row    streams the integers; their scales are applied to sums
    few rows   numbers of a tile go to the matrix units; several programs may share the inputs of a group of columns
    many rows  the whole matrix becomes numbers of the inputs' type first, and the usual product follows

A tile is some groups of inputs, each with one scale, or a part of one group. Which way suits which sizes is measured by
benchmarks/gpu_int4.py. Knows tensors, not models.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.block_weight import BlockWeight
from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.skinny import linear

MOST_ROWS = 32  # above this the matrix is unpacked once: with 64 rows that is faster for most shapes
MOST_GROUPS = 4096  # of columns, where their inputs are split


@dataclass(frozen=True)
class Tiling:
    """How the work is split: rows, columns and inputs of a tile, parts of the inputs, warps, stages."""

    rows: int
    columns: int
    tile: int
    splits: int
    warps: int
    stages: int


@triton.jit
def _one_row(
    x, weight, scales, offsets, bias, residual, out, size, w_row, s_row, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n] = Σ x[k] (integer[n, k] scale[n, group of k] + offset[n, group of k]), one row of x.

    PART: inputs of a tile that share a scale. A byte has input j of its block below and input j + 16 above.
    """
    n = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[:, None, None]
    g = tl.arange(0, TILE // PART)[None, :, None]
    c = tl.arange(0, PART // 2)[None, None, :]
    byte = weight + n * w_row + (g * (PART // 2) + c)
    first = g * PART + c // 16 * 32 + c % 16
    total = tl.zeros([COLUMNS, TILE // PART, PART // 2], tl.float32)
    w = tl.load(byte, mask=first < size, other=0)
    settle(OVERLAP)
    for start in range(0, size, TILE):
        after = tl.load(byte + (start + TILE) // 2, mask=start + TILE + first < size, other=0)
        live = start + first < size
        low = tl.load(x + start + first, mask=live, other=0.0).to(tl.float32)
        high = tl.load(x + start + first + 16, mask=live, other=0.0).to(tl.float32)
        at = n * s_row + (start + g * PART) // GROUP
        scale = tl.load(scales + at, mask=start + g * PART < size, other=0.0).to(tl.float32)
        offset = tl.load(offsets + at, mask=start + g * PART < size, other=0.0).to(tl.float32)
        total += ((w & 15).to(tl.float32) * low + (w >> 4).to(tl.float32) * high) * scale + (low + high) * offset
        w = after
    result = tl.sum(tl.sum(total, 2), 1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        result += tl.load(bias + at).to(tl.float32)
    if ADDS:
        result += tl.load(residual + at).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, scales, offsets, bias, residual, out, parts, arrived, rows, columns, size, x_row, w_row, s_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows of x; SPLITS programs share the inputs of one group of columns."""
    settle(OVERLAP)
    group, split = tl.program_id(0), tl.program_id(1)
    n = group * COLUMNS + tl.arange(0, COLUMNS)
    m, f = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE // 2)
    g = tl.arange(0, TILE // PART)[None, :, None]
    c = tl.arange(0, PART // 2)[None, None, :]
    line = n.to(tl.int64)[:, None, None]
    first = f // 16 * 32 + f % 16
    share = tl.cdiv(tl.cdiv(size, TILE), SPLITS) * TILE
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, size), TILE):
        live = start + g * PART < size
        w = tl.load(weight + line * w_row + (start // 2 + g * (PART // 2) + c), mask=live & (c >= 0), other=0)
        at = line * s_row + (start + g * PART) // GROUP
        scale = tl.load(scales + at, mask=live, other=0.0).to(tl.float32)
        offset = tl.load(offsets + at, mask=live, other=0.0).to(tl.float32)
        low = ((w & 15).to(tl.float32) * scale + offset).to(x.dtype.element_ty)
        high = ((w >> 4).to(tl.float32) * scale + offset).to(x.dtype.element_ty)
        to = x + m.to(tl.int64)[None, :] * x_row + (start + first)[:, None]
        there = (m < rows)[None, :] & (start + first < size)[:, None]
        one = tl.load(to, mask=there, other=0.0)
        other = tl.load(to + 16, mask=there, other=0.0)
        total = tl.dot(tl.reshape(low, [COLUMNS, TILE // 2]), one, total, input_precision="ieee")
        total = tl.dot(tl.reshape(high, [COLUMNS, TILE // 2]), other, total, input_precision="ieee")
    at = m.to(tl.int64)[None, :] * columns + n[:, None]
    live = (m < rows)[None, :] & (n >= 0)[:, None]
    if SPLITS > 1:
        tl.store(parts + split.to(tl.int64) * rows * columns + at, total, mask=live)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        before = tl.atomic_add(arrived + group * tl.num_programs(2) + tl.program_id(2), 1, sem="acq_rel")
        if before == SPLITS - 1:  # the last one: all parts are stored
            tl.store(arrived + group * tl.num_programs(2) + tl.program_id(2), 0)
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                here = parts + part * rows.to(tl.int64) * columns + at
                total += tl.load(here, mask=live, other=0.0, cache_modifier=".cg")
            _store(total, bias, residual, out, n, at, live, HAS_BIAS, ADDS)
    else:
        _store(total, bias, residual, out, n, at, live, HAS_BIAS, ADDS)


@triton.jit
def _store(total, bias, residual, out, n, at, live, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    if ADDS:
        total += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _widen(weight, scales, offsets, out, blocks, size, w_row, s_row, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Some blocks of one output, as numbers."""
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    c = tl.arange(0, 16)[None, :]
    live = (b < blocks) & (c >= 0)
    w = tl.load(weight + n * w_row + b * 16 + c, mask=live, other=0)
    scale = tl.load(scales + n * s_row + b * 32 // GROUP, mask=b < blocks, other=0.0).to(tl.float32)
    offset = tl.load(offsets + n * s_row + b * 32 // GROUP, mask=b < blocks, other=0.0).to(tl.float32)
    to = out + n * size + b * 32 + c
    tl.store(to, ((w & 15).to(tl.float32) * scale + offset).to(out.dtype.element_ty), mask=live)
    tl.store(to + 16, ((w >> 4).to(tl.float32) * scale + offset).to(out.dtype.element_ty), mask=live)


def widened(weight: BlockWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]: the numbers, on the device."""
    outputs, inputs = weight.shape
    assert weight.offsets is not None, "weights in 4 bits have offsets"
    blocks, some = inputs // 32, 64
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.values.device)
    _widen[(outputs, -(-blocks // some))](
        weight.values, weight.scales, weight.offsets, out, blocks, inputs, weight.values.stride(0),
        weight.scales.stride(0), GROUP=weight.scale_group, BLOCKS=some, num_warps=4,
    )  # fmt: skip
    return out


@cache
def _zeros(device: torch.device) -> Tensor:
    """Counters of the stored parts of each group of columns; every launch leaves zeros."""
    return torch.zeros(MOST_GROUPS, dtype=torch.int32, device=device)


def fits(weight: BlockWeight, tile: int) -> bool:
    """Whether a tile is whole groups, or a part of one."""
    return weight.scale_group == weight.offset_group and tile % part_of(weight, tile) == 0


def part_of(weight: BlockWeight, tile: int) -> int:
    """Inputs of a tile that share a scale."""
    return tile if weight.scale_group % tile == 0 or weight.scale_group >= weight.inputs else weight.scale_group


def one_row(x: Tensor, weight: BlockWeight, bias: Tensor | None, residual: Tensor | None, shape: Tiling) -> Tensor:
    """x [1, in]; the outputs must be a multiple of the shape's columns."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    _one_row[(outputs // shape.columns,)](
        x, weight.values, weight.scales, weight.offsets, out if bias is None else bias,
        out if residual is None else residual, out, inputs, weight.values.stride(0), weight.scales.stride(0),
        COLUMNS=shape.columns, TILE=shape.tile, PART=part_of(weight, shape.tile), GROUP=weight.scale_group,
        HAS_BIAS=bias is not None, ADDS=residual is not None, num_warps=shape.warps, num_stages=shape.stages,
        **overlap(),
    )  # fmt: skip
    return out


def few_rows(x: Tensor, weight: BlockWeight, bias: Tensor | None, residual: Tensor | None, shape: Tiling) -> Tensor:
    """x [rows, in]; the outputs must be a multiple of the shape's columns, and few enough if it splits."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    parts = out
    if shape.splits > 1:
        parts = torch.empty((shape.splits, rows, outputs), dtype=torch.float32, device=x.device)
    _few_rows[(outputs // shape.columns, shape.splits, -(-rows // shape.rows))](
        x, weight.values, weight.scales, weight.offsets, out if bias is None else bias,
        out if residual is None else residual, out, parts, _zeros(x.device), rows, outputs, inputs, x.stride(0),
        weight.values.stride(0), weight.scales.stride(0), ROWS=shape.rows, COLUMNS=shape.columns, TILE=shape.tile,
        PART=part_of(weight, shape.tile), GROUP=weight.scale_group, SPLITS=shape.splits, HAS_BIAS=bias is not None,
        ADDS=residual is not None, num_warps=shape.warps, num_stages=shape.stages, **overlap(),
    )  # fmt: skip
    return out


def shape_for(rows: int, outputs: int, processors: int = 132) -> Tiling | None:
    """None: the matrix is unpacked first. Not tuned: the bytes of the weights decide, and these tiles are large."""
    if rows > MOST_ROWS or outputs % 32:
        return None
    if rows == 1:
        return Tiling(1, 4, 512, 1, 4, 3)
    columns = 64 if outputs % 64 == 0 and outputs >= 64 * processors else 32
    splits = 1 if outputs // columns >= processors else 4
    return Tiling(16 if rows <= 16 else 32, columns, 128, splits, 4, 4)


def linear4(x: Tensor, weight: BlockWeight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, plus a contiguous residual if there is one (which may be overwritten)."""
    shape = shape_for(x.shape[0], weight.shape[0])
    if shape is None or not fits(weight, shape.tile):
        return linear(x, widened(weight, x.dtype), bias, residual)
    return (one_row if x.shape[0] == 1 else few_rows)(x.contiguous(), weight, bias, residual, shape)
