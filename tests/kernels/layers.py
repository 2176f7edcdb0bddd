"""Layers with random weights, for tests of all layers in one call."""

import torch

from shoal import kernels
from shoal.kernels.cpu import NativeOps
from shoal.kernels.int8 import Weight
from shoal.models.layers import weight_of


def a_layer(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    normed: bool,
    biased: bool,
    hidden: int = 48,
    inner: int = 72,
) -> kernels.Layer:
    kv = kv_heads * dim

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)

    def bias(size: int) -> torch.Tensor | None:
        return torch.randn(size).to(dtype) if biased else None

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size).to(dtype)

    return kernels.Layer(
        attention_norm=norm(hidden),
        qkv=matrix(heads * dim + 2 * kv, hidden),
        qkv_bias=bias(heads * dim + 2 * kv),
        q_norm=norm(dim) if normed else None,
        k_norm=norm(dim) if normed else None,
        out=matrix(hidden, heads * dim),
        out_bias=bias(hidden),
        mlp_norm=norm(hidden),
        gate_up=matrix(2 * inner, hidden),
        gate_up_bias=bias(2 * inner),
        down=matrix(hidden, inner),
        down_bias=bias(hidden),
        eps=1e-5,
        scale=dim**-0.5,
        window=9 if biased else 0,
    )


def as_arranged(ops: NativeOps, weight: torch.Tensor) -> Weight:
    """As a model would get it."""
    return weight_of(ops.arranged({"w.weight": weight.clone()}), "w")
