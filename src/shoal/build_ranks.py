"""Wiring of ranks, seen from rank 0: how many, where, with which threads; and what all of them agree on.

Knows configs and the objects of runner/. build.py calls it; what the other ranks build is in build_follower.py.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig
from shoal.files.source import ModelFiles
from shoal.machine.cpus import count_cpus
from shoal.models.shard import WHOLE, Shard, SplitShard
from shoal.models.spec import ModelSpec
from shoal.runner.group import DistributedGroup
from shoal.runner.ranks import NoRanks, Ranks
from shoal.runner.threads import ThreadChoice

log = logging.getLogger(__name__)
AnyRanks = Ranks | NoRanks


def share_threads(choice: ThreadChoice, config: EngineConfig) -> ThreadChoice:
    """The threads of each rank, if all ranks share the CPUs that were chosen for one."""
    size = config.tensor_parallel_size
    if size == 1 or config.threads:
        return choice
    threads = max(1, choice.threads // size)
    torch.set_num_threads(threads)
    return ThreadChoice(threads)


def check_ranks(config: EngineConfig, spec: ModelSpec, device: str, threads: ThreadChoice) -> None:
    """Refuse more ranks than the model or the GPUs allow; warn where ranks would share a CPU."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    group: Any = None  # nothing is computed
    SplitShard(0, size, group).check(spec)
    if device == "cuda" and size > torch.cuda.device_count():
        raise BadConfig(
            f"tensor_parallel_size {size} needs a GPU for each rank, and {torch.cuda.device_count()} can be used here; "
            "lower it, or use --device cpu"
        )
    if device == "cpu" and size * threads.threads > count_cpus():
        log.warning(
            "%d ranks of %d threads share %d CPUs, and wait for each other; lower --tensor-parallel-size or --threads",
            size,
            threads.threads,
            count_cpus(),
        )


def start_ranks(
    config: EngineConfig, files: ModelFiles, dtype: torch.dtype, device: str, threads: ThreadChoice
) -> tuple[AnyRanks, Shard, Callable[[], None]]:
    """The other ranks, which load their weights meanwhile; the part of the model that is rank 0's; and a function that
    connects all ranks once rank 0 has loaded its own."""
    size = config.tensor_parallel_size
    if size == 1:
        return NoRanks(), WHOLE, lambda: None
    folder = Path(tempfile.mkdtemp(prefix="shoal-ranks-"))  # of this user alone
    told = replace(
        config,
        model=str(files.path),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        threads=threads.threads if device == "cpu" else config.threads,
        chat_template=None,  # texts are rank 0's
    )
    common = {"config": asdict(told), "size": size, "folder": str(folder), **logging_as_here()}
    environs = [visible_first(rank) if device == "cuda" else {} for rank in range(1, size)]
    ranks = Ranks([common] * (size - 1), environs)
    ranks.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
    group = DistributedGroup(0, size, folder, device)

    def connect() -> None:
        ranks.answers()  # their weights are loaded
        with ranks.doing("join"):
            group.join()
        if device == "cpu":  # gloo needs the folder no longer; killed, this process could not remove it
            shutil.rmtree(folder, ignore_errors=True)
        log.info("%d ranks are connected", size)

    return ranks, SplitShard(0, size, group), connect


def kv_over_ranks(spec: ModelSpec, size: int) -> ModelSpec:
    """The model as far as the KV memory of all ranks together goes: KV heads on several ranks count for each."""
    if size == 1:
        return spec
    group: Any = None  # nothing is computed
    held = sum(SplitShard(rank, size, group).local(spec).kv_heads for rank in range(size))
    return replace(spec, kv_heads=held)


def visible_first(rank: int) -> dict[str, str]:
    """The environment in which GPU number `rank` is a process's first one; the others stay visible, so that GPUs can
    reach each other's memory."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [name for name in names.split(",") if name] or [str(one) for one in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join([devices[rank], *devices[:rank], *devices[rank + 1 :]])}


def logging_as_here() -> dict[str, str]:
    """How the other ranks write their logs."""
    level = logging.getLogger("shoal").getEffectiveLevel()
    handlers = logging.getLogger().handlers
    style = "json" if any(type(one.formatter).__name__ == "JsonLines" for one in handlers) else "text"
    return {"log_level": logging.getLevelName(level), "log_format": style}
