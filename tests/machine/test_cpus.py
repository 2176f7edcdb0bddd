"""Which CPUs are worth computing with, on machines that are not at hand."""

from pathlib import Path

import pytest

from shoal.machine.cpus import (
    allowed_cpus,
    choose_cpus,
    count_cpus,
    fast_cpus,
    one_socket,
    parse_list,
    socket_free_bytes,
)
from tests.machine.trees import cpu_files, plant

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("\n", []), ("0-", []), ("a-b", []), ("0-99999999999", [])],
)
def test_lists(text: str, wanted: list[int]) -> None:
    assert parse_list(text) == wanted


def test_one_core(tmp_path: Path) -> None:
    assert choose_cpus([0], root=tmp_path) == ((0,), 1, False, False)


def test_siblings_share_a_core(tmp_path: Path) -> None:
    plant(tmp_path, cpu_files(8, topology__thread_siblings_list="{pair}"))
    assert choose_cpus(range(8), root=tmp_path) == (tuple(range(8)), 4, False, False)
    assert choose_cpus([0, 1, 2], root=tmp_path).cores == 2


def test_an_intel_hybrid(tmp_path: Path) -> None:
    """Two fast cores of two threads each, eight efficiency cores, as in a thin laptop."""
    names = {"sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-11\n"}
    plant(tmp_path, {**cpu_files(4, topology__thread_siblings_list="{pair}"), **names})
    assert choose_cpus(range(12), root=tmp_path) == ((0, 1, 2, 3), 2, True, False)
    assert fast_cpus([4, 5, 6], tmp_path) == [4, 5, 6], "where only efficiency cores are allowed, they are used"
    assert fast_cpus([0, 1], tmp_path) == [0, 1]


@pytest.mark.parametrize("name", ["cpu_capacity", "cpufreq__cpuinfo_max_freq"])
def test_slow_cores_by_capacity_or_frequency(tmp_path: Path, name: str) -> None:
    """An Arm phone: one prime core, three big ones, four little ones."""
    speeds = [325, 325, 325, 325, 870, 870, 870, 1024]
    for cpu, speed in enumerate(speeds):
        plant(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/{name.replace('__', '/')}": f"{speed}\n"})
    assert fast_cpus(range(8), tmp_path) == [4, 5, 6, 7]
    assert fast_cpus([0, 1, 2], tmp_path) == [0, 1, 2]


def test_favoured_cores_are_no_reason_to_leave_the_others(tmp_path: Path) -> None:
    for cpu, khz in enumerate([5_800_000, 5_800_000, 5_500_000, 5_500_000]):
        plant(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq": f"{khz}\n"})
    assert fast_cpus(range(4), tmp_path) == [0, 1, 2, 3]


def two_sockets(root: Path, free_kb: tuple[int, int]) -> Path:
    files = cpu_files(128, topology__physical_package_id="{socket}", topology__thread_siblings_list="{cpu}")
    for node, kb in enumerate(free_kb):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{64 * node}-{64 * node + 63}\n"
        files[f"sys/devices/system/node/node{node}/meminfo"] = (
            f"Node {node} MemTotal:  999999999 kB\nNode {node} MemFree:   {kb} kB\nNode {node} FilePages: 1024 kB\n"
        )
    return plant(root, files)


def test_two_sockets_of_64_cores(tmp_path: Path) -> None:
    two_sockets(tmp_path, (16 * 2**20, 32 * 2**20))
    assert choose_cpus(range(128), 8 * GIB, tmp_path) == (tuple(range(64, 128)), 64, False, True), "the emptier one"
    assert one_socket(range(96), 8 * GIB, tmp_path) == list(range(64)), "the one with more allowed CPUs"
    assert one_socket(range(128), 40 * GIB, tmp_path) == list(range(128)), "a model that fits on neither"
    assert one_socket(range(32), 8 * GIB, tmp_path) == list(range(32)), "all of one already"
    assert socket_free_bytes(range(64), tmp_path) == 16 * GIB + 2**20


def test_sockets_whose_memory_is_unknown(tmp_path: Path) -> None:
    plant(tmp_path, cpu_files(4, topology__physical_package_id="{socket}"))
    assert one_socket(range(4), GIB, tmp_path) == [0, 1]


def test_a_socket_of_several_nodes_stays_whole(tmp_path: Path) -> None:
    """Sub-NUMA clustering: four nodes, one socket."""
    files = cpu_files(16, topology__physical_package_id="0")
    for node in range(4):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{4 * node}-{4 * node + 3}\n"
    plant(tmp_path, files)
    assert one_socket(range(16), GIB, tmp_path) == list(range(16))


def test_here() -> None:
    allowed = allowed_cpus()
    assert count_cpus() >= 1
    if allowed is not None:
        chosen = choose_cpus(allowed)
        assert set(chosen.cpus) <= set(allowed)
        assert 1 <= chosen.cores <= len(chosen.cpus)
