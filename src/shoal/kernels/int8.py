"""8-bit weights: what they are, and how they come from full ones.

One scale per output: the largest weight of a row becomes 127. Knows tensors only; how products with them are computed
is each implementation's business, and the plain meaning is `full`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.laid import LaidWeight, straight

PAD = 64  # inputs are filled up with zeros to a multiple of this


@dataclass(frozen=True)
class Int8Weight:
    """A matrix [outputs, inputs] as bytes and a scale for each output."""

    values: Tensor
    """int8 [outputs, inputs, filled up to a multiple of PAD]"""
    scales: Tensor
    """float32 [outputs]"""
    inputs: int
    laid: bool = False
    """The values are in tiles (kernels.laid)."""

    @property
    def shape(self) -> tuple[int, int]:
        """As the full weight had it."""
        return self.values.shape[0], self.inputs

    def full(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return self._straight()[:, : self.inputs].float() * self.scales[:, None]

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [ids, inputs]: some of its rows."""
        return self._straight()[ids, : self.inputs].float() * self.scales[ids, None]

    def _straight(self) -> Tensor:
        return straight(self.values) if self.laid else self.values


def quantize(weight: Tensor) -> Int8Weight:
    """Each row by itself, to the nearest; a row at a time costs no second copy in float32."""
    outputs, inputs = weight.shape
    values = torch.zeros(outputs, -(-inputs // PAD) * PAD, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, device=weight.device)
    for first in range(0, outputs, 4096):
        part = weight[first : first + 4096].float()
        scale = part.abs().amax(dim=1).clamp_(min=1e-30) / 127
        values[first : first + 4096, :inputs] = (part / scale[:, None]).round_().to(torch.int8)
        scales[first : first + 4096] = scale
    return Int8Weight(values, scales, inputs)


Weight = Tensor | Int8Weight | LaidWeight
