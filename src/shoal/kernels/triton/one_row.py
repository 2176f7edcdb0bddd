"""All layers of a pass with a single row, as when one request runs alone.

Such a pass is a chain of small kernels, and each of them costs a start and an end. So the products take over what
stands before and after them, the norm of their input, SwiGLU and the residual, and attention takes over the rotation:

    residual ─► norm, QKV ─► rotation, attention ─► out, + residual ─► norm, gate and up, SwiGLU ─► down, + residual

Every program norms the whole row anew, while its first weights arrive. Numbers are rounded where they are in passes
of several rows, but for the newest token's weight in attention, which stays in float32. Layers are recognised by KINDS
and read by name, so that no model needs to be known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.ops import Batch
from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.layers8 import KINDS
from shoal.kernels.triton.one_row_attention import IN_16_BITS
from shoal.kernels.triton.skinny import linear
from shoal.kernels.weights import DenseWeight

Norms = tuple[Tensor, Tensor, float]
Attention = Callable[[Tensor, Norms | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Batch, float, int], Tensor]
MOST_COLUMNS = 8  # of a program


@dataclass(frozen=True)
class RowShape:
    """Of one program: outputs, inputs at a time, warps."""

    columns: int
    tile: int
    warps: int


@triton.jit
def _normed(
    x, norm, weight, bias, out, eps, w_row, wide,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n] = Σ normed x[k] weight[n, k]; GATED: silu of that times the same with weight[n + wide, k]."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, TILE)
    line = weight + n.to(tl.int64)[:, None] * w_row + k[None, :]
    other = line + wide.to(tl.int64) * w_row
    inside = k < SIZE
    w = tl.load(line, mask=inside[None, :], other=0.0)
    if GATED:
        u = tl.load(other, mask=inside[None, :], other=0.0)
    settle(OVERLAP)
    squares = tl.zeros([TILE], tl.float32)
    for start in tl.static_range(0, SIZE, TILE):
        value = tl.load(x + start + k, mask=start + k < SIZE, other=0.0).to(tl.float32)
        squares += value * value
    factor = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    kind = x.dtype.element_ty
    total = tl.zeros([COLUMNS, TILE], tl.float32)
    total_u = tl.zeros([COLUMNS, TILE], tl.float32)
    for start in range(0, SIZE, TILE):
        there = start + k < SIZE
        rest = (start + TILE + k < SIZE)[None, :]
        after = tl.load(line + start + TILE, mask=rest, other=0.0)
        if GATED:
            after_u = tl.load(other + start + TILE, mask=rest, other=0.0)
        value = tl.load(x + start + k, mask=there, other=0.0).to(tl.float32)
        normed = (value * factor).to(kind) * tl.load(norm + start + k, mask=there, other=0.0)
        total += w.to(tl.float32) * normed.to(tl.float32)[None, :]
        w = after
        if GATED:
            total_u += u.to(tl.float32) * normed.to(tl.float32)[None, :]
            u = after_u
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n).to(tl.float32)
    if GATED:
        up = tl.sum(total_u, 1)
        if HAS_BIAS:
            up += tl.load(bias + wide + n).to(tl.float32)
        gate = result.to(kind).to(tl.float32)
        result = ((gate * tl.sigmoid(gate)).to(kind) * up.to(kind)).to(tl.float32)
    tl.store(out + n, result.to(kind))


def normed(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gated: bool, shape: RowShape | None = None
) -> Tensor:
    """One row [1, in], normed, times weight [out, in]; gated: SwiGLU of the result. shape: another than measured."""
    size = x.shape[1]
    wide = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = shape or row_shape(size, gated)
    out = torch.empty((1, wide), dtype=x.dtype, device=x.device)
    _normed[(wide // shape.columns,)](
        x, norm, weight, out if bias is None else bias, out, eps, weight.stride(0), wide, SIZE=size,
        COLUMNS=shape.columns, TILE=shape.tile, GATED=gated, HAS_BIAS=bias is not None, num_warps=shape.warps,
        **overlap(),
    )  # fmt: skip
    return out


def row_shape(size: int, gated: bool) -> RowShape:
    """The fastest found on an H200."""
    if size <= 2048:
        return RowShape(4, 1024, 2) if gated else RowShape(4, 512, 1)
    return RowShape(8, 256, 4) if gated else RowShape(4, 256, 4)


def is_fusable(layers: Sequence[Any]) -> bool:
    """Whether every layer is of the kind known here, with matrices in 16 bits that divide into whole programs."""
    return bool(layers) and all(
        (layer.attention.kind, layer.mlp.kind) == KINDS
        and all(
            isinstance(one.weight, DenseWeight) and one.weight.values.dtype in IN_16_BITS
            for one in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.out)
        )
        and layer.attention.qkv.weight.shape[0] % MOST_COLUMNS == 0
        and layer.mlp.gate_up.weight.shape[0] % (2 * MOST_COLUMNS) == 0
        for layer in layers
    )


class OneRowLayers:
    """See FusedLayers."""

    def __init__(self, attend: Attention, layers: Sequence[Any]) -> None:
        """attend: from QKV to the input of the output projection."""
        self.attend, self.layers = attend, layers

    def __call__(
        self, residual: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        if residual.shape[0] != 1 or batch.width:
            return None
        for layer, cache in zip(self.layers, kv, strict=True):
            part = layer.attention
            qkv = normed(residual, part.norm, layer.eps, part.qkv.weight.values, part.qkv.bias, False)
            norms = None if part.q_norm is None else (part.q_norm, part.k_norm, part.eps)
            mixed = self.attend(qkv, norms, rope, cache, batch, part.scale, part.window).flatten(1)
            residual = linear(mixed, part.out.weight.values, part.out.bias, residual)
            part = layer.mlp
            inner = normed(residual, part.norm, layer.eps, part.gate_up.weight.values, part.gate_up.bias, True)
            residual = linear(inner, part.out.weight.values, part.out.bias, residual)
        return residual
