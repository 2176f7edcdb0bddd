"""What hostile requests cost the others: the time that /health takes meanwhile, and the memory of the fronts.

Owns the client that sends attacks (plain sockets), the probe of /health beside it, and the figures. It attacks only a
server that its caller started. Knows an address and process ids.
"""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from shoal.bench.cpu_noise import NoiseWatch, noise_figures
from shoal.bench.hostile_bodies import Attack

PIECE = 1 << 20
CLOSED = "closed"  # the server closed the connection without an answer
OPEN = "open"  # no complete answer when the attack's time was over


@dataclass
class AttackResult:
    """What one attack did."""

    name: str
    sent: int
    answers: dict[str, int] = field(default_factory=dict)  # status → how often
    seconds: float = 0.0
    health_ms: dict[str, float] = field(default_factory=dict)  # p50, p99, p100 of /health meanwhile
    front_mb: float = 0.0  # the largest front, at its peak
    front_cpu_s: float = 0.0  # of all fronts
    others: float | None = None  # share of the CPUs that neither this program nor the server used; None: unknown
    stolen: float | None = None  # the part of it that the hypervisor took

    def row(self) -> list[str]:
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(self.answers.items()))
        health = [f"{self.health_ms.get(name, float('nan')):.1f}" for name in ("p50", "p99", "p100")]
        others = "?" if self.others is None else f"{self.others:.0%}"
        return [
            self.name,
            answers,
            f"{self.seconds:.1f}",
            *health,
            f"{self.front_mb:.0f}",
            f"{self.front_cpu_s:.1f}",
            others,
        ]


HEADER = ["attack", "answers", "s", "/health p50 ms", "p99", "p100", "front MB", "front CPU s", "others"]


# ---- the client -----------------------------------------------------------------------------------------------------


async def send(host: str, port: int, attack: Attack, body: bytes) -> str:
    """Send one request and read its answer to the end; returns the status."""
    head = f"POST {attack.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    status = CLOSED
    reader, writer = await asyncio.open_connection(host, port, limit=PIECE)
    try:
        writer.write(head.encode())
        with contextlib.suppress(ConnectionError):  # the answer may come before the whole body was read
            for at in range(0, len(body) - (not attack.finished), PIECE):
                writer.write(body[at : min(at + PIECE, len(body) - (not attack.finished))])
                await writer.drain()
        line = (await reader.readline()).split()
        status = line[1].decode() if len(line) > 1 else CLOSED
        while await reader.read(PIECE):
            pass
    except ConnectionError:
        pass
    finally:
        writer.close()
    return status


async def send_all(host: str, port: int, attack: Attack, limit_s: float) -> Counter[str]:
    """All copies at once, for at most so long."""
    body = attack.body()
    tasks = [asyncio.create_task(send(host, port, attack, body)) for _ in range(attack.copies)]
    done, late = await asyncio.wait(tasks, timeout=limit_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return Counter([CLOSED if task.exception() else task.result() for task in done] + [OPEN] * len(late))


# ---- the probe ------------------------------------------------------------------------------------------------------


class HealthProbe:
    """/health, asked by another process."""

    def __init__(self, host: str, port: int) -> None:
        command = [sys.executable, "-m", "shoal.bench.health_probe", host, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._seen: list[tuple[float, float]] = []  # (when asked, how long it took), in seconds
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, took = line.split()
            self._seen.append((float(began), float(took)))

    def wait_for_answers(self, since_s: float, count: int = 1) -> None:
        """Until so many probes that were sent after a time have been answered."""
        while sum(began_s >= since_s for began_s, _ in self._seen[-count * 2 :]) < count:
            if self._process.poll() is not None:
                raise ChildProcessError("the probe of /health ended")
            time.sleep(0.005)

    def spread_ms(self, since_s: float) -> dict[str, float]:
        took = [took_s * 1000 for began_s, took_s in self._seen if began_s + took_s >= since_s]
        found = np.percentile(np.array(took or [np.nan]), [50, 99, 100])
        return dict(zip(("p50", "p99", "p100"), (round(float(one), 2) for one in found), strict=True))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()


# ---- processes, from /proc ------------------------------------------------------------------------------------------


def forget_peak(pid: int) -> None:
    """From now on peak_mb() counts anew."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mb(pid: int) -> float:
    """Most memory that was resident; 0 where it is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")), 0.0)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far; 0 where that is unknown."""
    try:
        clock = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(clock[0]) / 1e9


def fronts_of(root: int) -> list[int]:
    """The front processes of a `shoal serve`."""
    found = []
    for task in Path(f"/proc/{root}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if b"shoal.processes.front" in Path(f"/proc/{pid}/cmdline").read_bytes()]


# ---- the run --------------------------------------------------------------------------------------------------------


def attack_all(
    host: str, port: int, root: int, attacks: Sequence[Attack], idle_s: float, limit_s: float
) -> Iterator[AttackResult]:
    """An idle phase, then one attack after the other; `root` is the process id of `shoal serve`."""
    probe = HealthProbe(host, port)
    try:
        probe.wait_for_answers(time.monotonic())
        yield measured(probe, root, "idle", 0, partial(be_idle, idle_s))
        for attack in attacks:
            yield measured(probe, root, attack.name, attack.copies, partial(attack_once, host, port, attack, limit_s))
    finally:
        probe.close()


def be_idle(seconds: float) -> Counter[str]:
    time.sleep(seconds)
    return Counter()


def attack_once(host: str, port: int, attack: Attack, limit_s: float) -> Counter[str]:
    return asyncio.run(send_all(host, port, attack, limit_s))


def measured(probe: HealthProbe, root: int, name: str, sent: int, work: Callable[[], Counter[str]]) -> AttackResult:
    fronts = fronts_of(root)
    for pid in fronts:
        forget_peak(pid)
    watch = NoiseWatch()  # the server is a child of this process
    began_s, used_s = time.monotonic(), sum(map(cpu_s, fronts))
    answers = work()
    ended_s = time.monotonic()
    probe.wait_for_answers(ended_s)  # one that began during the attack has been answered before
    return AttackResult(
        name,
        sent,
        dict(answers),
        round(ended_s - began_s, 2),
        probe.spread_ms(began_s),
        round(max(map(peak_mb, fronts), default=0.0), 1),
        round(sum(map(cpu_s, fronts)) - used_s, 2),
        **noise_figures(watch.noise()),
    )
