"""Weights in blocks of 32 inputs, of 4 or 8 bits: what GGUF, AWQ and GPTQ files hold, kept so in memory.

Owns what the stored integers mean, and how matrices are padded, joined and made from numbers. Knows tensors only: how
files store them is runner/int4.py's, and how they are multiplied each implementation of Ops decides.

    number = integer × scale + offset       scales and offsets belong to an output and a group of inputs
    4 bits: 16 bytes a block, integers from 0 to 15. Byte j holds input j in its low bits, input j + 16 in the others
    8 bits: 32 bytes a block, integers from −128 to 127
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
HALF = BLOCK // 2
GROUP = 128  # inputs that share a scale in matrices made from numbers


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """The matrix as integers in blocks, with scales and offsets."""

    values: Tensor
    """4 bits: uint8, 16 a block; 8 bits: int8, 32 a block: [outputs, those of all blocks]"""
    scales: Tensor
    """float16 or float32 [outputs, groups]"""
    offsets: Tensor | None
    """The same; None: all are 0."""
    inputs: int
    scale_group: int
    """Inputs that share a scale: a multiple of 32."""
    offset_group: int

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        offsets = None if self.offsets is None else self.offsets[ids]
        return replace(self, values=self.values[ids], scales=self.scales[ids], offsets=offsets).dense()

    def dense(self) -> Tensor:
        """In float32: an integer times a scale of 16 bits is exact there, so only the sum with an offset is rounded."""
        found = self._integers().mul_(_spread(self.scales, self.scale_group, self.inputs))
        return found if self.offsets is None else found.add_(_spread(self.offsets, self.offset_group, self.inputs))

    def to(self, device: str | torch.device) -> BlockWeight:
        """On another device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    def _integers(self) -> Tensor:
        """float32 [outputs, inputs]"""
        outputs = len(self.values)
        if self.bits == 4:
            blocks = self.values.view(outputs, -1, HALF)
            found = torch.cat((blocks & 15, blocks >> 4), dim=-1)
        else:
            found = self.values
        return found.reshape(outputs, -1).float()


@dataclass(frozen=True, eq=False)
class PanelWeight:
    """The same as vector instructions read it: a panel is as many outputs as a vector has lanes, and of each four bytes
    follow each other. Every block has a scale."""

    values: Tensor
    """uint8 or int8 [panels, bytes of an output / 4, lanes, 4]"""
    scales: Tensor
    """[panels, blocks, lanes, 1]"""
    offsets: Tensor | None
    """[panels, groups, lanes, 1]"""
    outputs: int
    inputs: int
    group: int
    """Inputs that share an offset."""

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        lanes = self.values.shape[2]

        def found(x: Tensor) -> Tensor:
            return x[ids // lanes, :, ids % lanes].flatten(1)

        offsets = None if self.offsets is None else found(self.offsets)
        return BlockWeight(found(self.values), found(self.scales), offsets, self.inputs, BLOCK, self.group).dense()

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.outputs, device=self.values.device))


def packed(integers: Tensor) -> Tensor:
    """uint8 [outputs, 16 × blocks] of integers from 0 to 15, [outputs, 32 × blocks]."""
    halves = integers.to(torch.uint8).reshape(len(integers), -1, 2, HALF)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def joined_blocks(parts: Sequence[BlockWeight]) -> BlockWeight:
    """One matrix of the outputs of several; each has the scales that the finest of them has."""
    first = parts[0]
    assert all((part.bits, part.inputs) == (first.bits, first.inputs) for part in parts), "matrices of several sizes"
    scale_group = math.gcd(*(part.scale_group for part in parts))
    offset_group = math.gcd(*(part.offset_group for part in parts))
    values = torch.cat([part.values for part in parts])
    scales = _cat([_finer(part.scales, part.scale_group, scale_group, part.inputs) for part in parts])
    given = [(part.offsets, part.offset_group) for part in parts if part.offsets is not None]
    assert len(given) in (0, len(parts)), "some with offsets, some without"
    offsets = _cat([_finer(one, group, offset_group, first.inputs) for one, group in given]) if given else None
    return BlockWeight(values, scales, offsets, first.inputs, scale_group, offset_group)


def in_panels(weight: BlockWeight, lanes: int, float16: bool) -> PanelWeight:
    """The same in panels of so many outputs. float16: whether scales and offsets may be so; else they are float32."""

    def panels(x: Tensor, unit: int) -> Tensor:
        """[panels, units, lanes, unit], with zeros for outputs that do not exist."""
        padded = pad(x, (0, 0, 0, -len(x) % lanes))
        return padded.view(len(padded) // lanes, lanes, -1, unit).transpose(1, 2).contiguous()

    scales, offsets = _finer(weight.scales, weight.scale_group, BLOCK, weight.inputs), weight.offsets
    if not float16:
        scales, offsets = scales.float(), None if offsets is None else offsets.float()
    group = BLOCK if offsets is None else weight.offset_group
    offsets = None if offsets is None else panels(offsets, 1)
    return PanelWeight(panels(weight.values, 4), panels(scales, 1), offsets, *weight.shape, group)


def quantize_int4(weight: Tensor, group: int = GROUP) -> BlockWeight:
    """4 bits by rounding to the nearest of 16 steps between the least and the largest number of each group, as AWQ and
    GPTQ files have them; inputs: a multiple of 32. 4096 rows at a time, as in weights.quantize."""
    outputs, inputs = weight.shape
    group = group if inputs % group == 0 else BLOCK
    values = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float16, device=weight.device)
    offsets = torch.empty(outputs, inputs // group, device=weight.device)
    for first in range(0, outputs, 4096):
        part = weight[first : first + 4096].float().view(-1, inputs // group, group)
        low, high = part.amin(-1).clamp_(max=0), part.amax(-1).clamp_(min=0)
        scale = ((high - low) / 15).clamp_(min=1e-7).half().float()
        zero = (-low / scale).round_().clamp_(0, 15)
        integers = ((part / scale.unsqueeze(-1)).round_() + zero.unsqueeze(-1)).clamp_(0, 15)
        rows = slice(first, first + 4096)
        values[rows], scales[rows], offsets[rows] = packed(integers.view(-1, inputs)), scale.half(), -zero * scale
    return BlockWeight(values, scales, offsets, inputs, group, group)


def _spread(x: Tensor, group: int, inputs: int) -> Tensor:
    """float32 [outputs, inputs]: of each input what its group has."""
    return x.float().repeat_interleave(min(group, inputs), dim=1)[:, :inputs]


def _finer(x: Tensor, group: int, wanted: int, inputs: int) -> Tensor:
    """The same for groups of fewer inputs, which divide the others."""
    assert group % wanted == 0, "groups of other sizes"
    if group == wanted:
        return x
    return x.repeat_interleave(min(group, -(-inputs // wanted) * wanted) // wanted, dim=1)[:, : -(-inputs // wanted)]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """In float16 if all are."""
    same = all(part.dtype == parts[0].dtype for part in parts)
    return torch.cat([part if same else part.float() for part in parts])
