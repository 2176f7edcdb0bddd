"""How many threads a CPU computes with: the candidates that the machine allows, and the fastest of them.

    all logical CPUs we may run on ─┐
    one thread per core  ───────────┼─► candidates no larger than the container's CPU quota ─► the fastest
    the CPU quota itself ───────────┘

If one candidate is left, nothing is measured: another program that happens to be busy must not decide for hours.
Also ends torch's OpenMP threads of a thread that computes no more.
Knows Linux's files about CPUs; elsewhere torch's own choice stays. Does not know models.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shoal.kernels.cpu import CpuOps, make
from shoal.kernels.weights import DenseWeight

SHAPE = (4096, 2048)  # of each of four matrices: 64 MiB, more than most caches hold
OMP_PAUSE_HARD = 2  # of OpenMP
ROWS = (1, 16)  # tokens of a pass with one request, and with some
WORTH = 0.95  # fewer threads are chosen only if they take at most this share of the time
TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def possible_threads(cpus: Sequence[int], siblings: Callable[[int], str | None], quota: float | None) -> list[int]:
    """Numbers of threads that could be best, most first.

    >>> possible_threads([0, 1, 2, 3], lambda cpu: str(cpu % 2), None)  # two cores of two threads each
    [4, 2]
    >>> possible_threads([0, 1, 2, 3], str, 2.5)  # four cores, but time for two and a half
    [3]
    """
    groups = {siblings(cpu) or str(cpu) for cpu in cpus}
    most = len(cpus) if quota is None else max(1, min(len(cpus), -int(-quota // 1)))
    return sorted({min(most, len(cpus)), min(most, len(groups))}, reverse=True)


def choose_threads(level: str = "auto") -> int:
    """Set torch's number of threads for CPU kernels of this level, and return it; OMP_NUM_THREADS is obeyed."""
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return torch.get_num_threads()
    possible = possible_threads(sorted(os.sched_getaffinity(0)), _siblings, _quota())
    best = possible[0]
    if len(possible) > 1:
        times = {count: _seconds(make(level), count) for count in possible}
        for count in possible[1:]:
            if times[count] < WORTH * times[best]:
                best = count
    torch.set_num_threads(best)
    return best


def release_threads() -> bool:
    """End the threads with which torch has computed for the calling thread, because another one computes from now on;
    False: this OpenMP cannot.

    Each computing thread has a team of its own, and idle teams count: with more threads than CPUs, OpenMP puts waiting
    threads to sleep at once, and waking one takes longer than a small operation. (The C kernels have one pool for all.)
    """
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    try:
        return bool(ctypes.CDLL(str(found[0])).omp_pause_resource_all(OMP_PAUSE_HARD) == 0)
    except (IndexError, OSError, AttributeError):
        return False


def _siblings(cpu: int) -> str | None:
    """The logical CPUs of the same core."""
    try:
        return (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return None


def _quota() -> float | None:
    """The container's CPU quota, in CPUs; None: it has none."""
    try:
        quota, period = QUOTA.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _seconds(ops: CpuOps, threads: int) -> float:
    """The time of some linear layers, for passes of few tokens and of more."""
    torch.set_num_threads(threads)
    weights = [DenseWeight(torch.full(SHAPE, 0.5, dtype=torch.bfloat16)) for _ in range(4)]
    total = 0.0
    for rows in ROWS:
        x = ops.embed(torch.zeros(rows, dtype=torch.int64), weights[0])  # of the type that activations have
        taken = []
        for _ in range(4):
            begun = time.perf_counter()
            for weight in weights:
                ops.linear(x, weight, None)
            taken.append(time.perf_counter() - begun)
        total += min(taken)
    return total
