"""Llama and its relatives: Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3. They differ only in their ModelSpec.

Owns what stands around the layers: embedding, final norm and lm_head. Does not know files, devices or requests.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from shoal.kernels import Batch, Ops
from shoal.kernels.weights import Parameters
from shoal.models import layout
from shoal.models.layer import Layer, run_layers
from shoal.models.layout import Fused
from shoal.models.rope import RopeTable
from shoal.models.shard import WHOLE, Shard
from shoal.models.spec import ModelSpec


class LlamaModel:
    """The decoder. Call it under torch.inference_mode.

    forward returns the hidden rows before the final norm; logits applies that norm, so that only the rows which are
    sampled pay for it.
    """

    def __init__(self, spec: ModelSpec, params: Parameters, ops: Ops, shard: Shard = WHOLE) -> None:
        self.spec, self.ops, self.shard = spec, ops, shard
        self.embedding = params.weights["embedding.weight"]
        self.layers = [Layer.of(spec, number, f"layers.{number}", params, shard) for number in range(spec.layers)]
        self.norm = params.vectors["norm.weight"]
        self.dtype = self.norm.dtype
        self.head = self.embedding if spec.tie_embeddings else params.weights["head.weight"]
        self.rope = RopeTable(spec.rope, spec.head_dim, self.norm.device)
        self.fused = shard.fused(lambda: ops.fused(self.layers))

    def shortened(self, layers: int) -> "LlamaModel":
        """The first layers, with the same final norm and head."""
        found = copy(self)
        found.spec = replace(self.spec, layers=layers, windows=self.spec.windows[:layers])
        found.layers = self.layers[:layers]
        found.fused = self.shard.fused(lambda: self.ops.fused(found.layers))
        return found

    def twin(self) -> "LlamaModel":
        """The same weights, for another thread: what is kept between passes belongs to one of them."""
        found = copy(self)
        found.ops = copy(self.ops)
        found.rope = RopeTable(self.spec.rope, self.spec.head_dim, self.norm.device)
        found.fused = self.shard.fused(lambda: found.ops.fused(found.layers))
        return found

    def reserve_positions(self, count: int) -> None:
        """Make the rope tables hold positions 0..count-1."""
        self.rope.reserve(count)

    def forward(self, ids: Tensor, batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """ids [T] → hidden [T, hidden], before the final norm. Writes this pass's keys and values into kv."""
        rope = self.rope.rows(batch.positions, batch.longest)
        return self.run_layers(self.shard.embed(self.ops, ids, self.embedding), rope, batch, kv)

    def run_layers(
        self, residual: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """All layers: in one call if the device offers that for this pass, else one operation after the other."""
        found = None if self.fused is None else self.fused(residual, rope, batch, kv)
        return run_layers(self.ops, self.layers, residual, rope, batch, kv) if found is None else found

    def scores(self, hidden_rows: Tensor) -> Tensor:
        """Final norm and lm_head: rows of forward's result → [rows, vocab] in the model's type."""
        scores = self.ops.linear(self.ops.rms_norm(hidden_rows, self.norm, self.spec.norm_eps), self.head, None)
        return self.shard.scores(scores, self.spec.vocab_size)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """The same in float32."""
        scores = self.scores(hidden_rows)
        return scores if scores.dtype is torch.float32 else scores.float()

    @staticmethod
    def layout(spec: ModelSpec) -> Iterator[Fused]:
        """Every parameter, and the checkpoint's tensors in each."""
        table = (spec.vocab_size, spec.hidden_size)
        yield "embedding.weight", [("model.embed_tokens.weight", table)]
        for number in range(spec.layers):
            yield from Layer.layout(spec, number, f"layers.{number}", f"model.layers.{number}")
        yield from layout.norm("norm", "model.norm", spec.hidden_size)
        if not spec.tie_embeddings:
            yield "head.weight", [("lm_head.weight", table)]
