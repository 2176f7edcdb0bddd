"""What each of several engines on one machine gets: a GPU (or one for each of its ranks), or a group of CPUs.

Owns the division. Which of the two an engine uses is known once it has looked for a usable GPU, so a share names both.
Knows no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.machine.cgroup import ROOT, cpu_quota
from shoal.machine.cpus import allowed_cpus, split_cpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class MachineShare:
    """The part of one engine among several; travels as JSON."""

    of: int  # engines that share the machine
    gpu: str = ""  # as CUDA_VISIBLE_DEVICES names it, or them; "": there are none
    cpus: tuple[int, ...] = ()  # (): any
    threads: int | None = None  # None: as many as its CPUs allow
    on_gpu: int = 1  # engines that share its GPU


def visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """The NVIDIA GPUs that a process here would see, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE in environ:
        return [name for name in environ[VISIBLE].split(",") if name.strip() and name.strip() != "-1"]
    found = [path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*")]
    return [str(number) for number in range(sum(name.isdecimal() for name in found))]


def may_have_gpu(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> bool:
    """False where there is certainly no usable NVIDIA GPU: no driver's device, or all of them hidden."""
    if VISIBLE in environ:
        return bool(visible_gpus(environ, root))
    devices = ("nvidia*", "dxg", "nvhost-*", "nvgpu*")  # a card, Windows' subsystem, Jetsons
    return any(True for pattern in devices for _ in (root / "dev").glob(pattern))


def machine_shares(
    count: int,
    environ: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    gpus_each: int = 1,
    share_gpus: bool = False,
) -> list[MachineShare]:
    """One share for each of so many engines. With more engines than cores, each computes with one thread.
    `share_gpus`: several engines use one GPU if there are fewer GPUs than engines."""
    gpus = visible_gpus(environ, root)
    on_gpu = -(-count // len(gpus)) if gpus and share_gpus and gpus_each == 1 else 1
    gpus = gpus * on_gpu
    allowed, quota = allowed_cpus() or [], cpu_quota(root)
    groups = split_cpus(allowed, count, root)
    shared = count > 1 and len(set(groups)) < count
    found = []
    for number, cpus in enumerate(groups):
        threads = 1 if shared else None
        if not shared and quota is not None and quota / count < len(cpus):
            threads = max(1, int(quota / count))
        found.append(MachineShare(count, ",".join(gpus[number * gpus_each :][:gpus_each]), cpus, threads, on_gpu))
    return found
