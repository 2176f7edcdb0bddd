"""Kernels for `--batch-invariant`: a row's bits depend neither on what else is in the pass nor on how a prompt is cut.

Owns which kernels have an order of sums that the row alone decides: ordered_products.py, ordered_attention.py, and all
row-wise ones, whose programs have a row each. Products in 4 bits and padded layouts have none; the config refuses them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Ints
from shoal.core.ports import LateMasks
from shoal.kernels.draw_table import SamplingState
from shoal.kernels.ops import Batch, FusedLayers
from shoal.kernels.triton import TritonOps, rows8, values_of
from shoal.kernels.triton import ordered_attention as attention
from shoal.kernels.triton import ordered_products as products
from shoal.kernels.triton.layers8 import Fp8Layers, is_fusable
from shoal.kernels.triton.rows8 import Fp8Rows, Product
from shoal.kernels.weights import Fp8Weight, Weight


def product8(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """As products8.product: the sums themselves, whose scales are due."""
    return Product(products.multiply(x.values, weight.values, None, None, dtype), x.scales, weight.scales, bias)


class OrderedOps(TritonOps):
    """TritonOps with fixed orders of sums."""

    def fused(self, layers: Sequence[Any]) -> FusedLayers | None:
        return Fp8Layers(self.attention, layers, product8) if is_fusable(layers) else None

    def choose(
        self,
        scores: Tensor,
        rows: Ints,
        positions: Ints,
        state: SamplingState,
        masks: LateMasks | None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Row by row: torch's sums over a line depend on how many lines there are."""
        borders = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
        chosen = []
        for first, end in pairwise(borders):
            lines = np.arange(first, end)
            of_these = None if masks is None else masks.among(lines)
            drafts = None if expected is None else expected[lines]
            one = super().choose(scores[first:end], rows[lines], positions[lines], state, of_these, drafts)
            chosen.append(one)
        tokens, best = zip(*chosen, strict=True)
        return torch.cat(tokens), torch.cat(best)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Fp8Weight):
            return super().linear(x, weight, bias)
        return products.linear(x, values_of(weight), bias)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        if isinstance(weight, Fp8Weight):
            return rows8.add(residual.contiguous(), product8(rows8.quantize(x.contiguous()), weight, bias, x.dtype))
        return products.linear(x, values_of(weight), bias, residual.contiguous())

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        assert not batch.width, "a padded layout has no fixed order"
        kv_heads = k_cache.shape[2]
        found = self._tables_of(batch, q.shape[1] // kv_heads, q.shape[2], q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        count = found.decodes.shape[1]
        if count:
            processors, arrived = self._device(q.device, count * kv_heads)
            attention.decode(
                q, k_cache, v_cache, found.tables, found.decodes, out, arrived, scale, window, found.long, processors,
                found.queries,
            )  # fmt: skip
        if found.blocks.shape[1]:
            attention.prefill(q, k_cache, v_cache, found.tables, found.blocks, out, scale, window)
        return out
