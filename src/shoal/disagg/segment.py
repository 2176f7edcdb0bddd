"""A segment: memory that several processes map, with blocks of equal size and a label for each.

Anonymous: it has no name in any file system, other processes get its descriptor, and it is gone with the last of them,
however they end. Owns the layout and the order of writes that makes a label tell the truth. Knows no sockets.
"""

import mmap
import os
import tempfile
from threading import Lock

import numpy as np
import numpy.typing as npt

LABEL_BYTES = 32  # a sha256 digest
PAGE = 4096

_fence = Lock()


def fence() -> None:
    """Have other cores see what was written before this call before what is written after it, and the reverse for
    reading: taking a lock twice orders memory on every machine, and Python has nothing shorter."""
    for _ in range(2):
        with _fence:
            pass


class Segment:
    """`blocks` blocks of `block_bytes`; block_bytes 0: only labels.

    >>> segment = Segment.fresh(2, 100)
    >>> segment.label(1, b"n" * 32)
    >>> other = Segment(os.dup(segment.fd), 2, 100)
    >>> other.holds(1, b"n" * 32), other.holds(0, b"n" * 32), other.data.shape
    (True, False, (2, 100))
    """

    def __init__(self, fd: int, blocks: int, block_bytes: int) -> None:
        self.fd, self.blocks, self.block_bytes = fd, blocks, block_bytes
        self._map = mmap.mmap(fd, _size(blocks, block_bytes))
        first = _data_offset(blocks)
        everything = np.frombuffer(self._map, dtype=np.uint8)
        self.labels: npt.NDArray[np.uint8] = everything[: blocks * LABEL_BYTES].reshape(blocks, LABEL_BYTES)
        self.data: npt.NDArray[np.uint8] = everything[first : first + blocks * block_bytes].reshape(blocks, block_bytes)

    @classmethod
    def fresh(cls, blocks: int, block_bytes: int) -> "Segment":
        """A new one; its pages take memory once they are written."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("shoal-outbox", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _size(blocks, block_bytes))
        return cls(fd, blocks, block_bytes)

    def clear(self, block: int) -> None:
        """Its content is about to change."""
        self.labels[block] = 0
        fence()

    def label(self, block: int, name: bytes) -> None:
        """Its content is complete."""
        fence()
        self.labels[block] = np.frombuffer(name, dtype=np.uint8)

    def holds(self, block: int, name: bytes) -> bool:
        """Whether it holds this now. What was read before this call is right only if it holds the same after it."""
        fence()
        same = bool(self.labels[block].tobytes() == name)
        fence()
        return same

    def close(self) -> None:
        """Give back the descriptor; the memory goes when no array looks at it any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _data_offset(blocks: int) -> int:
    return -(-blocks * LABEL_BYTES // PAGE) * PAGE


def _size(blocks: int, block_bytes: int) -> int:
    return max(PAGE, _data_offset(blocks) + blocks * block_bytes)
