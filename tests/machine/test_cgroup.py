"""Limits of control groups, from files as docker, systemd and Kubernetes make them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.machine.cgroup import MemoryLimit, cpu_quota, group_folders, memory_limit
from tests.machine.trees import V2_MOUNT, plant

GROUP = "sys/fs/cgroup"
V1_DOCKER = (
    "741 740 0:29 /docker/1a2b /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:11 - cgroup cgroup rw,cpu,cpuacct\n"
    "745 740 0:33 /docker/1a2b /sys/fs/cgroup/memory ro,nosuid master:15 - cgroup cgroup rw,memory\n"
)
V1_HOST = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7.slice/cri-containerd-9c.scope"


def own(text: str, mounts: str = V2_MOUNT) -> dict[str, str]:
    return {"proc/self/cgroup": text, "proc/self/mountinfo": mounts}


CPU: dict[str, tuple[dict[str, str], float | None]] = {
    "no Linux": ({}, None),
    "docker --cpus=0.5": ({**own("0::/\n"), f"{GROUP}/cpu.max": "50000 100000\n"}, 0.5),
    "docker without a limit": ({**own("0::/\n"), f"{GROUP}/cpu.max": "max 100000\n"}, None),
    "a systemd service in slices, the tightest in the middle": (
        {
            **own("0::/user.slice/user-1000.slice/app.service\n"),
            f"{GROUP}/user.slice/cpu.max": "400000 100000\n",
            f"{GROUP}/user.slice/user-1000.slice/cpu.max": "150000 100000\n",
            f"{GROUP}/user.slice/user-1000.slice/app.service/cpu.max": "max 100000\n",
            f"{GROUP}/other.slice/cpu.max": "1000 100000\n",
        },
        1.5,
    ),
    "a pod seen from the host": (
        {
            **own(f"0::{POD}\n"),
            f"{GROUP}{POD}/cpu.max": "200000 100000\n",
            f"{GROUP}{POD.rpartition('/')[0]}/cpu.max": "300000 100000\n",
        },
        2.0,
    ),
    "version 1, docker": (
        {
            **own("9:memory:/docker/1a2b\n4:cpu,cpuacct:/docker/1a2b\n0::/docker/1a2b\n", V1_DOCKER),
            f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "version 1, a group inside the container": (
        {
            **own("4:cpu,cpuacct:/docker/1a2b/jobs\n", V1_DOCKER),
            f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            f"{GROUP}/cpu,cpuacct/jobs/cpu.cfs_quota_us": "25000\n",
            f"{GROUP}/cpu,cpuacct/jobs/cpu.cfs_period_us": "50000\n",
        },
        0.5,
    ),
    "version 1 without a limit, version 2 beside it": (
        {
            **own("1:cpu:/\n0::/\n", V1_HOST),
            f"{GROUP}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "the mount is another namespace's": (
        {
            **own("0::/pod/7\n", "30 24 0:26 /elsewhere /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            f"{GROUP}/cpu.max": "300000 100000\n",
        },
        3.0,
    ),
    "a group that this namespace cannot name": ({**own("0::/../x\n"), f"{GROUP}/cpu.max": "1 100000\n"}, None),
    "malformed": ({**own("0::/\n"), f"{GROUP}/cpu.max": "a lot\n"}, None),
    "one word": ({**own("0::/\n"), f"{GROUP}/cpu.max": "50000"}, None),
    "a period of 0": ({**own("0::/\n"), f"{GROUP}/cpu.max": "50000 0\n"}, None),
    "empty": ({**own("0::/\n"), f"{GROUP}/cpu.max": ""}, None),
}


@pytest.mark.parametrize(("files", "wanted"), CPU.values(), ids=CPU)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], wanted: float | None) -> None:
    assert cpu_quota(plant(tmp_path, files)) == wanted


GIB = 2**30
MEMORY: dict[str, tuple[dict[str, str], MemoryLimit | None]] = {
    "no Linux": ({}, None),
    "docker --memory=2g; files in the cache are given up": (
        {
            **own("0::/\n"),
            f"{GROUP}/memory.max": f"{2 * GIB}\n",
            f"{GROUP}/memory.high": "max\n",
            f"{GROUP}/memory.current": f"{GIB + 300}\n",
            f"{GROUP}/memory.stat": "anon 5\nfile 310\ninactive_file 200\nactive_file 100\n",
        },
        MemoryLimit(2 * GIB, GIB),
    ),
    "no limit": ({**own("0::/\n"), f"{GROUP}/memory.max": "max\n", f"{GROUP}/memory.current": "5\n"}, None),
    "memory.high is the lower one": (
        {**own("0::/\n"), f"{GROUP}/memory.max": "900\n", f"{GROUP}/memory.high": "700\n"},
        MemoryLimit(700, 700),
    ),
    "a slice above is almost full": (
        {
            **own("0::/a.slice/b.service\n"),
            f"{GROUP}/a.slice/memory.max": "1000\n",
            f"{GROUP}/a.slice/memory.current": "990\n",
            f"{GROUP}/a.slice/b.service/memory.max": "800\n",
            f"{GROUP}/a.slice/b.service/memory.current": "100\n",
        },
        MemoryLimit(800, 10),
    ),
    "version 1": (
        {
            **own("9:memory:/docker/1a2b\n", V1_DOCKER),
            f"{GROUP}/memory/memory.limit_in_bytes": "5000\n",
            f"{GROUP}/memory/memory.usage_in_bytes": "3000\n",
            f"{GROUP}/memory/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 900\n",
        },
        MemoryLimit(5000, 2901),
    ),
    "version 1 without a limit": (
        {**own("4:memory:/\n", V1_HOST), f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        None,
    ),
    "over the limit": (
        {**own("0::/\n"), f"{GROUP}/memory.max": "100\n", f"{GROUP}/memory.current": "150\n"},
        MemoryLimit(100, 0),
    ),
}


@pytest.mark.parametrize(("files", "wanted"), MEMORY.values(), ids=MEMORY)
def test_memory_limit(tmp_path: Path, files: dict[str, str], wanted: MemoryLimit | None) -> None:
    assert memory_limit(plant(tmp_path, files)) == wanted


@settings(max_examples=30)
@given(text=st.text(max_size=80), number=st.integers(-(2**70), 2**70))
def test_no_file_however_malformed_raises(tmp_path_factory: pytest.TempPathFactory, text: str, number: int) -> None:
    root = tmp_path_factory.mktemp("odd")
    odd = text.encode("utf-8", "replace").decode()
    names = ("cpu.max", "memory.max", "memory.high", "memory.current", "memory.stat")
    plant(root, {**own("0::/\n" + odd, V2_MOUNT + odd), **{f"{GROUP}/{name}": f"{number} {odd}" for name in names}})
    quota, limit = cpu_quota(root), memory_limit(root)
    assert quota is None or quota > 0
    assert limit is None or limit.limit_bytes >= 0 <= limit.left_bytes
    plant(root, dict.fromkeys(own(""), odd))
    cpu_quota(root)


def test_the_real_files_can_be_read() -> None:
    assert cpu_quota() is None or cpu_quota() > 0  # type: ignore[operator]
    for folder in group_folders("memory"):
        assert folder.is_absolute()
