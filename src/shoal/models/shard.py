"""Shard: which part of a model one rank holds, and how ranks add up what they computed. The only place that knows it.

    q k v, gate up     rows are split: each rank computes some heads, some inner values
    out, down          columns are split: each rank computes a part of the sum, and all ranks add up the parts
    embedding, head    rows are split: each rank has some of the vocabulary; rank 0 gathers all scores and samples
    norms, other biases  are whole on every rank

Heads are split by KV heads, each with the query heads that share it. Where there are fewer KV heads than ranks, several
ranks hold the same KV head and share its query heads. Numbers that do not divide are split as evenly as they can be.
One process is a Shard, too: the whole model, and nothing to add up. Knows specs and names of checkpoint tensors; does
not know files, processes or how ranks are connected.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import BadConfig
from shoal.kernels import FusedLayers, Ops
from shoal.kernels.weights import Weight
from shoal.models.layout import Cut
from shoal.models.linear import Linear
from shoal.models.spec import ModelSpec

VOCAB_UNIT = 16  # rows of the vocabulary are split in multiples of this: whole tiles for CPU kernels
INNER_UNIT = 32  # inner values likewise, where there are enough of them


class RankGroup(Protocol):
    """Ranks that compute together. Every rank makes the same calls in the same order."""

    def sum_(self, x: Tensor) -> None:
        """Replace x on every rank by the sum over all ranks; the same bits everywhere."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank, all of one shape, on rank 0; elsewhere nothing."""

    def send_(self, x: Tensor) -> None:
        """Replace x on every rank by that of rank 0."""


