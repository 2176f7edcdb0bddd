"""Weights from files into a model's parameters, each tensor copied straight to its place.

Owns reading safetensors, fitting tensors to a ModelSpec, dummy weights and the choice of dtype. Never unpickles.
Does not know layers' arithmetic, schedules or KV blocks.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from shoal.errors import BadWeights, ModelNotFound, UnknownName, UnsafeWeights, shown
from shoal.files.reading import has_file, read_json
from shoal.kernels.weights import DenseWeight, Fp8Weight, Parameters, Weight, joined, quantize, quantize_fp8
from shoal.machine.cpus import count_cpus
from shoal.models import ModelSpec, model_class
from shoal.models.layout import Cut, Place, places, shapes
from shoal.models.shard import WHOLE, Shard
from shoal.runner.quantized import FP8_SIZES

log = logging.getLogger(__name__)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
MOST_PROBLEMS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightReader(Protocol):
    """A checkpoint: tensors under their Hugging Face names."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """One tensor, in host memory; with a cut, that part of it alone."""


class SafetensorsReader:
    """A model folder: model.safetensors, or the shards that model.safetensors.index.json names."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open_files: dict[str, Any] = {}
        self._file_of = self._find()

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, as its file's header says."""
        return tuple(self._opened(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """One tensor, mapped from its file; of a part no more is read."""
        file_name = self._file_of[name]
        try:
            file = self._opened(file_name)
            tensor: Tensor = file.get_tensor(name) if cut is None else file.get_slice(name)[cut.index]
        except (SafetensorError, OSError, RuntimeError, TypeError) as error:  # the last two: a type torch has not
            raise BadWeights(f"cannot read {name} from {self.folder / file_name}: {error}; {_AGAIN}") from error
        return tensor

    def _find(self) -> dict[str, str]:
        """Tensor name → file name."""
        if not self.folder.is_dir():
            raise ModelNotFound(f"no folder {self.folder}; give the folder that holds {SINGLE_FILE}")
        if has_file(self.folder / SINGLE_FILE):
            return dict.fromkeys(self._opened(SINGLE_FILE).keys(), SINGLE_FILE)
        if has_file(self.folder / INDEX_FILE):
            return self._find_shards()
        pickles = sorted(path.name for path in self.folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise UnsafeWeights(
                f"{self.folder} holds only pickle files ({pickles[0]}), which can run code when read; "
                f"convert them to {SINGLE_FILE}"
            )
        raise BadWeights(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {_AGAIN}")

    def _find_shards(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        file_of = read_json(path).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise BadWeights(f"{path} is not an index of shards: it has no weight_map of file names; {_AGAIN}")
        for file_name in sorted(set(file_of.values())):
            if Path(file_name).name != file_name:
                raise BadWeights(
                    f"{path} names {shown(file_name)}, which is not a file of this folder; correct the index"
                )
            held = set(self._opened(file_name).keys())
            absent = [name for name, place in file_of.items() if place == file_name and name not in held]
            if absent:
                raise BadWeights(f"{self.folder / file_name} lacks {absent[0]}, which the index puts there; {_AGAIN}")
        return file_of

    def _opened(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            path = self.folder / file_name
            if not has_file(path):
                raise BadWeights(f"{path} is missing; {_AGAIN}")
            try:
                self._open_files[file_name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, MemoryError) as error:  # the last: too large to be mapped
                raise BadWeights(f"{path} is truncated or not a safetensors file ({error}); {_AGAIN}") from error
        return self._open_files[file_name]


class ArrayFile(Protocol):
    """A file that gives numpy arrays under Hugging Face names, as GGUF files do."""

    def tensor_names(self) -> Iterable[str]:
        """Names of all tensors."""

    def shape(self, name: str, /) -> tuple[int, ...]:
        """The shape of one tensor."""

    def read(self, name: str, index: tuple[slice, ...] = (), /) -> "np.ndarray[Any, Any]":
        """One tensor, or the part that the index names."""


class ArrayReader:
    """Any ArrayFile as a WeightReader."""

    def __init__(self, file: ArrayFile) -> None:
        self.file = file

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self.file.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self.file.shape(name)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """One tensor; a read-only array is copied, as torch has no read-only tensors."""
        array = np.ascontiguousarray(self.file.read(name, () if cut is None else cut.index))
        return torch.from_numpy(array if array.flags.writeable else array.copy())


class KeptFormat(Protocol):
    """Matrices that stay in a format of their own, not in the model's type."""

    def fits(self, parameter: str, shape: tuple[int, ...], sources: Sequence[str]) -> bool:
        """Whether a parameter, made of these tensors of the checkpoint, is kept so."""

    def part(self, name: str) -> Weight:
        """One of these tensors, on the device."""


class NoneKept:
    """Everything is in the model's type."""

    def fits(self, parameter: str, shape: tuple[int, ...], sources: Sequence[str]) -> bool:
        return False

    def part(self, name: str) -> Weight:
        raise AssertionError("nothing is kept in another format")


def load_weights(
    reader: WeightReader,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str | torch.device,
    progress: bool = False,
    shard: Shard = WHOLE,
    keep: KeptFormat | None = None,
) -> Parameters:
    """Allocate every fused parameter once and copy each tensor, cast, into its rows: of each what the shard holds of
    the whole model. Or keep a tensor as it is, in a model that is whole.

    Names and shapes are compared with the files first, so that a wrong config cannot make it allocate more than fits
    what the files hold.
    """
    keep = keep or NoneKept()
    assert isinstance(keep, NoneKept) or shard is WHOLE, "matrices of a format of their own are not split"
    layout, cut = list(model_class(spec).layout(spec)), partial(shard.cut, spec)
    place_of = places(layout, cut)
    _check_names(set(reader.names()), place_of, spec)
    _check_shapes(reader, place_of)
    sources = {name: [source for source, _ in parts] for name, parts in layout}
    sizes = dict(shapes(layout, cut))
    kept = {name for name, shape in sizes.items() if keep.fits(name, shape, sources[name])}
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device) for name, shape in sizes.items() if name not in kept
    }
    found: dict[str, dict[int, Weight]] = defaultdict(dict)  # of a kept parameter: first row → part

    def load(item: tuple[str, Place]) -> str:
        """Copy one tensor to its place; returns what is wrong with it, or nothing."""
        name, place = item
        if place.parameter in kept:
            with torch.inference_mode():
                found[place.parameter][place.first] = keep.part(name)
            return ""
        tensor = reader.read(name, None if shard is WHOLE else place.cut)
        if not tensor.is_floating_point():
            return f"{name} holds {tensor.dtype}, floating point is needed"
        with torch.inference_mode():  # a mode of each thread, and the parameters may have been made in it
            target, held = tensors[place.parameter][place.first : place.first + place.rows], place.cut.count
            target.narrow(place.cut.axis, 0, held).copy_(tensor)
            target.narrow(place.cut.axis, held, place.cut.room - held).zero_()
        return ""

    with ThreadPoolExecutor(min(8, count_cpus()), thread_name_prefix="weights") as pool:
        done = tqdm(pool.map(load, place_of.items()), "weights", len(place_of), unit="tensor", disable=not progress)
        _raise_if_any([problem for problem in done if problem])
    params = _parameters(tensors)
    for name in kept:
        parts = found.pop(name)
        params.weights[name] = joined([parts[first] for first in sorted(parts)])
    return params


def untied_if_both(reader: WeightReader, spec: ModelSpec) -> ModelSpec:
    """The spec; not tied where the config says so but the files hold an lm_head of its own, as in transformers."""
    tied, head = "model.embed_tokens.weight", "lm_head.weight"
    if not spec.tie_embeddings or not {tied, head} <= set(reader.names()):
        return spec
    if reader.shape(tied) == reader.shape(head) and torch.equal(reader.read(tied), reader.read(head)):
        return spec
    log.warning(
        "config.json ties lm_head to the embedding, but the weights hold a different %s; it is used. "
        "Set tie_word_embeddings to false to silence this warning", head
    )  # fmt: skip
    return replace(spec, tie_embeddings=False)


def dummy_weights(
    spec: ModelSpec, dtype: torch.dtype, device: str | torch.device, seed: int = 0, shard: Shard = WHOLE
) -> Parameters:
    """Random weights of the right shapes, for measuring speed without a download.

    Normal with variance 1 / inputs, so that values and logits stay near 1; norms are 1. Large parameters repeat one
    pool of numbers, because drawing billions of them would take minutes. Every shard has its part of the same model.
    """
    pool_size = 4_000_037  # prime, so that rows of one matrix do not coincide
    source = torch.Generator().manual_seed(seed)
    pool = torch.randn(pool_size, generator=source).to(device=device, dtype=dtype)
    layout, cut, tensors = list(model_class(spec).layout(spec)), partial(shard.cut, spec), {}
    for index, (name, shape) in enumerate(shapes(layout, cut)):
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if not name.endswith("norm.weight"):
            parts = [(whole, cut(source, whole)) for source, whole in layout[index][1]]
            _fill_parts(tensor, parts, pool.roll(index * 7919))
        tensors[name] = tensor
    return _parameters(tensors)


def to_int8(weight: Weight) -> Weight:
    """The weight in 8 bits."""
    return quantize(weight.dense())


def to_fp8(weight: Weight) -> Weight:
    """The weight in e4m3, if its sizes are those that matrix units multiply; else as it is."""
    if isinstance(weight, Fp8Weight) or any(size % FP8_SIZES for size in weight.shape):
        return weight
    return quantize_fp8(weight.dense())


def _parameters(tensors: dict[str, Tensor]) -> Parameters:
    """Matrices become weights; norm weights and biases stay tensors."""
    return Parameters(
        {name: DenseWeight(tensor) for name, tensor in tensors.items() if tensor.dim() == 2},
        {name: tensor for name, tensor in tensors.items() if tensor.dim() == 1},
    )


def pick_dtype(name: str, spec: ModelSpec, device_type: str) -> torch.dtype:
    """auto: the config's type; on a CPU, bfloat16 only if the model has 16 bits and the CPU multiplies them."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UnknownName(f"dtype {name!r} is unknown; known: auto, {', '.join(DTYPES)}")
    if device_type != "cpu":
        return DTYPES[spec.dtype_name]
    from shoal.kernels.cpu import has_bfloat16_products

    return torch.bfloat16 if spec.dtype_name != "float32" and has_bfloat16_products() else torch.float32


def _check_names(have: set[str], wanted: Mapping[str, Place], spec: ModelSpec) -> None:
    """Before anything is read: missing tensors, and tensors that are not part of the model."""
    missing = [f"{name} {_shape(place.shape)} is missing" for name, place in wanted.items() if name not in have]
    extra = [f"{name} is not part of this model" for name in sorted(have - wanted.keys()) if not _harmless(name, spec)]
    _raise_if_any(missing + extra)


def _check_shapes(reader: WeightReader, wanted: Mapping[str, Place]) -> None:
    found = ((name, place.shape, reader.shape(name)) for name, place in wanted.items())
    _raise_if_any(
        [f"{name} is {_shape(has)}, the config needs {_shape(needs)}" for name, needs, has in found if has != needs]
    )


def _harmless(name: str, spec: ModelSpec) -> bool:
    return name.endswith(HARMLESS_ENDINGS) or (spec.tie_embeddings and name == "lm_head.weight")


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        rest = len(problems) - MOST_PROBLEMS
        more = f"; and {rest} more" if rest > 0 else ""
        shown = "; ".join(problems[:MOST_PROBLEMS])
        raise BadWeights(f"the weights do not fit the config: {shown}{more}. Use the config.json of these weights")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)


def _fill_parts(tensor: Tensor, parts: Sequence[tuple[tuple[int, ...], Cut]], pool: Tensor) -> None:
    """Fill a parameter with its parts of the whole one, whose values are those of the pool, again and again."""
    row, before = 0, 0  # in this parameter; values of the whole one before the part
    for shape, cut in parts:
        width, rows = math.prod(shape[1:]), cut.local(shape)[0]
        target = tensor[row : row + rows].view(rows, -1)
        if cut.axis == 0:
            target, first = target[: cut.count], before + cut.first * width
            tensor[row + cut.count : row + rows] = 0
            _fill(target.view(-1), first, pool)
        else:
            for number, line in enumerate(target):
                _fill(line, before + number * width + cut.first, pool)
        target.mul_(0.02 if len(shape) == 1 else shape[-1] ** -0.5)
        row, before = row + rows, before + math.prod(shape)


def _fill(flat: Tensor, first: int, pool: Tensor) -> None:
    """Values number `first` and following."""
    at = 0
    while at < len(flat):
        begin = (first + at) % len(pool)
        count = min(len(flat) - at, len(pool) - begin)
        flat[at : at + count].copy_(pool[begin : begin + count])
        at += count


_AGAIN = "download the model again"
