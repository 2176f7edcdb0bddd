"""Weights laid in tiles, as a CPU's matrix instructions read them: what they are, and how they are read without those.

A tile is 16 rows by 64 bytes, with rows and columns of its 4-byte words exchanged; tiles of 16 rows stand one behind
the other, and take the place that those rows had. Knows tensors only; who lays them is kernels.cpu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 16
BYTES = 64


@dataclass(frozen=True)
class LaidWeight:
    """A matrix [outputs, inputs] in tiles."""

    values: Tensor
    """Of the matrix's type and shape, in another order."""

    @property
    def shape(self) -> tuple[int, int]:
        """As the matrix had it."""
        return self.values.shape[0], self.values.shape[1]

    def full(self) -> Tensor:
        """The matrix."""
        return straight(self.values)

    def rows(self, ids: Tensor) -> Tensor:
        """Some of its rows."""
        return straight(self.values)[ids]


def can_be_laid(values: Tensor) -> bool:
    """Whole tiles only."""
    whole = values.dim() == 2 and values.shape[0] % ROWS == 0 and values.shape[1] * values.element_size() % BYTES == 0
    return whole and values.is_contiguous()


def straight(values: Tensor) -> Tensor:
    """The matrix of which these are the tiles: a copy."""
    words = values.view(torch.int32)
    rows, columns = words.shape
    tiles = words.view(rows // ROWS, columns // ROWS, ROWS, ROWS)  # BYTES are ROWS words
    return tiles.permute(0, 3, 1, 2).contiguous().view(rows, columns).view(values.dtype)