class Shard:
    """The whole model in one process: rank 0 of 1."""

    rank = 0
    size = 1

    def check(self, spec: ModelSpec) -> None:
        """Raise BadConfig if this model cannot be split so."""

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The part of the model that this rank computes; its vocabulary is whole."""
        return spec

    def cut(self, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Cut:
        """What this rank holds of a checkpoint's tensor of a (whole) model."""
        return Cut(0, 0, shape[0], shape[0])

    def fused(self, made: Callable[[], FusedLayers | None]) -> FusedLayers | None:
        """All layers in one call, if `made` makes that; None where parts must be added up between the layers."""
        return made()

    def embed(self, ops: Ops, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of the embedding, of which this rank holds `weight`."""
        return ops.embed(ids, weight)

    def add_output(self, ops: Ops, output: Linear, x: Tensor, residual: Tensor) -> Tensor:
        """The residual stream after a projection whose inputs are split; the one given is used up."""
        return ops.linear_add(x, output.weight, output.bias, residual)

    def scores(self, part: Tensor, vocab_size: int) -> Tensor:
        """Scores [rows, vocab] from those of this rank's part of the vocabulary. Only rank 0 has them all."""
        return part

    def agreed(self, ids: Tensor) -> Tensor:
        """The ids of rank 0, which alone knows what was sampled."""
        return ids


WHOLE = Shard()


class SplitShard(Shard):
    """One of several ranks."""

    def __init__(self, rank: int, size: int, group: RankGroup) -> None:
        self.rank, self.size, self.group = rank, size, group

    def check(self, spec: ModelSpec) -> None:
        size, heads, kv_heads = self.size, spec.heads, spec.kv_heads
        if kv_heads < size and (size % kv_heads or heads % size):
            raise BadConfig(
                f"tensor_parallel_size {size} does not fit a model with {heads} query heads and {kv_heads} KV heads: "
                f"each rank needs at least one KV head, or the same share of the query heads of one; "
                f"use {_fitting(spec)}"
            )
        if spec.intermediate_size < size:
            raise BadConfig(f"tensor_parallel_size {size} exceeds the intermediate size {spec.intermediate_size}")

    def local(self, spec: ModelSpec) -> ModelSpec:
        first, last = self._kv_heads(spec)
        first_query, last_query = self._heads(spec)
        first_inner, last_inner = self._inner(spec)
        return replace(
            spec,
            heads=last_query - first_query,
            kv_heads=last - first,
            intermediate_size=last_inner - first_inner,
        )

    def cut(self, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Cut:
        parts = name.split(".")
        module, kind = parts[-2], parts[-1]
        if module in ("embed_tokens", "lm_head"):
            part = self.vocab_part(spec.vocab_size)
            first = min(self.rank * part, spec.vocab_size)
            return Cut(0, first, min(part, spec.vocab_size - first), part)
        if module in ("q_proj", "k_proj", "v_proj"):
            first, last = self._heads(spec) if module == "q_proj" else self._kv_heads(spec)
            return _span(0, first * spec.head_dim, last * spec.head_dim)
        if module in ("gate_proj", "up_proj"):
            return _span(0, *self._inner(spec))
        if module in ("o_proj", "down_proj") and kind == "weight":
            if module == "down_proj":
                return _span(1, *self._inner(spec))
            first, last = self._heads(spec)
            return _span(1, first * spec.head_dim, last * spec.head_dim)
        return super().cut(spec, name, shape)

    def fused(self, made: Callable[[], FusedLayers | None]) -> FusedLayers | None:
        return None

    def embed(self, ops: Ops, ids: Tensor, weight: Weight) -> Tensor:
        here = ids - self.rank * weight.shape[0]
        absent = (here < 0) | (here >= weight.shape[0])
        rows = ops.embed(here.masked_fill(absent, 0), weight).masked_fill(absent[:, None], 0)
        self.group.sum_(rows)
        return rows

    def add_output(self, ops: Ops, output: Linear, x: Tensor, residual: Tensor) -> Tensor:
        part = ops.linear(x, output.weight, None)
        self.group.sum_(part)
        if output.bias is not None:
            part += output.bias
        return residual.add_(part)

    def scores(self, part: Tensor, vocab_size: int) -> Tensor:
        parts = self.group.gather(part.contiguous())
        return torch.cat(parts, dim=1)[:, :vocab_size].contiguous() if parts else part

    def agreed(self, ids: Tensor) -> Tensor:
        self.group.send_(ids)
        return ids

    def vocab_part(self, vocab_size: int) -> int:
        """Rows of the vocabulary on every rank; the last ones may have fewer, and zeros behind them."""
        return -(-vocab_size // (self.size * VOCAB_UNIT)) * VOCAB_UNIT

    def _kv_heads(self, spec: ModelSpec) -> tuple[int, int]:
        if spec.kv_heads < self.size:
            held = self.rank * spec.kv_heads // self.size
            return held, held + 1
        return _share(self.rank, self.size, spec.kv_heads)

    def _heads(self, spec: ModelSpec) -> tuple[int, int]:
        if spec.kv_heads < self.size:
            return _share(self.rank, self.size, spec.heads)
        first, last = self._kv_heads(spec)
        each = spec.heads // spec.kv_heads
        return first * each, last * each

    def _inner(self, spec: ModelSpec) -> tuple[int, int]:
        unit = INNER_UNIT if spec.intermediate_size % INNER_UNIT == 0 else 1
        units = spec.intermediate_size // unit
        if units < self.size:
            unit, units = 1, spec.intermediate_size
        # the ranks with fewer heads come last in _share; here they come first, so that the work evens out
        first, last = _share(self.size - 1 - self.rank, self.size, units)
        return (units - last) * unit, (units - first) * unit


def _share(rank: int, size: int, count: int) -> tuple[int, int]:
    """[first, last) of `count` things; the first ranks have one more where they do not divide.

    >>> [_share(rank, 2, 3) for rank in range(2)]
    [(0, 2), (2, 3)]
    """
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def _span(axis: int, first: int, last: int) -> Cut:
    return Cut(axis, first, last - first, last - first)


def _fitting(spec: ModelSpec) -> str:
    """Numbers of ranks that fit, beyond those up to the number of KV heads."""
    more = [
        size for size in range(spec.kv_heads + 1, spec.heads + 1) if not size % spec.kv_heads and not spec.heads % size
    ]
    upto = f"1 to {spec.kv_heads}" if spec.kv_heads > 1 else "1"
    return f"{upto}{''.join(f', {size}' for size in more[:4])}"
