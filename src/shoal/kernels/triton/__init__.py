"""Kernels for NVIDIA GPUs: Triton for fused operations and attention, cuBLAS for most matrix products.

Owns how a ragged batch becomes the tables that attention.py reads, and which kernel computes what. ref.py defines the
meaning of everything here; measurements are in docs/lab/gpu.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from shoal.core.plan import Ints
from shoal.core.ports import LateMasks
from shoal.kernels import torch_choose
from shoal.kernels.block_weight import BlockWeight
from shoal.kernels.draw_table import Filters, SamplingState
from shoal.kernels.fp8 import FP8
from shoal.kernels.ops import Batch, FusedLayers, PassOps
from shoal.kernels.padded import padded_attention
from shoal.kernels.ref import RefOps
from shoal.kernels.triton import attention as kernels
from shoal.kernels.triton import draw, one_row, one_row_attention, rows, rows8, step
from shoal.kernels.triton.layers8 import Fp8Layers, is_fusable
from shoal.kernels.triton.one_row import OneRowLayers
from shoal.kernels.triton.products4 import linear4
from shoal.kernels.triton.products8 import product
from shoal.kernels.triton.skinny import linear
from shoal.kernels.weights import DenseWeight, Fp8Weight, Weight

__all__ = ["AttentionTables", "TritonOps", "split_batch"]


def values_of(weight: Weight) -> Tensor:
    """The matrix itself. Other formats are for CPUs; the config refuses them on a GPU."""
    if not isinstance(weight, DenseWeight):
        raise TypeError(f"{type(weight).__name__} has no kernel for GPUs")
    return weight.values


@dataclass(frozen=True)
class AttentionTables:
    """How attention is computed in one pass: its decodes, and the blocks of queries of its prompts."""

    tables: Tensor
    """int32 [rows, widest]: blocks of every row, those outside this pass included"""
    decodes: Tensor
    """int32 [4, n]: row, context (0: padding), index of its first query, its queries"""
    blocks: Tensor
    """int32 [5, m]: row (PADDING: none), index of the row's first query, its queries, this block's first, context"""
    long: bool = False
    """A decode's past is longer than kernels.LONG."""
    queries: int = 1
    """One of kernels.few_queries: no decode has more."""


