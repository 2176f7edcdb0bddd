"""The KV tensors, and the copies between their blocks, or from the outbox of another engine.

Owns the memory, not its use: the KV manager decides which request holds a block.
"""

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
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

GATHERED_BYTES = 64 * 2**20  # of blocks that a GPU gathers for one copy: few launches, and little memory in between


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
        self._at_once = max(1, GATHERED_BYTES // block_bytes)
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
        if out and self.outbox is not None:
            self._copy_to_outbox(order, self.outbox)
            return
        source, target = (self.data, self.host) if out else (self.host, self.data)
        for one, other in zip(order.source, order.target, strict=True):
            target[:, :, other].copy_(source[:, :, one], non_blocking=True)

    def _copy_to_outbox(self, order: BlockCopy, outbox: BlockOutbox) -> None:
        """In parts, each of which can be read while the next one is copied."""
        assert self.host is not None
        for place in order.target:
            outbox.clear(place)
        at_once = self._at_once if self.data.is_cuda else 1
        for first in range(0, len(order.source), at_once):
            part = slice(first, first + at_once)
            sources, places = order.source[part], order.target[part]
            if self.data.is_cuda:
                self._send(sources, places, self.host)
            else:
                self.host[:, :, places[0]].copy_(self.data[:, :, sources[0]])
            for place, name in zip(places, order.names[part], strict=True):
                outbox.label(place, name)

    def _send(self, sources: Sequence[int], places: Sequence[int], host: Tensor) -> None:
        """From a GPU's cache to an outbox, which is on the same GPU or in pinned memory."""
        gathered = self._blocks.index_select(1, self._indices(sources)).transpose(0, 1)  # [blocks, layers x 2, …]
        outside = host.permute(2, 0, 1, *range(3, host.dim())).view(host.shape[2], -1).view(gathered.dtype)
        if outside.is_cuda:
            outside.index_copy_(0, self._indices(places), gathered.reshape(len(places), -1))
        else:
            for place, block in zip(places, gathered.reshape(len(places), -1), strict=True):
                outside[place].copy_(block, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    @property
    def _blocks(self) -> Tensor:
        """The cache as [layers x 2, blocks, …], in numbers as wide as possible."""
        flat = self.data.view(torch.uint8).view(len(self.data) * 2, self.data.shape[2], -1)
        return flat if flat.shape[2] % 8 else flat.view(torch.int64)

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.data.device)

    def _copy_from_peer(self, order: BlockCopy) -> None:
        assert self.peers is not None, "blocks of another engine, but none can be reached"

        def take(first: int, blocks: Any) -> None:
            raw = blocks if isinstance(blocks, Tensor) else torch.from_numpy(blocks)
            targets = order.target[first : first + len(raw)]
            if raw.is_cuda:
                cache = self._blocks
                came = raw.view(torch.uint8).view(cache.dtype).view(len(raw), len(cache), -1)
                cache.index_copy_(1, self._indices(targets), came.transpose(0, 1))
                return
            for target, block in zip(targets, raw, strict=True):
                self.data[:, :, target].copy_(block.view(self.data.dtype).view(self._one_block))

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
