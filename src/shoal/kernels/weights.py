"""Weights: the matrices of a model, each an object that knows how its values are stored.

    DenseWeight    [outputs, inputs] in torch's layout
    TiledWeight    the same values in the tiles that a CPU's matrix instructions read
    Int8Weight     bytes, dense or tiled, and one scale per output
    Fp8Weight      8-bit floating-point numbers in torch's layout, and one scale per output
    BlockWeight    integers of 4 or 8 bits with scales for some inputs each (block_weight.py)

Owns what a stored weight means: its shape, some of its rows, the whole matrix. Knows tensors only: each implementation
of Ops decides how it multiplies by a weight. A new format is a new class here and the kernels that read it.

A tile has 16 rows of 64 bytes, transposed in units of 4-byte words. The tiles of 16 rows are contiguous and take the
memory that those rows had. kernels.cpu makes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from shoal.kernels.block_weight import BlockWeight, joined_blocks
from shoal.kernels.fp8 import FP8, quantize_rows, scales_of

TILE_ROWS = 16
TILE_BYTES = 64
INT8_PAD = 64  # inputs of 8-bit weights are padded with zeros to a multiple of this


class Weight(Protocol):
    """A matrix [outputs, inputs]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs), whatever is stored."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""

    @property
    def nbytes(self) -> int:
        """Memory of all that is stored."""

    def rows(self, ids: Tensor) -> Tensor:
        """[ids, inputs]: some of the rows, in the type that they are computed in."""

    def dense(self) -> Tensor:
        """[outputs, inputs]: the whole matrix, in the same type."""


@dataclass(frozen=True, eq=False)
class StoredWeight(ABC):
    """A matrix whose values are stored one by one, in some order."""

    values: Tensor
    tiled: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor: ...

    @abstractmethod
    def dense(self) -> Tensor: ...


class DenseWeight(StoredWeight):
    """The matrix in torch's layout."""

    tiled = False

    def rows(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.values)

    def dense(self) -> Tensor:
        return self.values


class TiledWeight(StoredWeight):
    """The matrix in tiles; values has the matrix's type and shape, in another order."""

    tiled = True

    def rows(self, ids: Tensor) -> Tensor:
        return untiled(self.values)[ids]

    def dense(self) -> Tensor:
        return untiled(self.values)


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """The matrix as bytes, dense or tiled, and a scale for each output."""

    stored: StoredWeight
    """int8 [outputs, inputs padded to a multiple of INT8_PAD]"""
    scales: Tensor
    """float32 [outputs]"""
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.inputs

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes + self.scales.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return self.stored.dense()[ids, : self.inputs].float() * self.scales[ids, None]

    def dense(self) -> Tensor:
        return self.stored.dense()[:, : self.inputs].float() * self.scales[:, None]


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """The matrix in e4m3, and a scale for each output."""

    values: Tensor
    """float8_e4m3fn [outputs, inputs], contiguous"""
    scales: Tensor
    """float32 [outputs]"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return FP8

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return self.values.view(torch.uint8)[ids].view(FP8).float() * self.scales[ids, None]

    def dense(self) -> Tensor:
        return self.values.float() * self.scales[:, None]


@dataclass
class Parameters:
    """Everything a model learned, by name: matrices as weights; norm weights and biases as plain tensors."""

    weights: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)

    def convert(self, how: Callable[[Weight], Weight], but: Collection[str] = ()) -> None:
        """Replace every weight but some, one at a time, so that no two copies of all of them are in memory."""
        for name in list(self.weights):
            if name not in but:
                self.weights[name] = how(self.weights.pop(name))


def quantize(weight: Tensor) -> Int8Weight:
    """8-bit values by rounding to the nearest: the largest value of each row becomes 127.

    4096 rows at a time: the whole matrix in float32 would be a second copy.
    """
    outputs, inputs = weight.shape
    values = torch.zeros(outputs, -(-inputs // INT8_PAD) * INT8_PAD, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, device=weight.device)
    for first in range(0, outputs, 4096):
        part = weight[first : first + 4096].float()
        scale = part.abs().amax(dim=1).clamp_(min=1e-30) / 127
        values[first : first + 4096, :inputs] = (part / scale[:, None]).round_().to(torch.int8)
        scales[first : first + 4096] = scale
    return Int8Weight(DenseWeight(values), scales, inputs)


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """e4m3 with a power of two per row; 4096 rows at a time, as above."""
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for first in range(0, len(weight), 4096):
        part, exponents = quantize_rows(weight[first : first + 4096])
        values[first : first + 4096], scales[first : first + 4096] = part, scales_of(exponents)
    return Fp8Weight(values, scales)


def joined(parts: Sequence[Weight]) -> Weight:
    """One matrix of the outputs of several, all in one format."""
    if len(parts) == 1:
        return parts[0]
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if len(blocks) == len(parts):
        return joined_blocks(blocks)
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    assert len(fp8) == len(parts), "matrices of several formats"
    values = torch.cat([part.values.view(torch.uint8) for part in fp8])  # torch cannot join all types of 8 bits
    return Fp8Weight(values.view(FP8), torch.cat([part.scales for part in fp8]))


def is_bfloat16(values: Tensor) -> bool:
    """Whether numbers of 32 bits are all numbers of bfloat16, too; 1024 rows at a time."""
    if values.dtype != torch.float32 or not values.is_contiguous():
        return False
    return not any(bool((part.view(torch.int32) & 0xFFFF).any()) for part in torch.split(values, 1024))


def can_be_tiled(values: Tensor) -> bool:
    """Only matrices of whole tiles, contiguous in memory."""
    rows, columns = values.shape
    whole = rows % TILE_ROWS == 0 and columns * values.element_size() % TILE_BYTES == 0
    return whole and values.is_contiguous()


def untiled(values: Tensor) -> Tensor:
    """A copy of the matrix whose tiles these are."""
    words = values.view(torch.int32)
    rows, columns = words.shape
    tiles = words.view(rows // TILE_ROWS, columns // TILE_ROWS, TILE_ROWS, TILE_ROWS)  # TILE_BYTES are TILE_ROWS words
    return tiles.permute(0, 3, 1, 2).contiguous().view(rows, columns).view(values.dtype)


def matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight for torch's own product with inputs of a type: dense values as they are, others converted."""
    return weight.values if isinstance(weight, DenseWeight) else weight.dense().to(dtype)
