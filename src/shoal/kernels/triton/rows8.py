"""Row-wise operations around fp8 products in Triton: each reads the raw product before it and writes the fp8 rows that
the next product reads, so that no scale is ever multiplied out in a kernel of its own.

    raw product ─► + residual ─► norm ─► fp8 rows        raw product ─► SwiGLU ─► fp8 rows        attention ─► fp8 rows

A raw product is a sum of products of fp8 numbers: its true value is that times the scale of its row and the scale of
its column. kernels/fp8.py defines fp8 rows. Knows tensors, not models.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.fp8 import FP8
from shoal.kernels.triton.launch import overlap, settle


@dataclass(frozen=True)
class Fp8Rows:
    """Inputs of a product."""

    values: Tensor
    """fp8 [T, n]"""
    scales: Tensor
    """float32 [T]"""


@dataclass(frozen=True)
class Product:
    """The result of a product: values × rows × columns + bias."""

    values: Tensor
    """[T, n]"""
    rows: Tensor | None
    """float32 [T], with columns; None: the values are scaled already."""
    columns: Tensor | None
    """float32 [n]"""
    bias: Tensor | None

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[str, bool]]:
        """For a kernel: the tensors, any where there is none, and which of them are to be read."""
        values = self.values
        rows, columns = (values, values) if self.rows is None or self.columns is None else (self.rows, self.columns)
        flags = {"SCALED": self.rows is not None, "HAS_BIAS": self.bias is not None}
        return (values, rows, columns, values if self.bias is None else self.bias), flags


@triton.jit
def exponent_for(largest):
    """The exponent field of the least power of two s with largest ≤ 448 s; see fp8.exponents_for."""
    return tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)


@triton.jit
def power(exponent):
    """The power of two with this exponent field."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def read_product(values, rows, columns, bias, row, at, column, mask, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """float32: the true values of a product in one row; at: where they lie in values, column: in columns and bias."""
    found = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        found = found * (tl.load(rows + row) * tl.load(columns + column, mask=mask, other=0.0))
    if HAS_BIAS:
        found += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def write_row(value, out, scales, row, i, mask, SIZE: tl.constexpr):
    """float32 values of one row as fp8, and their scale."""
    exponent = exponent_for(tl.max(tl.abs(value), 0))
    tl.store(out + row * SIZE + i, (value * power(254 - exponent)).to(tl.float8e4nv), mask=mask)
    tl.store(scales + row, power(exponent))


@triton.jit
def _add_norm(
    residual, values, rows, columns, bias, weight, out, scales, eps, SIZE: tl.constexpr, ROOM: tl.constexpr,
    ADDS: tl.constexpr, NORMS: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROOM)
    mask = i < SIZE
    stream = tl.load(residual + row * SIZE + i, mask=mask, other=0.0)
    if ADDS:
        added = read_product(values, rows, columns, bias, row, row * SIZE + i, i, mask, SCALED, HAS_BIAS)
        stream = (stream.to(tl.float32) + added).to(stream.dtype)
        tl.store(residual + row * SIZE + i, stream, mask=mask)
    if NORMS:
        wide = stream.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        result = normed.to(stream.dtype) * tl.load(weight + i, mask=mask, other=0.0)
        write_row(result.to(tl.float32), out, scales, row, i, mask, SIZE)


@triton.jit
def _silu_mul(
    values, rows, columns, bias, out, scales, SIZE: tl.constexpr, ROOM: tl.constexpr, SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROOM)
    mask = i < SIZE
    at = row * 2 * SIZE + i
    gate = read_product(values, rows, columns, bias, row, at, i, mask, SCALED, HAS_BIAS)
    up = read_product(values, rows, columns, bias, row, at + SIZE, i + SIZE, mask, SCALED, HAS_BIAS)
    write_row(gate * tl.sigmoid(gate) * up, out, scales, row, i, mask, SIZE)


@triton.jit
def _quantize(x, out, scales, SIZE: tl.constexpr, ROOM: tl.constexpr, OVERLAP: tl.constexpr):
    settle(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROOM)
    mask = i < SIZE
    write_row(tl.load(x + row * SIZE + i, mask=mask, other=0.0).to(tl.float32), out, scales, row, i, mask, SIZE)


def _warps(size: int) -> int:
    """Of the one program that a row has, so that it can find the largest value."""
    return 1 if size <= 256 else 4 if size <= 4096 else 8 if size <= 8192 else 16


def _new_rows(like: Tensor, size: int) -> Fp8Rows:
    count = like.shape[0]
    values = torch.empty((count, size), dtype=FP8, device=like.device)
    return Fp8Rows(values, torch.empty(count, dtype=torch.float32, device=like.device))


def add_norm(residual: Tensor, product: Product | None, weight: Tensor, eps: float) -> Fp8Rows:
    """Add the product to the contiguous residual, in place, then norm it."""
    size = residual.shape[1]
    tensors, flags = (product or Product(residual, None, None, None)).arguments()
    made = _new_rows(residual, size)
    _add_norm[(residual.shape[0],)](
        residual, *tensors, weight, made.values, made.scales, eps, SIZE=size, ROOM=triton.next_power_of_2(size),
        ADDS=product is not None, NORMS=True, **flags, num_warps=_warps(size), **overlap(),
    )  # fmt: skip
    return made


def add(residual: Tensor, product: Product) -> Tensor:
    """Add the product to the contiguous residual, in place."""
    size = residual.shape[1]
    tensors, flags = product.arguments()
    _add_norm[(residual.shape[0],)](
        residual, *tensors, residual, residual, residual, 0.0, SIZE=size, ROOM=triton.next_power_of_2(size), ADDS=True,
        NORMS=False, **flags, num_warps=_warps(size), **overlap(),
    )  # fmt: skip
    return residual


def silu_mul(product: Product) -> Fp8Rows:
    """[T, 2n] → silu of the left half times the right half, [T, n]."""
    size = product.values.shape[1] // 2
    tensors, flags = product.arguments()
    made = _new_rows(product.values, size)
    _silu_mul[(len(product.values),)](
        *tensors, made.values, made.scales, SIZE=size, ROOM=triton.next_power_of_2(size), **flags,
        num_warps=_warps(size), **overlap(),
    )  # fmt: skip
    return made


def quantize(x: Tensor) -> Fp8Rows:
    """Contiguous rows [T, n] as they are."""
    size = x.shape[1]
    made = _new_rows(x, size)
    _quantize[(len(x),)](
        x, made.values, made.scales, SIZE=size, ROOM=triton.next_power_of_2(size), num_warps=_warps(size), **overlap()
    )
    return made
