"""Memory that a process gives back to the system when it is done with it.

glibc keeps what was freed: in a heap of 64 MB for each of many threads, and, once a large block was freed, in those
heaps for all blocks up to 32 MB. A front that has read some large bodies would keep their memory for good. Of small
blocks it keeps all that lie before one in use. Owns these settings of the C library. Knows no requests.
"""

import ctypes
import sys

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE = 1 << 20  # bytes; blocks from here on are taken from the system, and go back to it, each by itself
HEAPS = 2


def give_memory_back() -> bool:
    """From now on. False: this system cannot be told."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    if mallopt is None:
        return False
    return bool(mallopt(M_ARENA_MAX, HEAPS) and mallopt(M_MMAP_THRESHOLD, LARGE))


def trim() -> None:
    """Give back the free pages between blocks in use, now; takes milliseconds. Nothing on systems that cannot."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
