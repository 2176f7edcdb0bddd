"""An event loop that measures its callbacks: the CPU time that the loop's thread itself spends in each.

A front loads it through its debugging hook. CPU time, not wall time: a core that is taken away does not count, and work
in other threads does not count either. Callbacks above NOTED_S are written to a file, one JSON line each, with what
tells their causes apart: time in the kernel, page faults and time of the garbage collector.
"""

import asyncio
import gc
import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.processes.hooks import LOOP_FACTORY

VARIABLE = "_TEST_LOOP_LOG"
NOTED_S = 0.01


def probed_loop() -> asyncio.AbstractEventLoop:
    """What the front's process calls."""
    path = os.environ[VARIABLE]
    run = asyncio.Handle._run
    collected = [0.0, 0.0]  # when the collection under way began; the time of all

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected[0] = time.thread_time()
        else:
            collected[1] += time.thread_time() - collected[0]

    def timed(handle: asyncio.Handle) -> None:
        callback = handle._callback  # type: ignore[attr-defined]
        before, gc_s = resource.getrusage(resource.RUSAGE_THREAD), collected[1]
        began_s = time.thread_time()
        run(handle)
        cpu_s = time.thread_time() - began_s
        if cpu_s > NOTED_S:
            after = resource.getrusage(resource.RUSAGE_THREAD)
            noted = Callback(
                time.monotonic(),
                cpu_s,
                repr(callback)[:500],
                after.ru_stime - before.ru_stime,
                after.ru_minflt - before.ru_minflt,
                collected[1] - gc_s,
            )
            with open(path, "a") as file:
                file.write(json.dumps(asdict(noted)) + "\n")

    gc.callbacks.append(collecting)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    return asyncio.SelectorEventLoop()


def probe_env(path: Path) -> dict[str, str]:
    """Environment variables for a server whose fronts write their long callbacks to this file."""
    path.touch()
    return {
        LOOP_FACTORY: f"{__name__}:{probed_loop.__name__}",
        VARIABLE: str(path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


@dataclass(frozen=True)
class Callback:
    """One callback that took long."""

    at_s: float  # when it ended, on the monotonic clock
    cpu_s: float
    what: str
    kernel_s: float  # of cpu_s, roughly
    faults: int  # pages that had to be found
    gc_s: float


def long_callbacks(path: Path, since_s: float) -> list[Callback]:
    """Those that ended after a time on the monotonic clock, the longest first."""
    read: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    found = [Callback(**one) for one in read if one["at_s"] >= since_s]
    return sorted(found, key=lambda one: -one.cpu_s)
