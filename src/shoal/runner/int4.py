"""Matrices that a checkpoint holds in 4 bits, kept so: those of AWQ, GPTQ and GGUF files.

Owns how their bits are brought into the blocks of kernels/block_weight.py, which changes no number, and which matrices
can be kept. GGUF's Q8_0 matrices, which stand beside those in 4 bits, are kept in 8 bits. Does not know models,
devices' kernels or config.json (models/formats.py).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import BadConfig
from shoal.kernels.block_weight import BLOCK, BlockWeight, packed, quantize_int4
from shoal.kernels.weights import Weight
from shoal.runner.quantized import NOT_IN_FP8, PackedReader, StoredTensors


class Int4Source(Protocol):
    """A checkpoint with matrices in blocks."""

    def bits(self, name: str) -> int:
        """4, 8, or 0 for a tensor that is not kept."""

    def weight(self, name: str) -> BlockWeight:
        """One that is."""


class PackedInt4:
    """AWQ and GPTQ files. Not kept: groups that are no multiple of 32 inputs, or columns sorted by their weight."""

    def __init__(self, reader: PackedReader) -> None:
        self._reader = reader

    def bits(self, name: str) -> int:
        return 4 if self._reader.group_size(name) % BLOCK == 0 and self._reader.shape(name)[1] % BLOCK == 0 else 0

    def weight(self, name: str) -> BlockWeight:
        values, zeros, scales = (tensor.t() for tensor in self._reader.unpacked(name))
        group, inputs = self._reader.group_size(name), values.shape[1]
        kept = _float16_if_exact(scales).contiguous()
        return BlockWeight(packed(values), kept, -(zeros.float() * scales).contiguous(), inputs, group, group)


class BlockFile(Protocol):
    """A file of blocks, as GGUF files are."""

    def kind(self, name: str, /) -> str: ...

    def blocks(self, name: str, /) -> NDArray[np.uint8]: ...


class GgufInt4:
    """GGUF files: Q4_0, Q4_1 and Q4_K, and Q8_0 beside them."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    def bits(self, name: str) -> int:
        kind = self._file.kind(name)
        return 0 if kind not in FROM_BLOCKS else 8 if kind == "Q8_0" else 4

    def weight(self, name: str) -> BlockWeight:
        return FROM_BLOCKS[self._file.kind(name)](torch.from_numpy(self._file.blocks(name).copy()))


class AsInt4:
    """Keeps every matrix that the file holds in 4 bits; see KeptFormat. Others become numbers of the model's type; on a
    GPU also embedding and head, and what is in 8 bits."""

    def __init__(self, source: Int4Source, device: str | torch.device) -> None:
        self._source, self._device = source, device
        self._on_cpu = torch.device(device).type == "cpu"

    def fits(self, parameter: str, shape: tuple[int, ...], sources: Sequence[str]) -> bool:
        if len(shape) != 2 or (not self._on_cpu and parameter in NOT_IN_FP8):
            return False
        return {self._source.bits(name) for name in sources} in (({4}, {8}) if self._on_cpu else ({4},))

    def part(self, name: str) -> Weight:
        return self._source.weight(name).to(self._device)


def int4_source(reader: StoredTensors, file: BlockFile | None, model: str) -> Int4Source:
    """The matrices in 4 bits of a checkpoint; file: if it is one of blocks. Raises BadConfig if there are none."""
    source: Int4Source | None = None
    if isinstance(reader, PackedReader):
        source = PackedInt4(reader)
    elif file is not None:
        source = GgufInt4(file)
    if source is None or not any(source.bits(name) == 4 for name in reader.names()):
        raise BadConfig(
            f"quantization int4 keeps matrices that are in 4 bits, and {model} has none that can be kept; use AWQ or "
            "GPTQ weights with groups of 32, 64 or 128 in order, or a GGUF file of Q4_0, Q4_1 or Q4_K, or leave it out"
        )
    return source


def to_int4(weight: Weight) -> Weight:
    """A weight of random numbers in 4 bits, if its sizes allow that; else as it is."""
    return weight if weight.shape[1] % BLOCK else quantize_int4(weight.dense())


def _float16_if_exact(scales: Tensor) -> Tensor:
    """In float16 if that changes no number."""
    half = scales.half()
    return half if torch.equal(half.float(), scales.float()) else scales.float()


def _halves(raw: Tensor, first: int) -> Tensor:
    """A float16 number of each block, float16 [rows, blocks]."""
    return raw[..., first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _q4_0(raw: Tensor) -> BlockWeight:
    scales = _halves(raw, 0)
    return _of_blocks(raw[..., 2:], scales, _float16_if_exact(scales.float() * -8))


def _q4_1(raw: Tensor) -> BlockWeight:
    return _of_blocks(raw[..., 4:], _halves(raw, 0), _halves(raw, 2))


def _q8_0(raw: Tensor) -> BlockWeight:
    return _of_blocks(raw[..., 2:].contiguous().view(torch.int8), _halves(raw, 0), None)


def _q4_k(raw: Tensor) -> BlockWeight:
    """Blocks of 256 inputs: two float16 factors, eight scales and eight minima of 6 bits each in 12 bytes, then the
    integers: of 64 inputs, the first 32 in the low bits of 32 bytes and the others above them."""
    rows = len(raw)
    low, high, rest = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), dim=-1)
    minima = torch.cat((high & 63, (rest >> 4) | (high >> 2 & 48)), dim=-1)
    bytes_of = raw[..., 16:].reshape(rows, -1, 4, 32)
    integers = torch.stack((bytes_of & 15, bytes_of >> 4), dim=-2).reshape(rows, -1)
    wide = (_halves(raw, 0).float().unsqueeze(-1) * scales).reshape(rows, -1)
    offsets = (_halves(raw, 2).float().unsqueeze(-1) * minima).neg_().reshape(rows, -1)
    return BlockWeight(packed(integers), wide, offsets, integers.shape[1], BLOCK, BLOCK)


def _of_blocks(values: Tensor, scales: Tensor, offsets: Tensor | None) -> BlockWeight:
    inputs = scales.shape[1] * BLOCK
    return BlockWeight(values.flatten(1).contiguous(), scales, offsets, inputs, BLOCK, BLOCK)


FROM_BLOCKS: dict[str, Callable[[Tensor], BlockWeight]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q8_0": _q8_0,
}  # fmt: skip
