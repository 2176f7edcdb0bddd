"""The KV tensors, and the copies between their blocks.

Owns the memory, not its use: the KV manager decides which request holds a block.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import BlockCopy
from shoal.errors import BadConfig
from shoal.kernels import fp8
from shoal.models.spec import ModelSpec


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
    ) -> None:
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
        if host_blocks:
            host_shape = (spec.layers, 2, host_blocks, *of_block)
            # pinned where the device is a GPU: only then do copies run beside its work
            pinned = self.data.is_cuda
            with refusing("--host-kv-memory", host_blocks, block_bytes):
                self.host = (
                    torch.zeros(host_shape, dtype=kept, pin_memory=True)
                    if pinned
                    else lazy_zeros(host_shape, kept, "cpu")
                )

    @torch.inference_mode()
    def copy(self, order: BlockCopy) -> None:
        """Copy blocks between device and host, one by one, without a buffer in between."""
        assert self.host is not None, "a copy of blocks, but there is no host memory for them"
        source, target = (self.data, self.host) if order.direction == "out" else (self.host, self.data)
        for one, other in zip(order.source, order.target, strict=True):
            target[:, :, other].copy_(source[:, :, one], non_blocking=True)
