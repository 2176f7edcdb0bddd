"""Main memory: how much there is, and how much can be allocated without swapping. Knows /proc/meminfo and the limits of
control groups; where there is no /proc, half of the memory counts as available."""

import os
from pathlib import Path

from shoal.machine.cgroup import ROOT, memory_limit


def total_bytes(root: Path = ROOT) -> int:
    """All memory that this process could ever use."""
    limit = memory_limit(root)
    return min(_whole(root), limit.limit_bytes) if limit else _whole(root)


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be allocated now without swapping."""
    free = _meminfo("MemAvailable", root)
    free = _whole(root) // 2 if free is None else free
    limit = memory_limit(root)
    return min(free, limit.left_bytes) if limit else free


def memory_owner(root: Path = ROOT) -> str:
    """What limits the memory, for messages."""
    limit = memory_limit(root)
    return "this container (its control group)" if limit and limit.limit_bytes < _whole(root) else "this machine"


def _whole(root: Path) -> int:
    found = _meminfo("MemTotal", root)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found


def _meminfo(name: str, root: Path) -> int | None:
    """A line such as `MemAvailable:   19888400 kB`, in bytes."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
