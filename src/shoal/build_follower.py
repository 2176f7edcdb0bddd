"""What ranks 1 and up build and answer. The counterpart of build.load and build.assemble.

Owns the answers to rank 0's questions. Knows no scheduler, tokenizer or requests.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.build import kv_blocks, load_model
from shoal.config.engine import EngineConfig
from shoal.files.source import find_model
from shoal.models.shard import SplitShard
from shoal.models.spec import spec_from_config
from shoal.runner.group import DistributedGroup
from shoal.runner.kvstore import KVStore
from shoal.runner.loader import DTYPES
from shoal.runner.parallel import FollowingExecutor, FollowingRunner
from shoal.runner.rank_wire import unpack


class RankBuild:
    """One rank: its part of the model, and the executor that rank 0 asks for."""

    def __init__(self, rank: int, size: int, folder: Path, config: EngineConfig) -> None:
        """Load this rank's weights. The config says what rank 0 found out: folder, dtype, device, threads."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.device = config, config.device
        self.dtype = DTYPES[config.dtype]
        self.group = DistributedGroup(rank, size, folder, self.device)
        files = find_model(config.model)
        spec, shard = spec_from_config(files.config), SplitShard(rank, size, self.group)
        self.model = load_model(config, files, spec, self.dtype, self.device, False, shard)
        self.follower: Any = None
        self._answers: Mapping[str, Callable[..., dict[str, Any]]] = {
            "join": self._join,
            "rehearse": self._rehearse,
            "measure": self._measure,
            "assemble": self._assemble,
            "close": self._close,
        }

    def answer(self, what: str, **more: Any) -> dict[str, Any]:
        """The answer to one question of rank 0."""
        return self._answers[what](**more)

    def run(self, plan: bytes) -> None:
        """Compute a pass with the others."""
        self.follower.run(unpack(plan))

    def _join(self) -> dict[str, Any]:
        self.group.join()
        return {}

    def _rehearse(self, **sizes: int) -> dict[str, Any]:
        from shoal.runner.cuda_parallel import rehearse_together  # loads triton

        rehearse_together(self.model, self.dtype, **sizes)
        return {}

    def _measure(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """How many blocks this rank's memory holds."""
        return {"blocks": kv_blocks(EngineConfig(**config), self.model.spec, self.dtype, self.device)}

    def _assemble(
        self, blocks: int, host_blocks: int, block_size: int, rows: int, max_model_len: int, **more: int
    ) -> dict[str, Any]:
        store = KVStore(self.model.spec, blocks, block_size, self.dtype, self.device, host_blocks)
        runner = FollowingRunner(self.model, store, rows, max_model_len, self.device)
        if self.device == "cuda":
            from shoal.runner.cuda_parallel import CudaFollower

            self.follower = CudaFollower(runner, **more)
        else:
            self.follower = FollowingExecutor(runner)
        return {}

    def _close(self) -> dict[str, Any]:
        self.follower.close()
        self.follower = None
        return {}
