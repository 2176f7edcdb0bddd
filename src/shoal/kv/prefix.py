"""Prefix cache: which block holds the KV of which tokens after which prefix.

A full block is named by a chain of sha256 digests: salt → block 0 → block 1 → …, so that equal names mean equal
prefixes within one salt (a tenant), and no tenant can hit another's blocks. Knows digests and block ids, no requests.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol


def first_digest(salt: str) -> bytes:
    """The name of the empty prefix for one tenant."""
    return sha256(b"shoal\0" + salt.encode()).digest()


def next_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the prefix that ends with this full block of tokens."""
    return sha256(previous + array("q", tokens).tobytes()).digest()


class Journal(Protocol):
    """Is told what can be found, and what no longer can."""

    def added(self, *digests: bytes) -> None: ...

    def evicted(self, *digests: bytes) -> None: ...


class NetChanges:
    """What has changed since it was last asked: a name that came and went is in neither list.

    So it never holds more names than there were then and are now.

    >>> changes = NetChanges()
    >>> changes.added(b"a", b"b"); changes.evicted(b"a", b"old")
    >>> changes.take()
    ([b'b'], [b'old'])
    """

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._evicted)

    def added(self, *digests: bytes) -> None:
        for digest in digests:
            if digest in self._evicted:
                del self._evicted[digest]
            else:
                self._added[digest] = None

    def evicted(self, *digests: bytes) -> None:
        for digest in digests:
            if digest in self._added:
                del self._added[digest]
            else:
                self._evicted[digest] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(added, evicted)"""
        changes = list(self._added), list(self._evicted)
        self._added, self._evicted = {}, {}
        return changes


class PrefixIndex:
    """digest → block, one block per digest and one digest per block 0 … total-1."""

    def __init__(self, total: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * total
        self.journal: Journal | None = None  # no other process needs to know

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def add(self, digest: bytes, block: int) -> bool:
        """Name the block; False if another block has this content already."""
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        self._digest_of[block] = digest
        if self.journal is not None:
            self.journal.added(digest)
        return True

    def add_all(self, digests: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Name these blocks; returns those whose content no other block had. Hot: once per block."""
        block_of, digest_of, new = self._block_of, self._digest_of, list[int]()
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in block_of:
                block_of[digest] = block
                digest_of[block] = digest
                new.append(block)
        if new and self.journal is not None:
            self.journal.added(*[name for block in new if (name := digest_of[block]) is not None])
        return new

    def forget(self, *blocks: int) -> None:
        """The contents of these blocks, as far as they were named, are gone. Hot: once per block."""
        block_of, digest_of, gone = self._block_of, self._digest_of, list[bytes]()
        for block in blocks:
            digest = digest_of[block]
            if digest is not None:
                digest_of[block] = None
                del block_of[digest]
                gone.append(digest)
        if gone and self.journal is not None:
            self.journal.evicted(*gone)

    def names(self) -> Iterable[bytes]:
        """The digests that can be found."""
        return self._block_of.keys()

    def name_of(self, block: int) -> bytes | None:
        """The digest of its content, if that can be found."""
        return self._digest_of[block]

    def named_block(self, block: int) -> bool:
        """Whether this block's content can be found."""
        return self._digest_of[block] is not None

    def named(self) -> dict[int, bytes]:
        """block → digest, for checks."""
        return {block: digest for block, digest in enumerate(self._digest_of) if digest is not None}
