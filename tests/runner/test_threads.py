"""How many threads a CPU computes with."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal.kernels.cpu import Library, find, make, plain
from shoal.kernels.weights import DenseWeight
from shoal.machine.cpus import choose_cpus
from shoal.runner import threads
from shoal.runner.threads import (
    CpuRoom,
    ThreadChoice,
    ThreadFollower,
    choose_threads,
    cpu_room,
    possible_threads,
    release_threads,
    staying_on,
)
from tests.machine.trees import V2_MOUNT, cpu_files, plant


@pytest.fixture(autouse=True)
def as_before() -> "object":
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize(
    ("cpus", "cores", "quota", "wanted"),
    [
        (1, 1, None, [1]),
        (2, 2, None, [2]),
        (2, 1, None, [2, 1]),
        (16, 8, None, [16, 8]),
        (16, 8, 4.0, [4]),
        (16, 8, 12.0, [12, 8]),
        (16, 16, 0.5, [1]),
        (16, 16, 0.001, [1]),
        (3, 3, 2.0, [2]),
    ],
)
def test_candidates(cpus: int, cores: int, quota: float | None, wanted: list[int]) -> None:
    assert possible_threads(cpus, cores, quota) == wanted


@pytest.fixture
def free_choice(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return monkeypatch


def test_a_container_s_cpu_quota_is_kept(tmp_path: Path, free_choice: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT})
    free_choice.setattr(threads, "cpu_room", partial(cpu_room, tmp_path))
    quota = plant(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"}) / "sys/fs/cgroup/cpu.max"
    assert choose_threads().threads == 1 == torch.get_num_threads()
    quota.write_text("max 100000\n")
    assert 1 <= choose_threads().threads <= len(os.sched_getaffinity(0))
    quota.write_text("nonsense")
    assert choose_threads().threads >= 1


def test_of_two_numbers_the_faster_one_is_taken(free_choice: pytest.MonkeyPatch) -> None:
    free_choice.setattr(threads, "possible_threads", lambda *_: [2, 1])
    for seconds, wanted in (({2: 1.0, 1: 0.5}, 1), ({2: 1.0, 1: 0.99}, 2), ({2: 0.5, 1: 1.0}, 2)):
        free_choice.setattr(threads, "_seconds", lambda ops, count, seconds=seconds: seconds[count])
        choice = choose_threads()
        assert choice.threads == wanted == torch.get_num_threads()
        assert choice.per_core == (wanted == 1)


def machine_of(monkeypatch: pytest.MonkeyPatch, root: Path, cpus: int, quota: float | None = None) -> None:
    """Pretend to be on a machine that these files describe."""
    monkeypatch.setattr(threads, "cpu_room", lambda: CpuRoom(tuple(range(cpus)), quota))
    monkeypatch.setattr(threads, "choose_cpus", lambda allowed, needed, _: choose_cpus(allowed, needed, root))
    monkeypatch.setattr(threads, "_seconds", lambda ops, count: 1.0)


def test_efficiency_cores_are_left_alone(tmp_path: Path, free_choice: pytest.MonkeyPatch) -> None:
    """One thread per fast core: a second one would be put on an efficiency core."""
    names = {"sys/devices/cpu_core/cpus": "0-7\n", "sys/devices/cpu_atom/cpus": "8-15\n"}
    plant(tmp_path, {**cpu_files(8, topology__thread_siblings_list="{pair}"), **names})
    machine_of(free_choice, tmp_path, 16)
    choice = choose_threads()
    assert (choice.threads, choice.cpus) == (4, None)


def test_two_sockets(tmp_path: Path, free_choice: pytest.MonkeyPatch) -> None:
    """The threads stay on one of them, unless the model does not fit there."""
    files = cpu_files(128, topology__physical_package_id="{socket}", topology__thread_siblings_list="{cpu}")
    for node in range(2):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{64 * node}-{64 * node + 63}"
        files[f"sys/devices/system/node/node{node}/meminfo"] = f"Node {node} MemFree: {2**20} kB"
    plant(tmp_path, files)
    machine_of(free_choice, tmp_path, 128)
    choice = choose_threads(needed_bytes=2**20)
    assert (choice.threads, choice.cpus) == (64, frozenset(range(64)))
    assert choice.room_of_threads == CpuRoom(tuple(range(64)), None)
    assert choose_threads(needed_bytes=2**40) == ThreadChoice(128, None, CpuRoom(tuple(range(128)), None), False, 2**40)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_number_follows_cpusets_and_quotas(caplog: pytest.LogCaptureFixture) -> None:
    """Looked at once a second, by the thread that computes."""
    rooms = [CpuRoom((0, 1, 2, 3), None)]
    clock, torch_threads = Clock(), torch.get_num_threads
    torch.set_num_threads(4)
    follower = ThreadFollower(ThreadChoice(4, None, rooms[0]), lambda: rooms[-1], clock)
    follower()
    rooms.append(CpuRoom((2,), None))
    follower()
    assert torch_threads() == 4, "not a second later yet"
    for room, wanted in (((2,), None), 1), (((2, 3, 5), None), 3), (((2, 3, 5), 1.5), 2), (((0, 1, 2, 3), 0.2), 1):
        rooms.append(CpuRoom(*room))
        clock.now_s += 1.0
        follower()
        assert torch_threads() == wanted
    assert "computing with 3 instead of 1 threads: the engine may use 3 CPUs now" in caplog.text
    torch.set_num_threads(2)
    clock.now_s += 1.0
    follower()
    assert torch_threads() == 2, "nothing has changed, so nothing is set"


def test_one_thread_per_core_stays_so(free_choice: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(tmp_path, cpu_files(8, topology__thread_siblings_list="{pair}"))
    machine_of(free_choice, tmp_path, 8)
    clock = Clock()
    torch.set_num_threads(4)
    choice = ThreadChoice(4, None, CpuRoom(tuple(range(8)), None), per_core=True)
    follower = ThreadFollower(choice, lambda: CpuRoom((0, 1, 2, 3), None), clock)
    follower()
    assert torch.get_num_threads() == 2


def test_a_fixed_number_does_not_follow() -> None:
    torch.set_num_threads(1)
    ThreadFollower(ThreadChoice(1), lambda: CpuRoom((0, 1, 2), None))()
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_real_change_of_the_cpus_is_noticed(free_choice: pytest.MonkeyPatch) -> None:
    """On a thread that computes, as `taskset -ap` or a container's update would change it."""
    before = sorted(os.sched_getaffinity(0))
    clock = Clock()
    choice = choose_threads()
    with ThreadPoolExecutor(1) as worker:  # its affinity ends with it
        follower = ThreadFollower(choice, now_s=clock)
        worker.submit(follower).result()
        assert worker.submit(torch.get_num_threads).result() == choice.threads
        worker.submit(os.sched_setaffinity, 0, before[:1]).result()
        clock.now_s += 1.0
        worker.submit(follower).result()
        assert worker.submit(torch.get_num_threads).result() == 1
    assert sorted(os.sched_getaffinity(0)) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_threads_stay_on_a_socket_and_the_caller_goes_back() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset([min(before)])
    with staying_on(one), ThreadPoolExecutor(1) as worker:
        assert worker.submit(os.sched_getaffinity, 0).result() == one
    assert os.sched_getaffinity(0) == before
    with staying_on(None):
        assert os.sched_getaffinity(0) == before
    with staying_on(frozenset([99_999])):  # there is no such CPU
        assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_one_core_starts_no_threads() -> None:
    code = (
        "import os, torch; from shoal.kernels.cpu import make; from shoal.kernels.weights import DenseWeight\n"
        "torch.set_num_threads(1); before = len(os.listdir('/proc/self/task'))\n"
        "make().linear(torch.randn(64, 512), DenseWeight(torch.randn(2048, 512)), None)\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


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
    assert choose_threads() == ThreadChoice(1)


@pytest.mark.skipif(not isinstance(find(), Library), reason="needs the C kernels")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_of_a_thread_that_computes_no_more_are_ended() -> None:
    """And come back when they are needed again, with the same result."""
    torch.set_num_threads(2)
    ops, x, weight = make(), torch.randn(64, 512), DenseWeight(torch.randn(512, 512))
    wanted = ops.linear(x, weight, None)
    before = len(os.listdir("/proc/self/task"))
    assert release_threads()
    for _ in range(200):
        if len(os.listdir("/proc/self/task")) < before:
            break
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) < before
    assert torch.equal(ops.linear(x, weight, None), wanted)


def test_without_the_kernels_there_is_nothing_to_release() -> None:
    assert not release_threads("off")
