"""Layers: which operations they are made of, how they join the residual stream, and when a device fuses them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from shoal.kernels.cpu import CpuOps
from shoal.kernels.ops import FusedLayers
from shoal.kernels.ref import RefOps
from shoal.models import make_model, spec_from_config
from shoal.models.layer import run_layers
from shoal.models.shard import Shard
from shoal.runner.loader import dummy_weights
from tests.kernels.layers import a_layer
from tests.kernels.ragged import Tables

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


class Recorded:
    """Ops that records the names of the operations called."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._ops = RefOps()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.names.append(name)
            return getattr(self._ops, name)(*args)

        return call


def pass_of(layers: int, kv_heads: int, dim: int) -> tuple[Any, ...]:
    tables = Tables([7], 4)
    angles = torch.randn(7, dim // 2)
    kv = [tuple(torch.zeros(2, tables.blocks, 4, kv_heads, dim)) for _ in range(layers)]
    return (angles.cos(), angles.sin()), tables.batch([(0, 0, 7)]), kv


def test_a_layer_is_attention_then_an_mlp() -> None:
    ops, one = Recorded(), a_layer(torch.float32, 4, 2, 8, normed=True, biased=True)
    run_layers(ops, [one], torch.randn(7, 48), *pass_of(1, 2, 8))
    attention = ["rms_norm", "linear", "rotate_and_store", "attention", "linear_add"]
    assert ops.names == [*attention, "rms_norm", "linear", "silu_mul", "linear_add"]


def test_every_addition_to_the_residual_stream_goes_through_the_shard() -> None:
    """So that the outputs of several devices can be added up before the residual."""
    layers = [a_layer(torch.float32, 4, 2, 8, normed=False, biased=True) for _ in range(2)]
    start, arguments = torch.randn(7, 48), pass_of(2, 2, 8)
    wanted = run_layers(RefOps(), layers, start.clone(), *arguments)
    outputs = []

    class InTwoSteps(Shard):
        def add_output(self, ops: Any, output: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            outputs.append(output)
            return cast(torch.Tensor, output(ops, x) + residual)

    layers = [replace(layer, shard=InTwoSteps()) for layer in layers]
    ops = Recorded()
    torch.testing.assert_close(run_layers(ops, layers, start.clone(), *arguments), wanted)
    assert outputs == [one for layer in layers for one in (layer.attention.out, layer.mlp.out)]
    assert "linear_add" not in ops.names


class Fusing(CpuOps):
    """Computes a stack in one call, or leaves it to the model."""

    def __init__(self, answer: torch.Tensor | None) -> None:
        super().__init__()
        self.answer = answer
        self.stacks: list[Sequence[Any]] = []

    def fused(self, layers: Sequence[Any]) -> FusedLayers | None:
        self.stacks.append(layers)
        return lambda residual, rope, batch, kv: self.answer


@pytest.mark.parametrize("answered", [True, False])
def test_a_stack_is_fused_if_the_device_offers_that_for_the_pass(answered: bool) -> None:
    spec = spec_from_config(CONFIG)
    params = dummy_weights(spec, torch.float32, "cpu")
    _, batch, kv = pass_of(spec.layers, spec.kv_heads, spec.head_dim)
    ids = torch.arange(7)
    with torch.inference_mode():
        wanted = make_model(spec, params, CpuOps()).forward(ids, batch, kv)
        answer = torch.randn(7, 32) if answered else None
        ops = Fusing(answer)
        model = make_model(spec, params, ops)
        found = model.forward(ids, batch, kv)
    assert [len(stack) for stack in ops.stacks] == [spec.layers], "asked once, when the model is made"
    assert torch.equal(found, wanted if answer is None else answer)
