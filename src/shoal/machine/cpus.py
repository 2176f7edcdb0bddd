"""CPUs: which of those that we may run on are worth computing with, and which share a core or a socket.

    CPUs we may run on ─► without slow cores ─► of one socket, if the model fits into its memory ─► the engine's CPUs

Slow cores are left alone because a layer is done when its last piece is: a piece on a core of half the speed holds up
all others. One socket, because the pieces of a layer are taken by any thread, so that on two sockets half of the
weights would be read across the link between them, which is slower than memory. docs/cpu.md has the reasons in full.
Reads Linux's files below a root, which tests make up; CPUs without such files are taken to be alike.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shoal.machine.cgroup import ROOT

SLOW = 2 / 3  # of the fastest: a core below this is an efficiency core
CPU = "sys/devices/system/cpu/cpu{}"


class ChosenCpus(NamedTuple):
    """The engine's CPUs."""

    cpus: tuple[int, ...]
    cores: int  # physical ones among them
    slow_left: bool  # some CPUs are left alone because they are slow
    sockets_left: bool  # … because they are of another socket


def allowed_cpus() -> list[int] | None:
    """CPUs that the calling thread may run on; None: this system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def count_cpus() -> int:
    """How many CPUs we may run on."""
    return len(allowed_cpus() or ()) or os.cpu_count() or 1


def choose_cpus(allowed: Sequence[int], needed_bytes: int = 0, root: Path = ROOT) -> ChosenCpus:
    """The CPUs worth computing with, for a model that needs so much memory."""
    fast = fast_cpus(allowed, root)
    chosen = one_socket(fast, needed_bytes, root)
    cores = len({_line(root, cpu, "topology/thread_siblings_list") or str(cpu) for cpu in chosen})
    return ChosenCpus(tuple(chosen), cores, len(fast) < len(allowed), len(chosen) < len(fast))


def split_cpus(allowed: Sequence[int], groups: int, root: Path = ROOT) -> list[tuple[int, ...]]:
    """So many groups of whole fast cores, each of one socket where that works out. With fewer cores than groups, each
    group has all of them."""
    fast = fast_cpus(allowed, root)
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in fast:
        place = _line(root, cpu, "topology/physical_package_id")
        cores.setdefault((place, _line(root, cpu, "topology/thread_siblings_list") or str(cpu)), []).append(cpu)
    if len(cores) < groups:
        return [tuple(fast)] * groups
    ordered = sorted(cores.items(), key=lambda one: (one[0][0], one[1][0]))
    ends = [len(ordered) * number // groups for number in range(groups + 1)]
    return [tuple(sorted(cpu for _, cpus in ordered[first:last] for cpu in cpus)) for first, last in pairwise(ends)]


def fast_cpus(cpus: Sequence[int], root: Path = ROOT) -> list[int]:
    """Without efficiency cores: by name (Intel), else by capacity (Arm), else by the highest frequency."""
    fast = set(parse_list(_text(root / "sys/devices/cpu_core/cpus")))
    slow = set(parse_list(_text(root / "sys/devices/cpu_atom/cpus")))
    if fast & set(cpus) and slow & set(cpus):
        return [cpu for cpu in cpus if cpu not in slow]
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        found = [_line(root, cpu, name) for cpu in cpus]
        if found and all(text.isdecimal() for text in found):
            speeds = [int(text) for text in found]
            if min(speeds) < SLOW * max(speeds):
                return [cpu for cpu, speed in zip(cpus, speeds, strict=True) if speed >= SLOW * max(speeds)]
    return list(cpus)


def one_socket(cpus: Sequence[int], needed_bytes: int, root: Path = ROOT) -> list[int]:
    """The CPUs of the socket that has most of them, if so much memory is free there; else all."""
    sockets: dict[str, list[int]] = {}
    for cpu in cpus:
        sockets.setdefault(_line(root, cpu, "topology/physical_package_id"), []).append(cpu)
    if len(sockets) < 2:
        return list(cpus)
    free = {name: socket_free_bytes(held, root) for name, held in sockets.items()}
    best = max(sockets, key=lambda name: (len(sockets[name]), free[name] or 0))
    known = free[best]
    return sockets[best] if known is None or known >= needed_bytes else list(cpus)


def socket_free_bytes(cpus: Sequence[int], root: Path = ROOT) -> int | None:
    """Free memory, and memory that only caches files, of the nodes that these CPUs belong to; None: unknown."""
    total = None
    for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        if set(parse_list(_text(node / "cpulist"))) & set(cpus):
            for line in _text(node / "meminfo").splitlines():  # Node 0 MemFree:   14281428 kB
                words = line.split()
                if len(words) > 3 and words[2] in ("MemFree:", "FilePages:") and words[3].isdecimal():
                    total = (total or 0) + int(words[3]) * 1024
    return total


def parse_list(text: str) -> list[int]:
    """CPU numbers as Linux writes them; nothing, if it is malformed.

    >>> parse_list("0-3,8")
    [0, 1, 2, 3, 8]
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) - int(first) > 1 << 16:
            return []
        found += range(int(first), int(last) + 1)
    return found


def _line(root: Path, cpu: int, name: str) -> str:
    return _text(root / CPU.format(cpu) / name).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
