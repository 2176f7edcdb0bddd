"""Products of fp8 rows with fp8 weights, by the way that suits their sizes.

    one row    of a small matrix: a Triton kernel that streams the weights; the result is scaled
    unit       cuBLASLt with scales of one, which is the fastest for few rows. The result is raw: the kernel that reads
               it multiplies by the scales of rows and columns, which factor out of the sum
    rowwise    with the scales of rows and columns in the product itself

Which way suits which sizes was measured on an H200 by benchmarks/gpu_fp8.py, which compares all three. Knows tensors,
not models.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.rows8 import Fp8Rows, Product
from shoal.kernels.weights import Fp8Weight

# from so many rows on, products of so few outputs are as fast with their scales
MANY_ROWS = 1024
NARROW = 8192
LARGE = 2**24  # numbers of a matrix that cuBLASLt streams faster also for one row


@triton.jit
def _one_row(
    x, x_scale, weight, scales, bias, out, size, COLUMNS: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n] = Σ x[k] weight[n, k], one row of x. The next tile of weights is loaded while one is used."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, TILE)
    line = weight + n.to(tl.int64)[:, None] * size + k[None, :]
    total = tl.zeros([COLUMNS, TILE], tl.float32)
    w = tl.load(line, mask=(k < size)[None, :], other=0.0)
    settle(OVERLAP)
    for start in range(0, size, TILE):
        after = tl.load(line + start + TILE, mask=(start + TILE + k < size)[None, :], other=0.0)
        value = tl.load(x + start + k, mask=start + k < size, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)[None, :]
        w = after
    result = tl.sum(total, 1) * (tl.load(x_scale) * tl.load(scales + n))
    if HAS_BIAS:
        result += tl.load(bias + n).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty))


def one_row(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> Product:
    """One row; shape: columns of a program (the outputs are a multiple of them), inputs of a tile, warps, stages."""
    columns, tile, warps, stages = shape
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=dtype, device=x.values.device)
    _one_row[(outputs // columns,)](
        x.values, x.scales, weight.values, weight.scales, out if bias is None else bias, out, inputs, COLUMNS=columns,
        TILE=tile, HAS_BIAS=bias is not None, num_warps=warps, num_stages=stages, **overlap(),
    )  # fmt: skip
    return Product(out, None, None, None)


def one_row_shape(inputs: int, outputs: int) -> tuple[int, int, int, int]:
    return (2, 1024, 2, 3) if outputs % 4 else (4, 1024, 2, 3)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def unit(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """The sums themselves, which bfloat16 and float32 can hold."""
    one = _one(x.values.device)
    raw = torch._scaled_mm(x.values, weight.values.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True)
    return Product(raw, x.scales, weight.scales, bias)


def rowwise(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None) -> Product:
    """Scaled by the product itself, in bfloat16."""
    scaled = torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scales.unsqueeze(1), scale_b=weight.scales.unsqueeze(0),
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return Product(scaled, None, None, bias)


def way_for(rows: int, inputs: int, outputs: int) -> str:
    if rows == 1 and inputs * outputs < LARGE:
        return "one row"
    return "rowwise" if rows >= MANY_ROWS and outputs <= NARROW else "unit"


def product(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """x Wᵀ + b in bfloat16 or float32, whose scales may still be due."""
    outputs, inputs = weight.shape
    way = way_for(len(x.values), inputs, outputs)
    if way == "one row":
        return one_row(x, weight, bias, dtype, one_row_shape(inputs, outputs))
    if way == "rowwise" and dtype == torch.bfloat16:
        return rowwise(x, weight, bias)
    return unit(x, weight, bias, dtype)
