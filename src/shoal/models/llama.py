"""Llama and its relatives: Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3. They differ only in their ModelSpec.

Owns the order of operations in a layer and how a checkpoint's tensors are fused. Does not know files, devices,
requests or how attention finds its blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from shoal.kernels import Batch, Ops
from shoal.models.layers import Linear, Norm, Place, RopeTable, weight_of
from shoal.models.spec import ModelSpec


class Attention:
    """Queries, keys and values in one product; keys and values go to the cache before anyone reads it.

    The result is added to the residual stream.
    """

    def __init__(self, spec: ModelSpec, layer: int, params: Mapping[str, Tensor], ops: Ops) -> None:
        name = f"layers.{layer}"
        self.spec, self.ops = spec, ops
        self.window = spec.windows[layer]
        self.scale = spec.head_dim**-0.5
        self.qkv = Linear(params, f"{name}.qkv", ops)
        self.out = Linear(params, f"{name}.out", ops)
        self.norms: tuple[Tensor, Tensor, float] | None = None  # of queries and keys, per head
        if spec.qk_norm:
            self.norms = (params[f"{name}.q_norm.weight"], params[f"{name}.k_norm.weight"], spec.norm_eps)

    def __call__(
        self, x: Tensor, residual: Tensor, turn: tuple[Tensor, Tensor], batch: Batch, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        q = self.ops.rotate_and_store(self.qkv(x), self.norms, turn, cache, batch.slots)
        mixed = self.ops.attention(q, *cache, batch, self.scale, self.window)
        return self.out.add(mixed.reshape(x.shape[0], self.spec.q_size), residual)


class Layer:
    """Attention, then the gated linear pair; the last product of each adds to the residual stream."""

    def __init__(self, spec: ModelSpec, layer: int, params: Mapping[str, Tensor], ops: Ops) -> None:
        name = f"layers.{layer}"
        self.ops = ops
        self.attention_norm = Norm(params, f"{name}.attention_norm", spec.norm_eps, ops)
        self.attention = Attention(spec, layer, params, ops)
        self.mlp_norm = Norm(params, f"{name}.mlp_norm", spec.norm_eps, ops)
        self.gate_up = Linear(params, f"{name}.gate_up", ops)
        self.down = Linear(params, f"{name}.down", ops)

    def mlp(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down.add(self.ops.silu_mul(self.gate_up(x)), residual)


class LlamaModel:
    """The decoder. Call it under torch.inference_mode.

    forward gives the hidden rows before the final norm; logits applies that norm, so that only the rows which are
    sampled pay for it.
    """

    def __init__(self, spec: ModelSpec, params: Mapping[str, Tensor], ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        self.embedding = weight_of(params, "embedding")
        self.layers = [Layer(spec, layer, params, ops) for layer in range(spec.layers)]
        self.norm = Norm(params, "norm", spec.norm_eps, ops)
        self.head = self.embedding if spec.tie_embeddings else weight_of(params, "head")
        self.rope = RopeTable(spec.rope, spec.head_dim, params["norm.weight"].device)

    def reserve_positions(self, count: int) -> None:
        """Make the rope tables hold positions 0..count-1."""
        self.rope.reserve(count)

    def forward(self, ids: Tensor, batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """ids [T] → hidden [T, hidden], before the final norm. Writes this pass's keys and values into kv."""
        turn = self.rope.rows(batch.positions, batch.longest)
        residual = self.ops.embed(ids, self.embedding)
        for layer, cache in zip(self.layers, kv, strict=True):
            residual = layer.attention(layer.attention_norm(residual), residual, turn, batch, cache)
            residual = layer.mlp(layer.mlp_norm(residual), residual)
        return residual

    def scores(self, hidden_rows: Tensor) -> Tensor:
        """Final norm and lm_head: rows of forward's result → [rows, vocab] in the model's type."""
        return self.ops.linear(self.norm(hidden_rows), self.head, None)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """The same in float32."""
        return self.scores(hidden_rows).float()

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
