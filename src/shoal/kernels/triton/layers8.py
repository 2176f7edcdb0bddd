"""All layers of a pass with fp8 weights: every product reads fp8 rows, and the kernel that makes such rows reads the
raw product before it. So one operation spans the border of two of a layer's parts, which Ops knows as separate.

    residual ─► norm ─fp8─► QKV ─raw─► rotate, store ─► attention ─► fp8 ─► out ─raw─┐
        ┌────────────────────────────────────────────────────────────────────────────┘
        └► + residual, norm ─fp8─► gate, up ─raw─► SwiGLU ─fp8─► down ─raw─► + residual, norm of the next layer …

Layers are recognised by KINDS and read by name, so that no model needs to be known here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.ops import Batch
from shoal.kernels.triton import rows, rows8
from shoal.kernels.triton.products8 import product
from shoal.kernels.weights import Fp8Weight

KINDS = ("gqa", "gated")  # of attention and MLP
Attention = Callable[[Tensor, Tensor, Tensor, Batch, float, int], Tensor]
Multiply = Callable[[rows8.Fp8Rows, Fp8Weight, Tensor | None, torch.dtype], rows8.Product]


def is_fusable(layers: Sequence[Any]) -> bool:
    """Whether every layer is of the kind known here, with all of its matrices in fp8."""
    return bool(layers) and all(
        (layer.attention.kind, layer.mlp.kind) == KINDS
        and all(
            isinstance(linear.weight, Fp8Weight)
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.out)
        )
        for layer in layers
    )


class Fp8Layers:
    """See FusedLayers."""

    def __init__(self, attend: Attention, layers: Sequence[Any], multiply: Multiply = product) -> None:
        """attend: Ops.attention; multiply: how products are computed."""
        self.attend, self.layers, self.multiply = attend, layers, multiply

    def __call__(
        self, residual: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        due: rows8.Product | None = None  # the last product, which is not in the residual yet
        kind, product = residual.dtype, self.multiply
        for layer, cache in zip(self.layers, kv, strict=True):
            part = layer.attention
            x = rows8.add_norm(residual, due, part.norm, layer.eps)
            norms = None if part.q_norm is None else (part.q_norm, part.k_norm, part.eps)
            qkv = product(x, part.qkv.weight, part.qkv.bias, kind)
            q = rows.rotate_and_store(qkv, norms, rope, cache, batch.slots)
            mixed = self.attend(q, *cache, batch, part.scale, part.window).flatten(1)
            due = product(rows8.quantize(mixed), part.out.weight, part.out.bias, kind)
            part = layer.mlp
            x = rows8.add_norm(residual, due, part.norm, layer.eps)
            inner = rows8.silu_mul(product(x, part.gate_up.weight, part.gate_up.bias, kind))
            due = product(inner, part.out.weight, part.out.bias, kind)
        return residual if due is None else rows8.add(residual, due)
