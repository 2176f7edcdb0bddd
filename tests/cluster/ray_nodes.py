"""Nodes of a Ray cluster, all on this machine, started and killed by the tests."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.story_server.servers import family_of

START_S, ATTEMPTS = 90.0, 5
SMALL_STORE = str(80 * 2**20)


class RayNode:
    """One `ray start --block` and all its processes. On a busy machine Ray's own deadlines may pass, so it is tried
    several times."""

    def __init__(self, folder: Path, port: int, cpus: int, head: bool = False) -> None:
        self.address = f"127.0.0.1:{port}"
        where = ["--head", "--port", str(port), "--include-dashboard", "false"] if head else ["--address", self.address]
        if head:
            where += ["--temp-dir", str(folder / "ray")]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
        command += ["--num-cpus", str(cpus), "--object-store-memory", SMALL_STORE, "--disable-usage-stats"]
        for _ in range(ATTEMPTS):
            self.log = folder / f"node-{time.monotonic_ns()}.log"
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            if self._came_up():
                return
            self.kill()
        raise AssertionError(f"the node did not start in {ATTEMPTS} attempts\n{self.log.read_text(errors='replace')}")

    def _came_up(self) -> bool:
        """Wait until it says that it runs, or does not."""
        end_s = time.monotonic() + START_S
        while "Ray runtime started" not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > end_s:
                return False
            time.sleep(0.1)
        return True

    def kill(self) -> None:
        """As if the machine lost its power: every process of this node, and no other."""
        if self.process.poll() is not None:
            return
        for _ in range(3):  # those that were being started meanwhile, too
            for pid in family_of(self.process.pid) - {self.process.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RayNodes:
    """A cluster: a head, and nodes that come and go."""

    def __init__(self, head_cpus: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="r-"))  # short: Ray's sockets are below it
        self.port = free_port()
        self.nodes = [RayNode(self.folder, self.port, head_cpus, head=True)]

    @property
    def address(self) -> str:
        return self.nodes[0].address

    def add(self, cpus: int = 1) -> RayNode:
        self.nodes.append(RayNode(self.folder, self.port, cpus))
        return self.nodes[-1]

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(head_cpus: int) -> Iterator[RayNodes]:
    nodes = RayNodes(head_cpus)
    try:
        yield nodes
    finally:
        nodes.stop()
