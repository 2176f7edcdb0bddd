"""CPU noise: how much of the CPUs that we may run on went elsewhere during a measurement, and how a report says so.

    CPU time of these CPUs = idle + our processes and their children + other programs + stolen by the hypervisor

A benchmark beside a compiler run measures the compiler. Owns the counting and the words. Linux only: elsewhere nothing
is known, and nothing is said. In a container /proc/stat counts the host's CPUs, so other containers on the same CPUs
are other programs here, as they should be. Knows no engines.
"""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
WORTH_SAYING = 0.02  # of the CPUs: below this, a figure is shown without a remark
DISTURBED = 0.05  # above this a run is not reliable, and its report has a banner


@dataclass(frozen=True)
class Noise:
    """Shares of the CPU time of the CPUs that we may run on."""

    programs: float  # that other programs took
    stolen: float  # that the hypervisor gave to other machines

    @property
    def share(self) -> float:
        return self.programs + self.stolen

    @property
    def disturbs(self) -> bool:
        return self.share > DISTURBED

    def remark(self) -> str:
        """
        >>> Noise(0.1, 0.02).remark()
        'others used 12% of the CPUs'
        """
        return f"others used {self.share:.0%} of the CPUs" if self.share >= WORTH_SAYING else ""


class NoiseWatch:
    """Counts from its creation on. Our processes are this one, `also`, and all their children.

    >>> noise = NoiseWatch().noise()
    >>> noise is None or 0.0 <= noise.share <= 1.0
    True
    """

    def __init__(self, also: Iterable[int] = (), cpus: Iterable[int] | None = None, proc: Path = PROC) -> None:
        self._proc = proc
        self._ours = [os.getpid(), *also]
        self._cpus = _allowed() if cpus is None else frozenset(cpus)
        self._before = self._count()

    def noise(self) -> Noise | None:
        """What went elsewhere since; None: unknown here, or no time has passed."""
        if self._before is None or (now := self._count()) is None:
            return None
        total_s, busy_s, stolen_s, ours_s = (late - early for early, late in zip(self._before, now, strict=True))
        if total_s <= 0:
            return None
        stolen = min(1.0, max(0.0, stolen_s / total_s))
        return Noise(min(1.0 - stolen, max(0.0, (busy_s - ours_s) / total_s)), stolen)

    def _count(self) -> tuple[float, float, float, float] | None:
        """(all time, busy time, stolen time, our time) so far, in seconds."""
        found = cpu_seconds(self._cpus, self._proc)
        return None if found is None else (*found, tree_seconds(self._ours, self._proc))


def _allowed() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def cpu_seconds(cpus: Iterable[int], proc: Path = PROC) -> tuple[float, float, float] | None:
    """(all, busy, stolen) time of these CPUs since the machine was started; None: not counted here."""
    names = {f"cpu{cpu}" for cpu in cpus}
    total = busy = stolen = 0
    for line in _text(proc / "stat").splitlines():
        name, *rest = line.split()[:9] or [""]
        if name in names and len(rest) == 8 and all(text.isdecimal() for text in rest):
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, rest)
            busy += user + nice + system + irq + softirq
            stolen += steal
            total += user + nice + system + irq + softirq + steal + idle + iowait
    tick = os.sysconf("SC_CLK_TCK")
    return (total / tick, busy / tick, stolen / tick) if total else None


def tree_seconds(roots: Iterable[int], proc: Path = PROC) -> float:
    """CPU time of these processes and all their descendants, those that have ended included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in proc.glob("[0-9]*/stat"):
        words = _text(path).rpartition(")")[2].split()  # a program's name may contain anything
        if len(words) > 14:
            pid = int(path.parent.name)
            children.setdefault(int(words[1]), []).append(pid)
            ticks[pid] = sum(
                map(int, words[11:15])
            )  # in user mode, in the kernel; both of children that were waited for
    seen: set[int] = set()
    left = list(roots)
    while left:
        pid = left.pop()
        if pid not in seen:
            seen.add(pid)
            left += children.get(pid, ())
    return sum(ticks.get(pid, 0) for pid in seen) / os.sysconf("SC_CLK_TCK")


# ---- a server that is measured ---------------------------------------------------------------------------------


def watch_server(host: str, port: int, proc: Path = PROC) -> NoiseWatch | None:
    """A watch for which a server on this machine is no noise; None: it is here, but hidden from us."""
    if not is_here(host):
        return NoiseWatch(proc=proc)
    found = listeners(port, proc)
    return NoiseWatch(found, proc=proc) if found else None


def is_here(host: str) -> bool:
    """Whether this name or address is of this machine: only its own addresses can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def listeners(port: int, proc: Path = PROC) -> list[int]:
    """Processes with a socket that listens on this port, as far as we may look at them."""
    sockets = set()
    for name in ("net/tcp", "net/tcp6"):
        for line in _text(proc / name).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == "0A" and words[1].rpartition(":")[2] == f"{port:04X}":
                sockets.add(f"socket:[{words[9]}]")
    return [int(folder.parent.name) for folder in proc.glob("[0-9]*/fd") if _open_files(folder) & sockets]


def _open_files(folder: Path) -> set[str]:
    found = set()
    try:
        for link in folder.iterdir():
            found.add(os.readlink(link))
    except OSError:  # another user's, or it has ended
        pass
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ---- in reports --------------------------------------------------------------------------------------------------


def noise_figures(noise: Noise | None) -> dict[str, float | None]:
    """For machines: what others took in all, and the stolen part of it; None where it is unknown."""
    return {"others": noise.share if noise else None, "stolen": noise.stolen if noise else None}


def noise_in(figures: Mapping[str, Any]) -> Noise | None:
    """Back from the figures of a report.

    >>> noise_in(noise_figures(Noise(0.25, 0.125)))
    Noise(programs=0.25, stolen=0.125)
    """
    if figures.get("others") is None:
        return None
    stolen = figures.get("stolen") or 0.0
    return Noise(figures["others"] - stolen, stolen)


def worst(noises: Iterable[Noise | None]) -> Noise | None:
    return max((noise for noise in noises if noise is not None), key=lambda noise: noise.share, default=None)


def banner(noises: Sequence[Noise | None]) -> str:
    """The headline of a report whose runs were disturbed; else nothing.

    >>> banner([Noise(0.15, 0.08)])[:88]
    'Noisy machine: other programs and stolen time took 23% of the CPUs (8% stolen) during th'
    """
    found = worst(noises)
    if found is None or not found.disturbs:
        return ""
    several = len(noises) > 1
    stolen = f" ({found.stolen:.0%} stolen)" if found.stolen >= WORTH_SAYING else ""
    return (
        f"Noisy machine: other programs and stolen time took {'up to ' * several}{found.share:.0%} of the CPUs{stolen} "
        f"during {'these runs' if several else 'this run'}; compare only ratios taken in one run."
    )


def short_banner(noises: Sequence[Noise | None]) -> str:
    """The same for the title of a plot."""
    found = worst(noises)
    up_to = "up to " if len(noises) > 1 else ""
    return f"noisy machine: others took {up_to}{found.share:.0%} of the CPUs" if found and found.disturbs else ""


def under_banner(text: str, noises: Sequence[Noise | None]) -> str:
    """A table under its banner, where there is one."""
    headline = banner(noises)
    return f"{headline}\n\n{text}" if headline else text
