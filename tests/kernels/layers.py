"""Layers with random weights, for tests of all layers in one call."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.kernels import Batch, Ops
from shoal.kernels.weights import DenseWeight, Weight, quantize
from shoal.models.attention import GroupedQueryAttention
from shoal.models.layer import Layer, run_layers
from shoal.models.linear import Linear
from shoal.models.mlp import GatedMlp

NAMES = ("qkv", "out", "gate_up", "down")


def a_layer(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    normed: bool,
    biased: bool,
    hidden: int = 48,
    inner: int = 72,
) -> Layer:
    kv = kv_heads * dim

    def linear(outputs: int, inputs: int) -> Linear:
        values = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
        return Linear(DenseWeight(values), torch.randn(outputs).to(dtype) if biased else None)

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size).to(dtype)

    attention = GroupedQueryAttention(
        norm=norm(hidden),
        qkv=linear(heads * dim + 2 * kv, hidden),
        q_norm=norm(dim) if normed else None,
        k_norm=norm(dim) if normed else None,
        out=linear(hidden, heads * dim),
        eps=1e-5,
        scale=dim**-0.5,
        window=9 if biased else 0,
    )
    return Layer(attention, GatedMlp(norm(hidden), linear(2 * inner, hidden), linear(hidden, inner)), 1e-5)


def with_weights(layer: Layer, how: Callable[[Weight], Weight], names: Sequence[str] = NAMES) -> Layer:
    """The layer with some of its weights in another format."""

    def changed(linear: Linear, name: str) -> Linear:
        return replace(linear, weight=how(linear.weight)) if name in names else linear

    attention, mlp = layer.attention, layer.mlp
    attention = replace(attention, qkv=changed(attention.qkv, "qkv"), out=changed(attention.out, "out"))
    mlp = replace(mlp, gate_up=changed(mlp.gate_up, "gate_up"), out=changed(mlp.out, "down"))
    return Layer(attention, mlp, layer.eps)


def on(device: str, layer: Layer) -> Layer:
    """The layer on a device."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, DenseWeight):
            return DenseWeight(value.values.to(device))
        if not hasattr(value, "__dataclass_fields__"):
            return value
        return replace(value, **{name: moved(getattr(value, name)) for name in value.__dataclass_fields__})

    found: Layer = moved(layer)
    return found


def in_8_bits(weight: Weight) -> Weight:
    return quantize(weight.dense())


def prepared(ops: Ops, weight: Weight) -> Weight:
    """As a model would get it; the one given is not changed."""
    if isinstance(weight, DenseWeight):
        return ops.prepare(DenseWeight(weight.values.clone()))
    return ops.prepare(quantize(weight.dense()))


def in_one_call(
    ops: Ops,
    layers: Sequence[Layer],
    residual: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    fused = ops.fused(layers)
    assert fused is not None
    found = fused(residual, rope, batch, kv)
    assert found is not None
    return found


__all__ = ["NAMES", "a_layer", "in_8_bits", "in_one_call", "on", "prepared", "run_layers", "with_weights"]
