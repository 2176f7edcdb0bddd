"""What each of several engines on one machine gets."""

from pathlib import Path

import pytest

from shoal.machine import shares
from shoal.machine.cpus import split_cpus
from shoal.machine.shares import machine_shares, visible_gpus


def machine(root: Path, sockets: int, cores: int, threads: int) -> list[int]:
    """A made-up machine: CPU numbers go round the cores first, as Linux often has them."""
    count = sockets * cores * threads
    for cpu in range(count):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        core = cpu % (sockets * cores)
        siblings = ",".join(str(core + thread * sockets * cores) for thread in range(threads))
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
        (topology / "physical_package_id").write_text(f"{core // cores}\n")
    return list(range(count))


def test_groups_are_whole_cores_of_one_socket(tmp_path: Path) -> None:
    cpus = machine(tmp_path, sockets=2, cores=4, threads=2)
    groups = split_cpus(cpus, 4, tmp_path)
    assert groups == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    assert split_cpus(cpus, 2, tmp_path) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]


def test_uneven_groups_differ_by_one_core_and_all_are_used(tmp_path: Path) -> None:
    cpus = machine(tmp_path, sockets=1, cores=8, threads=1)
    groups = split_cpus(cpus, 3, tmp_path)
    assert sorted(map(len, groups)) == [2, 3, 3]
    assert sorted(cpu for group in groups for cpu in group) == cpus


def test_more_engines_than_cores_share_them_with_one_thread_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "allowed_cpus", lambda: machine(tmp_path, 1, 2, 1))
    found = machine_shares(3, {}, tmp_path)
    assert [(one.cpus, one.threads, one.gpu) for one in found] == [((0, 1), 1, "")] * 3


def test_a_quota_is_shared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "allowed_cpus", lambda: machine(tmp_path, 1, 8, 1))
    monkeypatch.setattr(shares, "cpu_quota", lambda root: 4.0)
    assert [one.threads for one in machine_shares(2, {}, tmp_path)] == [2, 2]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1,2"}, ["3", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_the_gpus_are_those_that_a_process_would_see(
    tmp_path: Path, environ: dict[str, str], expected: list[str]
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus(environ, tmp_path) == expected


def test_each_engine_gets_a_gpu_of_its_own(tmp_path: Path) -> None:
    found = machine_shares(2, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, tmp_path)
    assert [one.gpu for one in found] == ["GPU-a", "GPU-b"]


def test_each_engine_has_a_gpu_for_each_of_its_ranks(tmp_path: Path) -> None:
    found = machine_shares(2, {"CUDA_VISIBLE_DEVICES": "a,b,c,d"}, tmp_path, gpus_each=2)
    assert [one.gpu for one in found] == ["a,b", "c,d"]
