"""Checkpoints whose matrices are stored in fp8 or in 4 bits: their tensors under the names and shapes of the model.

Owns what the stored numbers mean. A reader gives each matrix as numbers (`read`), or as a weight in the file's own
format (`weight`). Does not know models, devices' kernels or config.json (models/formats.py).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import BadWeights
from shoal.kernels.fp8 import FP8
from shoal.kernels.weights import Fp8Weight, Weight, quantize_fp8
from shoal.models.formats import CheckpointFormat
from shoal.models.layout import Cut

BLOCK = (128, 128)
NOT_IN_FP8 = ("embedding.weight", "head.weight")
FP8_SIZES = 16  # inputs and outputs of an fp8 product are multiples of this
SCALES = (".weight_scale", ".weight_scale_inv")
# of inputs and KV, which are scaled by what they are: per token
UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight outputs in a word, from the lowest bits
_AGAIN = "download the model again"


class StoredTensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, cut: Cut | None = None) -> Tensor: ...


class Fp8Reader:
    """Matrices in e4m3 with scales per tensor, output or block; others as they are."""

    def __init__(self, reader: StoredTensors, block: tuple[int, int] = (0, 0)) -> None:
        self._reader, self._block = reader, block
        self._all = set(reader.names())

    def names(self) -> Iterable[str]:
        return [name for name in self._all if not name.endswith((*SCALES, *UNUSED))]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """As numbers, in float32 if they are stored in fp8. A part is cut from the whole, which scales belong to."""
        tensor = self._reader.read(name)
        numbers = tensor.float() * self._spread(name, tensor) if tensor.dtype == FP8 else tensor
        return numbers if cut is None else numbers[cut.index]

    def weight(self, name: str, device: str | torch.device) -> Weight:
        """In fp8 with a scale per output: the stored numbers, unless an output has several scales or is not in fp8."""
        tensor = self._reader.read(name)
        if tensor.dtype != FP8:
            return quantize_fp8(tensor.to(device))
        scales = self._scales(name)
        if scales.numel() not in (1, len(tensor)):
            return quantize_fp8((tensor.float() * self._spread(name, tensor)).to(device))
        per_output = scales.reshape(-1).expand(len(tensor)).contiguous()
        return Fp8Weight(tensor.to(device), per_output.to(device))

    def _scales(self, name: str) -> Tensor:
        """float32: of one element, [outputs], [outputs, 1], or one for each block."""
        stem = name.removesuffix(".weight")
        found = next((stem + ending for ending in SCALES if stem + ending in self._all), None)
        if found is None:
            raise BadWeights(f"{name} is stored in fp8, but {stem}.weight_scale is missing; {_AGAIN}")
        scales = self._reader.read(found).float()
        outputs, inputs = self._reader.shape(name)
        block = self._block if all(self._block) else BLOCK
        blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
        if scales.numel() == 1 or tuple(scales.shape) in ((outputs,), (outputs, 1), blocks):
            return scales
        raise BadWeights(f"{found} has shape {tuple(scales.shape)}, which does not fit {outputs}x{inputs}; {_AGAIN}")

    def _spread(self, name: str, tensor: Tensor) -> Tensor:
        """What every number is multiplied by."""
        scales = self._scales(name)
        if scales.numel() == 1:
            return scales.reshape(())
        if scales.dim() < 2 or tuple(scales.shape) == (len(tensor), 1):
            return scales.reshape(-1, 1)
        block = self._block if all(self._block) else BLOCK
        wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return wide[: tensor.shape[0], : tensor.shape[1]]


class PackedReader:
    """AWQ and GPTQ: scale × (number − zero point), both 4 bits wide, with a scale for some inputs of an output."""

    def __init__(self, reader: StoredTensors, form: CheckpointFormat) -> None:
        self._reader, self._form = reader, form
        self._all = set(reader.names())
        self._stems = {name.removesuffix(".qweight") for name in self._all if name.endswith(".qweight")}

    def names(self) -> Iterable[str]:
        parts = {f"{stem}.{part}" for stem in self._stems for part in ("qweight", "qzeros", "scales", "g_idx")}
        return [*(self._all - parts), *(f"{stem}.weight" for stem in self._stems)]

    def shape(self, name: str) -> tuple[int, ...]:
        stem = name.removesuffix(".weight")
        if stem not in self._stems:
            return self._reader.shape(name)
        rows, columns = self._reader.shape(f"{stem}.qweight")
        return (columns, rows * 8) if self._form.kind == "gptq" else (columns * 8, rows)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """As numbers, in float32 if they are packed. A part is cut from the whole: words hold numbers of several."""
        stem = name.removesuffix(".weight")
        if stem not in self._stems:
            return self._reader.read(name, cut)
        values, zeros, scales = self.unpacked(name)
        group_of = self._group_of(stem, len(values), len(scales))
        numbers = ((values - zeros[group_of]).float() * scales[group_of]).t()
        return (numbers if cut is None else numbers[cut.index]).contiguous()

    def group_size(self, name: str) -> int:
        """Inputs that share a scale, if the groups lie in order; -1: they do not, or the tensor is not packed."""
        stem = name.removesuffix(".weight")
        if stem not in self._stems:
            return -1
        inputs = self.shape(name)[1]
        size = self._form.group or inputs
        in_order = torch.arange(inputs) // size
        return size if torch.equal(self._group_of(stem, inputs, -(-inputs // size)), in_order) else -1

    def unpacked(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Of one packed matrix, transposed: numbers [inputs, outputs], zero points and scales [groups, outputs]."""
        stem = name.removesuffix(".weight")
        outputs, inputs = self.shape(name)
        words, zeros = self._part(stem, "qweight"), self._part(stem, "qzeros")
        scales = self._part(stem, "scales").float()
        gptq = self._form.kind == "gptq"
        values = unpacked(words.t(), range(8)).t() if gptq else unpacked(words, AWQ_ORDER)
        points = unpacked(zeros, range(8) if gptq else AWQ_ORDER) + self._form.zeros_from
        groups = -(-inputs // (self._form.group or inputs))
        for what, tensor in (("qweight", values), ("qzeros", points), ("scales", scales)):
            wanted = (inputs if what == "qweight" else groups, outputs)
            if tuple(tensor.shape) != wanted:
                raise BadWeights(f"{stem}.{what} holds {tuple(tensor.shape)}, {wanted} are needed; {_AGAIN}")
        return values, points, scales

    def _part(self, stem: str, part: str) -> Tensor:
        if f"{stem}.{part}" not in self._all:
            raise BadWeights(f"{stem}.{part} is missing, which {stem}.qweight needs; {_AGAIN}")
        tensor = self._reader.read(f"{stem}.{part}")
        if tensor.dim() != 2 or (part != "scales" and tensor.dtype != torch.int32):
            raise BadWeights(f"{stem}.{part} is not a matrix of 32-bit words; {_AGAIN}")
        return tensor

    def _group_of(self, stem: str, inputs: int, groups: int) -> Tensor:
        """int64 [inputs]: in order, or as g_idx says where columns were sorted by their weight."""
        if f"{stem}.g_idx" not in self._all:
            return torch.arange(inputs) // (self._form.group or inputs)
        found = self._reader.read(f"{stem}.g_idx").long()
        if found.shape != (inputs,) or int(found.min()) < 0 or int(found.max()) >= groups:
            raise BadWeights(f"{stem}.g_idx does not name one of {groups} groups for each input; {_AGAIN}")
        return found


class AsFp8:
    """Keeps every matrix but embedding and head in fp8, whatever it is stored in; see KeptFormat."""

    def __init__(self, reader: StoredTensors, device: str | torch.device) -> None:
        self._reader, self._device = reader, device

    def fits(self, parameter: str, shape: tuple[int, ...], sources: Sequence[str]) -> bool:
        return len(shape) == 2 and parameter not in NOT_IN_FP8 and not any(size % FP8_SIZES for size in shape)

    def part(self, name: str) -> Weight:
        if isinstance(self._reader, Fp8Reader):
            return self._reader.weight(name, self._device)
        return quantize_fp8(self._reader.read(name).to(self._device))


def unpacked(words: Tensor, order: Iterable[int]) -> Tensor:
    """int8 [n, 8 m] of int32 [n, m]: eight 4-bit numbers a word; order: where each goes, from the lowest bits."""
    shifts = torch.empty(8, dtype=torch.int32)
    for at, place in enumerate(order):
        shifts[place] = 4 * at
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.int8).flatten(1)


def opened(reader: StoredTensors, form: CheckpointFormat | None) -> StoredTensors:
    """The reader for a checkpoint in this format."""
    if form is None:
        return reader
    return Fp8Reader(reader, form.block) if form.kind == "fp8" else PackedReader(reader, form)
