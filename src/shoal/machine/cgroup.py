"""Limits of the control groups that this process is in: CPU time and memory, in versions 1 and 2.

A group's limit holds for all groups below it, so every group from our own up to the mount is read, and the tightest
limit counts. A container often sees its own group as the top one; what is above cannot be read there. Reads Linux's
files below a root, which tests make up. A missing or malformed file is no limit, so elsewhere there are none.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
UNLIMITED = 2**62  # version 1 writes a number near 2**63 where there is no limit


class MemoryLimit(NamedTuple):
    """The tightest of our groups' limits, and what is left until the first of them is reached."""

    limit_bytes: int
    left_bytes: int


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' time we may use; None: no limit."""
    found = (_quota(folder) for folder in group_folders("cpu", root))
    return min((quota for quota in found if quota is not None), default=None)


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """How much memory we may use; None: no limit. Reaching memory.high stalls a group, so it counts as a limit, too."""
    limits, left = [], []
    for folder in group_folders("memory", root):
        files = ("memory.max", "memory.high", "memory.limit_in_bytes")
        own = [size for name in files if (size := _number(folder / name)) is not None and size < UNLIMITED]
        if own:
            limits.append(min(own))
            left.append(max(0, min(own) - _used_bytes(folder)))
    return MemoryLimit(min(limits), min(left)) if limits else None


def group_folders(controller: str, root: Path = ROOT) -> list[Path]:
    """Our own group of this controller and those above it, as far as they are mounted; our own first."""
    own = dict(_own_groups(root))
    for kind in (controller, ""):  # version 1, where the controller is there, else version 2
        if kind not in own or ".." in own[kind].parts:  # outside of what this namespace can name
            continue
        for mounted, point in _mounts(kind, root):
            # not below the group that is mounted: names differ between namespaces, and the mount is all we can see
            parts = own[kind].relative_to(mounted).parts if own[kind].is_relative_to(mounted) else ()
            return [point.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return []


def _own_groups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """(controller, our group) from lines such as 4:cpu,cpuacct:/docker/1a2b; version 2 has no controller there."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number.isdigit() and path.startswith("/"):
            for controller in controllers.split(","):
                yield controller, PurePosixPath(path)


def _mounts(controller: str, root: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """(group, folder) of each mount of this controller, from lines such as
    32 31 0:29 /docker/1a2b /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct"""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, system = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(system) < 3:
            continue
        wanted = system[0] == "cgroup" and controller in system[2].split(",") if controller else system[0] == "cgroup2"
        if wanted:
            point = fields[4].replace("\\040", " ")
            yield PurePosixPath(fields[3].replace("\\040", " ")), root / point.lstrip("/")


def _quota(folder: Path) -> float | None:
    """Of one group: CPU time over the period in which it may be used."""
    words = _text(folder / "cpu.max").split()
    words = words or [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota_us, period_us = (int(word) for word in words)
    except ValueError:  # "max", or malformed
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _used_bytes(folder: Path) -> int:
    """Memory of a group without the cache of files, which is given up when memory is needed."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    for name in ("inactive_file", "active_file"):
        size = stat.get(f"total_{name}", stat.get(name, "0"))  # version 1 counts the groups below in total_ alone
        used -= int(size) if size.isdigit() else 0
    return max(0, used)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and text.isascii() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
