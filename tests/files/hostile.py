"""Model files made to break a reader: values that belong nowhere, GGUF files byte by byte, names that are no files.

Owns how they are made, and the one question asked of all of them (`refusal`). Knows nothing of the code under test
but how a model is opened.
"""

import json
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.errors import BadChat, ShoalError, one_line
from tests.story.models import greedy, open_llm

HEADROOM = 3 * 2**30  # of address space for one model of a megabyte; an absurd allocation takes far more


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


ABSURD: dict[str, Any] = {
    "text": "a",
    "no text": "",
    "digits": "12",
    "list": [1],
    "list of texts": ["a", "b"],
    "empty list": [],
    "object": {"a": 1},
    "empty object": {},
    "true": True,
    "false": False,
    "null": None,
    "nan": float("nan"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    "fraction": 2.5,
    "tiny": 1e-320,
    "large float": 1.7e308,
    "0": 0,
    "-1": -1,
    "1e6": 10**6,
    "1e9": 10**9,
    "2**31": 2**31,
    "2**32-1": 2**32 - 1,
    "2**63": 2**63,
    "2**64": 2**64,
    "-2**63": -(2**63),
    "10**400": 10**400,
    "deep": nested(200),
    "huge text": "x" * 10**6,
    "odd text": "\ud800\n\x1b[2J\0",
}


class Recorder(dict[str, Any]):
    """A mapping that notes which keys are read."""

    def __init__(self, values: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)


def refusal(path: Path, **options: Any) -> str:
    """Why the model cannot be used; nothing if it can. Anything but a ShoalError, and absurd memory, is an error."""
    try:
        with bounded_memory(), open_llm(path, **{"kv_memory": "64MiB", **options}) as llm:
            _ = llm.grammars
            if llm.tokenizer is not None:
                with suppress(BadChat):
                    llm.encode([{"role": "user", "content": "a"}])
            for output in llm.generate([[5, 6, 7]], greedy(2)):
                assert output.outputs[0].finish_reason
    except ShoalError as error:
        return one_line(error) or "nothing was said"
    return ""


def said_by(work: Callable[[], object]) -> str:
    """The message of the ShoalError that some work raises; nothing where it raises none."""
    try:
        work()
    except ShoalError as error:
        return str(error) or "nothing was said"
    return ""


@contextmanager
def bounded_memory() -> Iterator[None]:
    """An allocation of more than HEADROOM fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def edit(path: Path, change: Mapping[str, Any]) -> None:
    """Change values of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


# ---- what may be where a file belongs --------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "circle of links": lambda path: path.symlink_to(path.name),
    "link to a folder": lambda path: path.symlink_to("/"),
    "empty": Path.touch,
    "terabyte of zeros": lambda path: sparse(path, 2**40),
    "no utf-8": lambda path: path.write_bytes(b'{"a": "\xff\xfe"}'),
    "deep": lambda path: path.write_text('{"a":' * 100_000),
    "deep list": lambda path: path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "long number": lambda path: path.write_text('{"vocab_size": 1' + "0" * 10_000 + "}"),
    "number": lambda path: path.write_text("3"),
    "text": lambda path: path.write_text('"a"'),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
}


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


# ---- GGUF, byte by byte ----------------------------------------------------------------------------------------------

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
Pair = tuple[int, Any]
"""(type code, value); an array is (ARRAY, (element type code, values))"""


def text_bytes(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text_bytes(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(value_bytes(inner, one) for one in values)
    return struct.pack(f"<{_FORMATS[kind]}", value)


def pair_bytes(pairs: Mapping[str, Pair]) -> bytes:
    return b"".join(
        text_bytes(key) + struct.pack("<I", kind) + value_bytes(kind, value) for key, (kind, value) in pairs.items()
    )


def tensor_bytes(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """`shape` in the file's order, the reverse of numpy's."""
    return text_bytes(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    pairs: Mapping[str, Pair], tensors: Sequence[tuple[str, Sequence[int], int, int]], data: int, **counts: int
) -> bytes:
    """A whole file, with zeros for data; `counts`: pair_count, tensor_count and version where they lie."""
    head = struct.pack(
        "<4sIQQ",
        b"GGUF",
        counts.get("version", 3),
        counts.get("tensor_count", len(tensors)),
        counts.get("pair_count", len(pairs)),
    )
    head += pair_bytes(pairs) + b"".join(tensor_bytes(*tensor) for tensor in tensors)
    return head + bytes(-len(head) % 32 + data)
