"""Main memory: the smaller of what the machine has and what control groups allow."""

from pathlib import Path

from shoal.machine.memory import available_bytes, memory_owner, total_bytes
from tests.machine.trees import V2_MOUNT, plant

MEMINFO = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\n"}
GROUP = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/memory.current": "100000\n"}


def test_of_the_machine(tmp_path: Path) -> None:
    plant(tmp_path, MEMINFO)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (1000 * 1024, 600 * 1024)
    assert memory_owner(tmp_path) == "this machine"


def test_of_a_container(tmp_path: Path) -> None:
    plant(tmp_path, {**MEMINFO, **GROUP, "sys/fs/cgroup/memory.max": "300000\n"})
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (300_000, 200_000)
    assert memory_owner(tmp_path).startswith("this container")


def test_a_limit_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    plant(tmp_path, {**MEMINFO, **GROUP, "sys/fs/cgroup/memory.max": "900000000\n"})
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (1000 * 1024, 600 * 1024)
    assert memory_owner(tmp_path) == "this machine"


def test_without_proc_half_of_the_memory_counts(tmp_path: Path) -> None:
    assert 0 < available_bytes(tmp_path) == total_bytes(tmp_path) // 2


def test_here() -> None:
    assert 0 < available_bytes() <= total_bytes()
