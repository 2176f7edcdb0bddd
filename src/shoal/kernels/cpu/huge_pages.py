"""Memory for weights in huge pages.

Every pass reads all weights once, and a page of 4 KiB is 64 cache lines: on a virtual machine looking pages up, and
prefetches that end with each of them, cost a quarter of the memory's speed. Most systems give huge pages only to
programs that ask for them, and only for whole ones, aligned: so weights lie side by side in large chunks, for which
this asks. Owns the chunks. Where the system has no huge pages, they are ordinary memory.
"""

import mmap
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from shoal.kernels.block_weight import PanelWeight
from shoal.kernels.weights import DenseWeight, Int8Weight, Weight

HUGE = 2 << 20  # bytes of a page, or of several where these are smaller
CHUNK = 32 * HUGE  # taken from the system at a time; only what is written takes memory
ALIGN = 64  # every weight begins on a cache line


class HugePages:
    """Chunks of memory; one lives as long as something in it."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)  # what is left of the newest chunk

    def moved(self, weight: Weight) -> Weight:
        """The weight with its values here; the one given is used up."""
        if isinstance(weight, DenseWeight):
            return DenseWeight(self.copied(weight.values))
        if isinstance(weight, Int8Weight) and isinstance(weight.stored, DenseWeight):
            return replace(weight, stored=DenseWeight(self.copied(weight.stored.values)))
        if isinstance(weight, PanelWeight):
            offsets = None if weight.offsets is None else self.copied(weight.offsets)
            return replace(
                weight, values=self.copied(weight.values), scales=self.copied(weight.scales), offsets=offsets
            )
        return weight

    def copied(self, values: Tensor) -> Tensor:
        """A copy of a tensor, contiguous."""
        size = -(-values.nbytes // ALIGN) * ALIGN
        if size > len(self._free):
            self._free = _chunk(max(CHUNK, -(-size // HUGE) * HUGE))
        taken, self._free = self._free[: values.nbytes], self._free[size:]
        found = taken.view(values.dtype).view(values.shape)
        found.copy_(values)
        return found


def _chunk(size: int) -> Tensor:
    """So many bytes from the system, beginning with a huge page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has other rules
    with suppress(OSError):  # a system without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(area, dtype=torch.uint8)
    first = -found.data_ptr() % HUGE
    return found[first : first + size]
