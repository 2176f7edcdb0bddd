"""Llama and its relatives: Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3. They differ only in their ModelSpec.

Owns what a layer is made of and how a checkpoint's tensors are fused. Does not know files, devices,
requests, or in which order a layer is computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shoal.kernels import Batch, Layer, Ops
from shoal.models.layers import Place, RopeTable, weight_of
from shoal.models.spec import ModelSpec


def layer_of(spec: ModelSpec, number: int, params: Mapping[str, Tensor]) -> Layer:
    """Queries, keys and values in one product, gate and up in another."""
    name = f"layers.{number}"
    return Layer(
        attention_norm=params[f"{name}.attention_norm.weight"],
        qkv=weight_of(params, f"{name}.qkv"),
        qkv_bias=params.get(f"{name}.qkv.bias"),
        q_norm=params.get(f"{name}.q_norm.weight"),
        k_norm=params.get(f"{name}.k_norm.weight"),
        out=weight_of(params, f"{name}.out"),
        out_bias=params.get(f"{name}.out.bias"),
        mlp_norm=params[f"{name}.mlp_norm.weight"],
        gate_up=weight_of(params, f"{name}.gate_up"),
        gate_up_bias=params.get(f"{name}.gate_up.bias"),
        down=weight_of(params, f"{name}.down"),
        down_bias=params.get(f"{name}.down.bias"),
        eps=spec.norm_eps,
        scale=spec.head_dim**-0.5,
        window=spec.windows[number],
    )


class LlamaModel:
    """The decoder. Call it under torch.inference_mode.

    forward gives the hidden rows before the final norm; logits applies that norm, so that only the rows which are
    sampled pay for it.
    """

    def __init__(self, spec: ModelSpec, params: Mapping[str, Tensor], ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        self.embedding = weight_of(params, "embedding")
        self.layers = [layer_of(spec, number, params) for number in range(spec.layers)]
        self.norm = params["norm.weight"]
        self.head = self.embedding if spec.tie_embeddings else weight_of(params, "head")
        self.rope = RopeTable(spec.rope, spec.head_dim, params["norm.weight"].device)

    def reserve_positions(self, count: int) -> None:
        """Make the rope tables hold positions 0..count-1."""
        self.rope.reserve(count)

    def forward(self, ids: Tensor, batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """ids [T] → hidden [T, hidden], before the final norm. Writes this pass's keys and values into kv."""
        turn = self.rope.rows(batch.positions, batch.longest)
        residual = self.ops.embed(ids, self.embedding)
        return self.ops.layers(self.layers, residual, turn, batch, kv)

    def scores(self, hidden_rows: Tensor) -> Tensor:
        """Final norm and lm_head: rows of forward's result → [rows, vocab] in the model's type."""
        return self.ops.linear(self.ops.rms_norm(hidden_rows, self.norm, self.spec.norm_eps), self.head, None)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """The same in float32."""
        scores = self.scores(hidden_rows)
        return scores if scores.dtype is torch.float32 else scores.float()

    @staticmethod
    def parameter_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
        """Every fused parameter and its shape."""
        return [(name, (sum(part[1][0] for part in parts), *parts[0][1][1:])) for name, parts in _fused(spec)]

    @staticmethod
    def sources(spec: ModelSpec) -> dict[str, Place]:
        """Hugging Face tensor name → the rows of the fused parameter it fills."""
        places = {}
        for parameter, parts in _fused(spec):
            firsts = [0]
            for _, shape in parts:
                firsts.append(firsts[-1] + shape[0])
            for (source, shape), (first, _) in zip(parts, pairwise(firsts), strict=True):
                places[source] = Place(parameter, first, shape)
        return places


Part = tuple[str, tuple[int, ...]]


def _fused(spec: ModelSpec) -> Iterator[tuple[str, list[Part]]]:
    """(our name, the checkpoint's tensors stacked in it, with their shapes): the whole layout as data."""
    yield "embedding.weight", [("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))]
    for layer in range(spec.layers):
        yield from _fused_layer(spec, f"layers.{layer}", f"model.layers.{layer}")
    yield "norm.weight", [("model.norm.weight", (spec.hidden_size,))]
    if not spec.tie_embeddings:
        yield "head.weight", [("lm_head.weight", (spec.vocab_size, spec.hidden_size))]


def _fused_layer(spec: ModelSpec, ours: str, theirs: str) -> Iterator[tuple[str, list[Part]]]:
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    qkv = [(f"{attention}.q_proj", q, hidden), (f"{attention}.k_proj", kv, hidden), (f"{attention}.v_proj", kv, hidden)]
    gate_up = [(f"{mlp}.gate_proj", inner, hidden), (f"{mlp}.up_proj", inner, hidden)]
    linears = [
        ("qkv", qkv, spec.qkv_bias),
        ("out", [(f"{attention}.o_proj", hidden, q)], spec.out_bias),
        ("gate_up", gate_up, spec.mlp_bias),
        ("down", [(f"{mlp}.down_proj", hidden, inner)], spec.mlp_bias),
    ]
    for name, parts, bias in linears:
        yield f"{ours}.{name}.weight", [(f"{source}.weight", (rows, columns)) for source, rows, columns in parts]
        if bias:
            yield f"{ours}.{name}.bias", [(f"{source}.bias", (rows,)) for source, rows, _ in parts]
    yield f"{ours}.attention_norm.weight", [(f"{theirs}.input_layernorm.weight", (hidden,))]
    yield f"{ours}.mlp_norm.weight", [(f"{theirs}.post_attention_layernorm.weight", (hidden,))]
    if spec.qk_norm:
        yield f"{ours}.q_norm.weight", [(f"{attention}.q_norm.weight", (spec.head_dim,))]
        yield f"{ours}.k_norm.weight", [(f"{attention}.k_norm.weight", (spec.head_dim,))]
