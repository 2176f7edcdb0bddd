"""What an engine tells routers: its load, and changes of its prefix cache.

Owns the record, and how the names of blocks are joined in it. Knows nothing of how it travels, of routing or of
scheduling.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NAME_BYTES = 16  # of a block's sha256 name: two of a billion names are equal with a chance of 1 in 10**20


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The state of one engine, for one front. Names are NAME_BYTES each, one after the other."""

    queued_tokens: int = 0  # prompt tokens that are not computed yet, and outputs that are expected
    expected_output: int = 0  # tokens of an answer, as seen lately
    wait_s: float = 0.0  # how long a new request would wait for its first pass, as predicted
    submissions: int = 0  # of this front since its Hello, all of which queued_tokens counts
    snapshot: bool = False  # `added` is all that there is
    added: bytes = b""  # names of blocks that can be hit from now on
    evicted: bytes = b""  # … and of those that no longer can
    # what was computed here since the service before, for each tenant with requests; the first has number 1
    service: dict[str, float] | None = None
    service_number: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One of a server's engines, as its status shows it."""

    number: int
    up: bool
    starts: int  # before the latest one; 0 until the first


def join_names(names: Iterable[bytes]) -> bytes:
    """
    >>> list(split_names(join_names([b"a" * 32, b"b" * 32]))) == [b"a" * 16, b"b" * 16]
    True
    """
    return b"".join(name[:NAME_BYTES] for name in names)


def split_names(joined: bytes) -> Iterator[bytes]:
    for start in range(0, len(joined), NAME_BYTES):
        yield joined[start : start + NAME_BYTES]
