"""The ranks of one engine, connected by torch.distributed: gloo between CPUs, NCCL between GPUs.

Owns the connection. It is an object, not torch's global group, so that a program may have several engines. Ranks find
each other through a file in a private folder, and gloo listens on the loopback interface only. Knows tensors; does not
know models, plans or processes.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

torch_distributed: Any = dist  # its type stubs lack some of it
TIMEOUT = timedelta(hours=1)  # of one operation; ranks that hang are noticed long before (ranks.py)
JOIN_TIMEOUT = timedelta(minutes=5)
STORE = "store"


class DistributedGroup:
    """One rank's end. join() connects it to the others."""

    def __init__(self, rank: int, size: int, folder: Path, device: str) -> None:
        self.rank, self.size = rank, size
        self._folder = folder
        self._device = device
        self._ranks: Any = None
        self._sum, self._gather, self._send = dist.AllreduceOptions(), dist.GatherOptions(), dist.BroadcastOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._gather.rootRank = self._send.rootRank = 0

    def join(self) -> None:
        """Connect; returns when all ranks have."""
        store = torch_distributed.FileStore(str(self._folder / STORE), self.size)
        store.set_timeout(JOIN_TIMEOUT)
        if self._device == "cuda":
            options = torch_distributed.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._ranks = torch_distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
            self.sum_(torch.zeros(1, device="cuda"))  # NCCL connects when it is first used
            torch.cuda.synchronize()
            return
        options = torch_distributed.ProcessGroupGloo._Options()
        options._devices = [torch_distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        self._ranks = torch_distributed.ProcessGroupGloo(store, self.rank, self.size, options)

    def sum_(self, x: Tensor) -> None:
        """Replace x by the sum over all ranks."""
        self._ranks.allreduce([x], self._sum).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank, on rank 0; elsewhere nothing."""
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._ranks.gather([found] if found else [], [x], self._gather).wait()
        return found

    def send_(self, x: Tensor) -> None:
        """Replace x by that of rank 0."""
        self._ranks.broadcast([x], self._send).wait()

    def close(self) -> None:
        """Disconnect; no further calls."""
        self._ranks = None
