"""Kernels for NVIDIA GPUs, in Triton; matrix products are cuBLAS's.

Owns how a ragged batch is cut into the calls of attention.py. The plain meaning of everything here is ref.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from shoal.kernels import Batch
from shoal.kernels.padded import padded_attention
from shoal.kernels.triton import attention as kernels
from shoal.kernels.triton import rows


@dataclass(frozen=True)
class Cut:
    """How one batch is computed, worked out once per pass: its decodes, and the query blocks of its prompts."""

    contexts: Tensor
    starts: Tensor
    tables: Tensor
    decodes: Tensor  # their tables …
    decode_contexts: Tensor
    decode_places: Tensor  # … and where their queries stand
    longest: int
    block_row: Tensor
    block_first: Tensor


class TritonOps:
    """Ops on CUDA."""

    def __init__(self) -> None:
        self._cut: tuple[Batch, int, Cut] | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rows.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return rows.silu_mul(gate_up)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rows.rotary(q, cos, sin), rows.rotary(k, cos, sin)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        rows.store_kv(k, v, k_cache, v_cache, slots)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """Decodes and prompt chunks of the same pass, each in its own kernel, into one result."""
        if batch.width:
            return padded_attention(q, k_cache, v_cache, batch, scale, window)
        group = q.shape[1] // k_cache.shape[2]
        cut = self._cut_of(batch, group)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if cut.decodes.shape[0]:
            processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
            splits = kernels.splits_for(cut.decodes.shape[0], k_cache.shape[2], cut.longest, processors)
            kernels.decode(
                q, k_cache, v_cache, cut.decodes, cut.decode_contexts, cut.decode_places, out, scale, window, splits
            )
        if cut.block_row.shape[0]:
            kernels.prefill(
                q, k_cache, v_cache, cut.tables, cut.contexts, cut.starts, cut.block_row, cut.block_first, out, scale,
                window,
            )  # fmt: skip
        return out

    def _cut_of(self, batch: Batch, group: int) -> Cut:
        """Remembered for the layers of the same pass."""
        if self._cut is not None and self._cut[0] is batch and self._cut[1] == group:
            return self._cut[2]
        cut = cut_batch(batch, kernels.queries_per_block(group))
        self._cut = (batch, group, cut)
        return cut


def cut_batch(batch: Batch, queries: int) -> Cut:
    """Rows with one query are decodes; the others are cut into blocks of queries, the longest work first."""
    device = batch.block_tables.device
    counts = [end - first for first, end in zip(batch.starts, batch.starts[1:], strict=False)]
    decodes = [row for row, count in enumerate(counts) if count == 1]
    blocks = [(row, first) for row, count in enumerate(counts) if count > 1 for first in range(0, count, queries)]
    blocks.sort(key=lambda block: -(batch.contexts[block[0]] - counts[block[0]] + block[1]))

    def put(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = batch.block_tables
    return Cut(
        contexts=put(batch.contexts),
        starts=put(batch.starts),
        tables=tables,
        decodes=tables if len(decodes) == len(counts) else tables[put(decodes).long()],
        decode_contexts=put([batch.contexts[row] for row in decodes]),
        decode_places=put([batch.starts[row] for row in decodes]),
        longest=max((batch.contexts[row] for row in decodes), default=0),
        block_row=put([row for row, _ in blocks]),
        block_first=put([first for _, first in blocks]),
    )
