"""Folders of Linux's files, made up for tests."""

from collections.abc import Mapping
from pathlib import Path

V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cpu_files(cpus: int, **files: str) -> dict[str, str]:
    """For each CPU, files by name (with __ for /); {cpu}, {half}, {pair} and {socket} stand for numbers."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/{name.replace('__', '/')}": text.format(
            cpu=cpu, pair=f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}", socket=cpu * 2 // cpus
        )
        for cpu in range(cpus)
        for name, text in files.items()
    }
