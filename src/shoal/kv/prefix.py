"""Prefix cache: which block holds the KV of which tokens after which prefix.

A full block is named by a chain of sha256 digests: salt → block 0 → block 1 → …, so that equal names mean equal
prefixes within one salt (a tenant), and no tenant can hit another's blocks. Knows digests and block ids, no requests.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def first_digest(salt: str) -> bytes:
    """The name of the empty prefix for one tenant."""
    return sha256(b"shoal\0" + salt.encode()).digest()


def next_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the prefix that ends with this full block of tokens."""
    return sha256(previous + array("q", tokens).tobytes()).digest()


class PrefixIndex:
    """digest → block, one block per digest and one digest per block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

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
        return True

    def forget(self, block: int) -> None:
        """The block's content is gone."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def name_of(self, block: int) -> bytes | None:
        """The digest of its content, if that can be found."""
        return self._digest_of.get(block)

    def named_block(self, block: int) -> bool:
        """Whether this block's content can be found."""
        return block in self._digest_of

    def named(self) -> dict[int, bytes]:
        """block → digest, for checks."""
        return dict(self._digest_of)
