"""The head of a GGUF file: its key-value pairs and the list of its tensors.

Owns the binary format only, not the meaning of keys or the tensor values. gguf.GGUFReader reads the same, but takes
seconds for a vocabulary of 50,000 strings, where this takes a tenth of one.

    "GGUF" | version u32 | tensors u64 | pairs u64 | pairs … | tensor infos … | padding | tensor data …
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import BadWeights, shown
from shoal.files.reading import has_file, is_integer

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4  # ggml's own limit
# Far more than real files have; a file of absurd counts is refused before it is read to its end.
MOST_PAIRS, MOST_TENSORS, MOST_HEADER_BYTES = 2**16, 2**20, 128 * 2**20


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy order, the reverse of the file's; `offset` is from the data start."""

    name: str
    shape: tuple[int, ...]
    type_code: int
    offset: int


@dataclass(frozen=True)
class Header:
    """Everything before the tensor data."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_start: int


def map_file(path: Path) -> mmap.mmap:
    """The whole file as read-only memory."""
    if not has_file(path):
        raise BadWeights(f"{path} is missing; pass a GGUF file")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BadWeights(f"cannot read {path}: {error}; pass a GGUF file") from error


def read_header(buffer: mmap.mmap, path: Path) -> Header:
    """Parse the head of a mapped file; a file that is no GGUF, or ends too early, is BadWeights."""
    if buffer[:4] != b"GGUF":
        raise BadWeights(
            f"{path} is not a GGUF file (it begins with {buffer[:4]!r}); pass a .gguf or download it again"
        )
    cursor = _Cursor(buffer, path, 4)
    version = cursor.u32()
    if version not in (2, 3):
        raise BadWeights(
            f"{path} is GGUF version {version}; only little-endian versions 2 and 3 are read: convert it again"
        )
    tensor_count, pair_count = cursor.u64(), cursor.u64()
    if tensor_count > MOST_TENSORS or pair_count > MOST_PAIRS:
        raise BadWeights(
            f"{path} claims {tensor_count} tensors and {pair_count} metadata keys, at most {MOST_TENSORS} and "
            f"{MOST_PAIRS} are read; download it again"
        )
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        if key in metadata:
            raise BadWeights(f"{path} has the metadata key {shown(key)} twice; convert the model again")
        metadata[key] = cursor.value(cursor.u32())
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        tensor = _read_tensor(cursor)
        if tensor.name in tensors:
            raise BadWeights(f"{path} has two tensors named {shown(tensor.name)}; convert the model again")
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if not is_integer(alignment) or alignment <= 0 or alignment & (alignment - 1):
        raise BadWeights(
            f"{path}: general.alignment is {shown(alignment)}, a power of two is needed; convert the model again"
        )
    return Header(metadata, list(tensors.values()), -(-cursor.position // alignment) * alignment)


def _read_tensor(cursor: "_Cursor") -> TensorInfo:
    name, dimensions = cursor.string(), cursor.u32()
    if dimensions > _MAX_DIMENSIONS:
        raise BadWeights(
            f"{cursor.path}: tensor {shown(name)} has {dimensions} dimensions, at most {_MAX_DIMENSIONS} are possible; "
            "download it again"
        )
    shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
    return TensorInfo(name, shape, cursor.u32(), cursor.u64())


class _Cursor:
    """A position in the file that never runs past its end."""

    def __init__(self, buffer: mmap.mmap, path: Path, position: int) -> None:
        self.buffer, self.path, self.position = buffer, path, position
        self.size = min(len(buffer), MOST_HEADER_BYTES)

    def take(self, n_bytes: int) -> int:
        """Step over n bytes and return where they began."""
        start = self.position
        if n_bytes > self.size - start:
            raise self.damaged(start)
        self.position = start + n_bytes
        return start

    def damaged(self, position: int) -> BadWeights:
        if self.size < len(self.buffer):
            return BadWeights(
                f"{self.path} has a header of more than {MOST_HEADER_BYTES >> 20} MiB, which no model needs; "
                "download it again"
            )
        return BadWeights(f"{self.path} is truncated or damaged at byte {position}; download it again")

    def u32(self) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.take(length)
        return self.buffer[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        number = self.numbers(kind, 1)[0]
        # The shortest decimal that names this float32, so that 1e-05 reads as 1e-05 and not as 9.999999747e-06.
        return float(str(number)) if kind == _FLOAT32 else number.item()

    def array(self, depth: int) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if depth > _MAX_NESTING:
            raise BadWeights(f"{self.path} nests arrays too deep; download it again")
        if count * {_STRING: 8, _ARRAY: 12}.get(kind, 1) > self.size - self.position:
            raise self.damaged(self.position)
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array(depth + 1) for _ in range(count)]
        values: list[Any] = self.numbers(kind, count).tolist()
        return values

    def numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _NUMBERS:
            raise BadWeights(
                f"{self.path} has a value of unknown kind {kind} at byte {self.position}; download it again"
            )
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.buffer, dtype, count, self.take(dtype.itemsize * count))

    def strings(self, count: int) -> list[str]:
        """An inlined loop: a vocabulary has a hundred thousand strings."""
        buffer, size, position, unpack = self.buffer, self.size, self.position, _U64.unpack_from
        found: list[str] = []
        for _ in range(count):
            if position + 8 > size:
                raise self.damaged(position)
            end = position + 8 + unpack(buffer, position)[0]
            if end > size:
                raise self.damaged(position)
            found.append(buffer[position + 8 : end].decode("utf-8", "replace"))
            position = end
        self.position = position
        return found
