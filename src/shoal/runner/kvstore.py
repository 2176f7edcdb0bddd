"""The KV tensors, and the copies between their blocks, or from the outbox of another engine.

Owns the memory, not its use: the KV manager decides which request holds a block.
"""

import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import BlockCopy
from shoal.core.ports import BlockOutbox, BlockReader
from shoal.errors import BadConfig, TransferFailed
from shoal.kernels import fp8
from shoal.models.spec import ModelSpec

log = logging.getLogger(__name__)


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers; of fp8 with its scales."""
    if dtype == fp8.FP8:
        return 2 * spec.layers * fp8.block_bytes(block_size, spec.kv_heads, spec.head_dim)
    return spec.kv_values_per_token * block_size * dtype.itemsize


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU they take memory only once they are written.

    torch.zeros writes every page of a large CPU tensor: seconds for a cache of some gigabytes, most of it unused.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)  # the kernel hands out zero pages on first use
    return torch.from_numpy(raw).view(dtype).view(shape)


@contextmanager
def refusing(flag: str, blocks: int, block_bytes: int) -> Iterator[None]:
    """Turn a failed allocation into BadConfig: the flag asks for too much memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # numpy's, torch's
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        size = f"{blocks * block_bytes / 2**30:.1f} GiB for {blocks:,} KV blocks"
        raise BadConfig(f"{size} do not fit into memory ({str(error).splitlines()[0]}); lower {flag}") from error


class KVStore:
    """Keys and values of all layers: per layer two tensors [blocks, block_size, kv_heads, head_dim].

    `data` is their memory, [layers, 2, blocks, …]: the tensors themselves or, for fp8, the bytes of each block, in
    which scales follow the values (kernels/fp8.py).
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        host_blocks: int = 0,
        outbox: BlockOutbox | None = None,
        peers: BlockReader | None = None,
    ) -> None:
        """`outbox`: the memory of the host blocks, which other engines read; `peers`: how their outboxes are read."""
        # zeros, not empty: masked positions are multiplied by 0, and 0 x NaN is NaN; untouched pages cost nothing
        self.scratch = blocks  # one block more, which padding writes to
        sizes = (block_size, spec.kv_heads, spec.head_dim)
        of_block = (fp8.block_bytes(*sizes),) if dtype == fp8.FP8 else sizes
        kept = torch.uint8 if dtype == fp8.FP8 else dtype
        block_bytes = bytes_per_block(spec, block_size, dtype)
        with refusing("--kv-memory or --kv-share", blocks, block_bytes):
            self.data = lazy_zeros((spec.layers, 2, blocks + 1, *of_block), kept, device)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self.data]
        if dtype == fp8.FP8:
            self.layers = [(fp8.blocks_in(k, *sizes), fp8.blocks_in(v, *sizes)) for k, v in self.layers]
        self.block_size = block_size
        self.host: Tensor | None = None
        self.outbox, self.peers = outbox, peers
        self._one_block = (spec.layers, 2, *of_block)
        self._unpin: weakref.finalize[[int], KVStore] | None = None
        if outbox is not None:
            self.host = self._opened(outbox)
        elif host_blocks:
            host_shape = (spec.layers, 2, host_blocks, *of_block)
            # pinned where the device is a GPU: only then do copies run beside its work
            pinned = self.data.is_cuda
            with refusing("--host-kv-memory", host_blocks, block_bytes):
                self.host = (
                    torch.zeros(host_shape, dtype=kept, pin_memory=True)
                    if pinned
                    else lazy_zeros(host_shape, kept, "cpu")
                )

    def _opened(self, outbox: BlockOutbox) -> Tensor:
        """Its blocks, indexed as the device's are. Each lies in one piece, so that it can be sent."""
        raw = outbox.memory if isinstance(outbox.memory, Tensor) else torch.from_numpy(outbox.memory)
        if self.data.is_cuda and not raw.is_cuda and pin(raw):
            # before the memory goes: pages that stay registered would be taken for others at the same address
            self._unpin = weakref.finalize(self, unpin, raw.data_ptr())
            self._unpin.atexit = False
        blocks = raw.view(self.data.dtype).view(len(raw), *self._one_block)
        return blocks.permute(1, 2, 0, *range(3, blocks.dim()))

    @torch.inference_mode()
    def copy(self, order: BlockCopy) -> None:
        """Copy blocks between device and host, one by one, without a buffer in between."""
        if order.peer:
            self._copy_from_peer(order)
            return
        assert self.host is not None, "a copy of blocks, but there is no host memory for them"
        out = order.direction == "out"
        source, target = (self.data, self.host) if out else (self.host, self.data)
        outbox = self.outbox if out else None
        if outbox is not None:
            for other in order.target:
                outbox.clear(other)
        for one, other in zip(order.source, order.target, strict=True):
            target[:, :, other].copy_(source[:, :, one], non_blocking=True)
        if outbox is not None:
            if self.data.is_cuda:
                torch.cuda.current_stream().synchronize()
            for name, other in zip(order.names, order.target, strict=True):
                outbox.label(other, name)

    def _copy_from_peer(self, order: BlockCopy) -> None:
        assert self.peers is not None, "blocks of another engine, but none can be reached"

        def take(number: int, block: Any) -> None:
            raw = block if isinstance(block, Tensor) else torch.from_numpy(block)
            self.data[:, :, order.target[number]].copy_(raw.view(self.data.dtype).view(self._one_block))

        try:
            self.peers.read(order.peer, order.source, order.names, take)
        except TransferFailed as error:
            log.warning("%d KV blocks are computed again: %s", len(order.target), error)
            raise

    def close(self) -> None:
        """No more copies between engines; those under way end soon."""
        if self._unpin is not None:
            torch.cuda.synchronize()
            self._unpin()
        for one in (self.outbox, self.peers):
            if one is not None:
                one.close()


def pin(memory: Tensor) -> bool:
    """Have a GPU copy from and to this host memory at full speed, if it can."""
    problem = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(problem):
        log.warning("the KV outbox could not be pinned (CUDA error %d); copies to it are slower", int(problem))
    return not int(problem)


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
