"""CUDA IPC: an outbox in the memory of a GPU, which another process on the same GPU maps.

The blocks lie on the device, their labels in a segment of host memory. So a block goes from one engine's KV cache to
the outbox and from there into the other's, without leaving the GPU. Only for engines that see the same GPU. The one
file of this room that loads torch.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch

from shoal.disagg.transport import SharedOutbox, SharedPeer, Take
from shoal.errors import TransferFailed

GATHERED_BYTES = 64 * 2**20  # of blocks that are handed over together: few launches, and little memory in between


class CudaOutbox(SharedOutbox):
    """Labels in shared memory, blocks on the GPU."""

    def __init__(self, folder: Path, blocks: int, block_bytes: int) -> None:
        super().__init__(folder, blocks, 0)
        self.memory = torch.zeros((blocks, block_bytes), dtype=torch.uint8, device="cuda")
        self.address = self.address.replace("unix:", "cuda:", 1)
        self._handle = packed(self.memory.untyped_storage()._share_cuda_())

    def about(self) -> dict[str, Any]:
        return {**super().about(), "shape": list(self.memory.shape), "handle": self._handle}


class CudaPeer(SharedPeer):
    """Maps the other engine's blocks on the GPU."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        handle = unpacked(self.about["handle"])
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle[1:])
        blocks = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).view(self.about["shape"])
        self._at_once = max(1, GATHERED_BYTES // blocks.shape[1])
        self._blocks = blocks if blocks.shape[1] % 8 else blocks.view(torch.int64)  # gathered in larger pieces

    def read(self, blocks: Sequence[int], names: Sequence[bytes], take: Take, closing: Event) -> None:
        if not all(0 <= block < len(self._blocks) for block in blocks):
            raise TransferFailed("there is no such block")
        for first in range(0, len(blocks), self._at_once):
            part = blocks[first : first + self._at_once]
            for block, name in zip(part, names[first:], strict=False):
                self.wait(block, name, closing)
            take(first, self._blocks.index_select(0, torch.tensor(part, device="cuda")))
        torch.cuda.current_stream().synchronize()  # the copies are queued; what they read must not change before
        for block, name in zip(blocks, names, strict=True):
            self.confirm(block, name)


def packed(handle: Sequence[Any]) -> str:
    """What CUDA says about shared memory, as text."""
    parts = [{"b": base64.b64encode(one).decode()} if isinstance(one, bytes) else one for one in handle]
    return json.dumps(parts)


def unpacked(text: str) -> list[Any]:
    """
    >>> unpacked(packed((0, b"handle", 5, False)))
    [0, b'handle', 5, False]
    """
    return [base64.b64decode(one["b"]) if isinstance(one, dict) else one for one in json.loads(text)]
