"""How many threads a CPU computes with: the candidates that the machine allows, and the fastest of them.

    all logical CPUs of those chosen ─┐
    one thread per core  ─────────────┼─► candidates no larger than the CPU quota ─► the fastest
    the CPU quota itself ─────────────┘

`machine/cpus.py` chooses the CPUs. If one candidate is left, nothing is measured: another program that happens to be
busy must not decide for hours. While the engine runs, the number follows the CPUs and the quota that it is allowed.
Also ends torch's OpenMP threads of a thread that computes no more. Where the system does not say which CPUs we may use,
torch's own choice stays. Does not know models.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.kernels.cpu import CpuOps, make
from shoal.kernels.weights import DenseWeight
from shoal.machine.cgroup import ROOT, cpu_quota
from shoal.machine.cpus import allowed_cpus, choose_cpus

log = logging.getLogger(__name__)
SHAPE = (4096, 2048)  # of each of four matrices: 64 MiB, more than most caches hold
OMP_PAUSE_HARD = 2  # of OpenMP
ROWS = (1, 16)  # tokens of a pass with one request, and with some
WORTH = 0.95  # fewer threads are chosen only if they take at most this share of the time
LOOK_EVERY_S = 1.0  # between two looks at what we may use


@dataclass(frozen=True)
class CpuRoom:
    """What we may use now."""

    allowed: tuple[int, ...]  # CPUs
    quota: float | None  # CPUs' time; None: no limit


@dataclass(frozen=True)
class ThreadChoice:
    """How many threads, and how the number follows the room that there is."""

    threads: int
    cpus: frozenset[int] | None = None  # of one socket, on which the threads are to stay; None: on any
    room: CpuRoom | None = None  # what the choice was made for; None: the number is fixed
    per_core: bool = False  # one thread per core was faster than one per CPU, or was never compared with it
    needed_bytes: int = 0

    @property
    def room_of_threads(self) -> CpuRoom | None:
        """What each of the threads sees of the room."""
        if self.room is None or self.cpus is None:
            return self.room
        return CpuRoom(tuple(cpu for cpu in self.room.allowed if cpu in self.cpus), self.room.quota)


def possible_threads(cpus: int, cores: int, quota: float | None) -> list[int]:
    """Numbers of threads that could be best, most first.

    >>> possible_threads(4, 2, None)  # two cores of two threads each
    [4, 2]
    >>> possible_threads(4, 4, 2.5)  # four cores, but time for two and a half
    [3]
    """
    most = cpus if quota is None else max(1, min(cpus, -int(-quota // 1)))
    return sorted({most, min(most, cores)}, reverse=True)


def cpu_room(root: Path = ROOT) -> CpuRoom | None:
    """What the calling thread may use; None: this system does not tell."""
    allowed = allowed_cpus()
    return CpuRoom(tuple(allowed), cpu_quota(root)) if allowed else None


def choose_threads(level: str = "auto", needed_bytes: int = 0) -> ThreadChoice:
    """Set torch's number of threads, for CPU kernels of this level and a model of this size, and return the choice.
    OMP_NUM_THREADS is obeyed."""
    room = cpu_room()
    if "OMP_NUM_THREADS" in os.environ or room is None:
        return ThreadChoice(torch.get_num_threads())
    possible, cpus = _candidates(room, needed_bytes)
    best = possible[0]
    if len(possible) > 1:
        with staying_on(cpus):  # the kernels' threads may start here, and are kept
            times = {count: _seconds(make(level), count) for count in possible}
        for count in possible[1:]:
            if times[count] < WORTH * times[best]:
                best = count
    torch.set_num_threads(best)
    return ThreadChoice(best, cpus, room, best == possible[-1], needed_bytes)


def _candidates(room: CpuRoom, needed_bytes: int, root: Path = ROOT) -> tuple[list[int], frozenset[int] | None]:
    """Possible numbers of threads, and the CPUs to stay on where that matters."""
    chosen = choose_cpus(room.allowed, needed_bytes, root)
    # beside slow cores, one thread per core: Linux fills those before a fast core's second thread
    cpus = chosen.cores if chosen.slow_left else len(chosen.cpus)
    stay = frozenset(chosen.cpus) if chosen.sockets_left else None
    return possible_threads(cpus, chosen.cores, room.quota), stay


@contextmanager
def staying_on(cpus: frozenset[int] | None) -> Iterator[None]:
    """Keep the calling thread, and threads that it starts meanwhile, on these CPUs; None: anywhere."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    move_to(cpus)
    try:
        yield
    finally:
        move_to(before)


def move_to(cpus: Sequence[int] | frozenset[int] | set[int] | None) -> None:
    """Keep the calling thread on these CPUs; None: wherever it may run."""
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:  # the cpuset has changed meanwhile, or a sandbox forbids it
            log.info("threads are not kept on CPUs %s: %s", sorted(cpus), error.strerror)


def begin_thread(choice: ThreadChoice) -> None:
    """Prepare the calling thread for computing: torch's number of threads belongs to the thread that sets it."""
    move_to(choice.cpus)
    torch.set_num_threads(choice.threads)


class ThreadFollower:
    """Keeps the number of threads right while the CPUs and the quota that we may use change.

    Called by the computing thread before each pass, because torch's number of threads belongs to the thread that sets
    it. Looks at most once a second, which takes half a millisecond or less.
    """

    def __init__(
        self,
        choice: ThreadChoice,
        room: Callable[[], CpuRoom | None] = cpu_room,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.choice = choice
        self.now_s = now_s
        self._room = room
        self._seen = choice.room_of_threads
        self._next_s = now_s() if self._seen is not None else float("inf")

    def __call__(self) -> None:
        now_s = self.now_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_EVERY_S
        room = self._room()
        if room is None or room == self._seen:
            return
        self._seen = room
        possible, _ = _candidates(room, self.choice.needed_bytes)
        count, before = possible[-1 if self.choice.per_core else 0], torch.get_num_threads()
        if count != before:
            log.warning(
                "computing with %d instead of %d threads: the engine may use %s now", count, before, in_words(room)
            )
            torch.set_num_threads(count)


def in_words(room: CpuRoom) -> str:
    """
    >>> in_words(CpuRoom((0, 1), 1.5))
    '2 CPUs, a quota of 1.5'
    """
    cpus = "1 CPU" if len(room.allowed) == 1 else f"{len(room.allowed)} CPUs"
    return cpus if room.quota is None else f"{cpus}, a quota of {room.quota:g}"


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