class TritonOps(RefOps):
    """Ops and PassOps on CUDA; an op that is not here is ref's, in torch."""

    long_context = kernels.LONG

    def __init__(self) -> None:
        self._last: tuple[Batch, int, AttentionTables] | None = None
        self._processors = 0
        self._arrived: Tensor | None = None
        self._old: list[Tensor | None] = []

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight, in its own type."""
        return embedding(ids, values_of(weight))

    def choose(
        self,
        scores: Tensor,
        rows: Ints,
        positions: Ints,
        state: SamplingState,
        masks: LateMasks | None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All lines at once, in torch; what needs neither edits nor masks is drawn by `draw`."""
        return torch_choose.choose(scores, rows, positions, state, masks, expected)

    @property
    def pass_ops(self) -> PassOps:
        """Passes are recorded."""
        return self

    def queries_per_block(self, group: int, head_dim: int, kind: torch.dtype) -> int:
        return kernels.queries_per_block(group, head_dim, kind)

    def few_queries(self, group: int, head_dim: int, kind: torch.dtype) -> tuple[int, ...]:
        return kernels.few_queries(group, head_dim, kind)

    def prepared(self, tables: Tensor, decodes: Tensor, blocks: Tensor, long: bool, queries: int) -> AttentionTables:
        return AttentionTables(tables, decodes, blocks, long, queries)

    def add_blocks(self, new: Tensor, tables: Tensor) -> None:
        step.add_blocks(new, tables)

    def place_tokens(
        self, ids: Tensor, rows: Tensor, positions: Tensor, late: Tensor, tables: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return step.place_tokens(ids, rows, positions, late, tables, block_size)

    def likeliest(self, scores: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
        step.likeliest(scores, rows, last_token, out, best)

    def draw(
        self, scores: Tensor, table: Tensor, last_token: Tensor, out: Tensor, best: Tensor, filters: Filters
    ) -> None:
        draw.draw(scores, table, last_token, out, best, filters)

    def fused(self, layers: Sequence[Any]) -> FusedLayers | None:
        """For fp8 weights, whose scales are due where the next operation reads a product; else for single rows."""
        if is_fusable(layers):
            return Fp8Layers(self.attention, layers)
        return OneRowLayers(self.attention_of_one, layers) if one_row.is_fusable(layers) else None

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Fp8Weight):
            none = torch.zeros((len(x), weight.shape[0]), dtype=x.dtype, device=x.device)
            return self.linear_add(x, weight, bias, none)
        if isinstance(weight, BlockWeight):
            return linear4(x, weight, bias)
        return linear(x, values_of(weight), bias)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        if isinstance(weight, Fp8Weight):
            return rows8.add(residual.contiguous(), product(rows8.quantize(x.contiguous()), weight, bias, x.dtype))
        if isinstance(weight, BlockWeight):
            return linear4(x, weight, bias, residual.contiguous())
        return linear(x, values_of(weight), bias, residual)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return rows.silu_mul(gate_up)

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        return rows.rotate_and_store(qkv, norms, rope, cache, slots)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """Decodes and prompt chunks of the same pass, each in its own kernel, into one result."""
        if batch.width:
            return padded_attention(q, k_cache, v_cache, batch, scale, window)
        _, heads, dim = q.shape
        kv_heads = k_cache.shape[2]
        found = self._tables_of(batch, heads // kv_heads, dim, q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        count = found.decodes.shape[1]
        if count:
            processors, arrived = self._device(q.device, count * kv_heads)
            wide, few, from_fp8 = q.dtype == torch.float32, found.queries, k_cache.dtype == FP8
            shape = kernels.decode_shape(count, heads, kv_heads, dim, wide, found.long, processors, few, from_fp8)
            kernels.decode(q, k_cache, v_cache, found.tables, found.decodes, out, arrived, scale, window, shape, few)
        if found.blocks.shape[1]:
            kernels.prefill(q, k_cache, v_cache, found.tables, found.blocks, out, scale, window)
        return out

    def attention_of_one(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: Batch,
        scale: float,
        window: int,
    ) -> Tensor:
        """rotate_and_store and attention of a single row."""
        k_cache = cache[0]
        if one_row_attention.fits(qkv, k_cache):
            _, _, kv_heads, dim = k_cache.shape
            group = qkv.shape[1] // dim // kv_heads - 2
            found = self._tables_of(batch, group, dim, qkv.dtype)
            decodes = found.decodes
            if decodes.shape[1] and not found.blocks.shape[1]:
                _, arrived = self._device(qkv.device, decodes.shape[1] * kv_heads)
                return one_row_attention.attend(
                    qkv, norms, rope, cache, batch.slots, found.tables, decodes, arrived, scale, window
                )
        q = rows.rotate_and_store(qkv, norms, rope, cache, batch.slots)
        return self.attention(q, *cache, batch, scale, window)

    def _device(self, device: torch.device, most: int) -> tuple[int, Tensor]:
        """(multiprocessors, a zero for every sequence and KV head whose decode may be split)."""
        if self._arrived is None or len(self._arrived) < most:
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._old.append(self._arrived)  # a CUDA graph may still use it
            self._arrived = torch.zeros(max(most, 2**15), dtype=torch.int32, device=device)
        return self._processors, self._arrived

    def _tables_of(self, batch: Batch, group: int, dim: int, kind: torch.dtype) -> AttentionTables:
        """Remembered for the layers of the same pass."""
        if isinstance(batch.prepared, AttentionTables):
            return batch.prepared
        queries, few = kernels.queries_per_block(group, dim, kind), kernels.few_queries(group, dim, kind)
        if self._last is not None and self._last[0] is batch and self._last[1] == queries:
            return self._last[2]
        found = split_batch(batch, queries, few)
        self._last = (batch, queries, found)
        return found


def split_batch(batch: Batch, queries: int, few: tuple[int, ...] = (1,)) -> AttentionTables:
    """Rows with few queries are decodes; the others are split into blocks of queries, most work first."""
    counts = [end - first for first, end in zip(batch.starts, batch.starts[1:], strict=False)]
    most = few[-1]
    decodes = [
        (row, batch.contexts[row], batch.starts[row], count) for row, count in enumerate(counts) if count <= most
    ]
    blocks = [
        (row, batch.starts[row], count, first, batch.contexts[row])
        for row, count in enumerate(counts)
        if count > most
        for first in range(0, count, queries)
    ]
    blocks.sort(key=lambda block: -(block[4] - block[2] + block[3]))

    def table(entries: list[tuple[int, ...]], padding: tuple[int, ...]) -> Tensor:
        """A column per entry, padded so that every row begins on a multiple of 16 bytes."""
        entries = entries + [padding] * (-len(entries) % 4)
        columns = torch.tensor(entries, dtype=torch.int32).reshape(len(entries), len(padding)).T.contiguous()
        return columns.to(batch.block_tables.device)

    return AttentionTables(
        tables=batch.block_tables,
        decodes=table([*decodes], (0, 0, 0, 0)),
        blocks=table([*blocks], (kernels.PADDING, 0, 0, 0, 0)),
        long=any(context > kernels.LONG for _, context, _, _ in decodes),
        queries=next(size for size in few if size >= max((count for *_, count in decodes), default=1)),
    )
