"""How many threads a CPU computes with."""

import os
import time
from pathlib import Path

import pytest
import torch

from shoal.kernels.cpu import make, plain
from shoal.runner import threads
from shoal.runner.threads import choose_threads, possible_threads, release_threads


@pytest.fixture(autouse=True)
def as_before() -> "object":
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def pairs(cpu: int) -> str:
    return str(cpu // 2)


@pytest.mark.parametrize(
    ("cpus", "siblings", "quota", "wanted"),
    [
        ([0], str, None, [1]),
        ([0, 1], str, None, [2]),
        ([0, 1], pairs, None, [2, 1]),
        (range(16), pairs, None, [16, 8]),
        (range(16), pairs, 4.0, [4]),
        (range(16), pairs, 12.0, [12, 8]),
        (range(16), str, 0.5, [1]),
        ([3, 5, 9], lambda cpu: None, 2.0, [2]),
    ],
)
def test_candidates(cpus: list[int], siblings: "object", quota: float | None, wanted: list[int]) -> None:
    assert possible_threads(list(cpus), siblings, quota) == wanted  # type: ignore[arg-type]


def test_a_container_s_cpu_quota_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "QUOTA", quota)
    quota.write_text("90000 100000\n")
    assert choose_threads() == 1 == torch.get_num_threads()
    quota.write_text("max 100000\n")
    assert 1 <= choose_threads() <= len(os.sched_getaffinity(0))
    quota.write_text("nonsense")
    assert choose_threads() >= 1


def test_of_two_numbers_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "possible_threads", lambda *_: [2, 1])
    for seconds, wanted in (({2: 1.0, 1: 0.5}, 1), ({2: 1.0, 1: 0.99}, 2), ({2: 0.5, 1: 1.0}, 2)):
        monkeypatch.setattr(threads, "_seconds", lambda ops, count, seconds=seconds: seconds[count])
        assert choose_threads() == wanted == torch.get_num_threads()


def test_the_speed_is_really_measured() -> None:
    assert threads._seconds(make(), 1) > 0


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch says that such a product is slow here
def test_the_speed_is_measured_without_the_c_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch itself multiplies 16-bit numbers, and needs both of one type."""
    monkeypatch.setattr(threads, "SHAPE", (256, 64))  # such products are slow here
    for natively in (True, False):
        monkeypatch.setattr(plain, "computes_natively", lambda dtype, natively=natively: natively)
        assert threads._seconds(make("off"), 1) > 0


def test_the_environment_variable_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    monkeypatch.setattr(threads, "possible_threads", lambda *_: [7])
    assert choose_threads() == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_torch_threads_of_a_thread_that_computes_no_more_are_ended() -> None:
    """And come back when they are needed again, with the same result."""
    torch.set_num_threads(2)
    x = torch.randn(2_000_000)
    wanted = x.exp()
    before = len(os.listdir("/proc/self/task"))
    if not release_threads():
        pytest.skip("torch has an OpenMP that cannot")
    for _ in range(200):
        if len(os.listdir("/proc/self/task")) < before:
            break
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) < before
    assert torch.equal(x.exp(), wanted)
