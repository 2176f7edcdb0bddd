"""An event loop that measures its callbacks: the CPU time that the loop's thread itself spends in each.

A front loads it through its debugging hook. CPU time, not wall time: a core that is taken away does not count, and work
in other threads does not count either. A stall of the whole virtual machine does not count where run_ticks.py can tell
it from work. Callbacks above NOTED_S are written to a file, one JSON line each, with what
tells their causes apart: the process (a restarted front imports for long), time in the kernel, page faults, time of the
garbage collector, and where the loop's thread was every few milliseconds.
"""

import asyncio
import gc
import itertools
import json
import os
import resource
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.processes.hooks import LOOP_FACTORY
from tests.story_server.run_ticks import ticks

VARIABLE = "_TEST_LOOP_LOG"
NOTED_S = 0.01
LOOK_S = 0.01  # how often the watcher looks where the loop's thread is
FRAMES = 4  # innermost ones that it notes
COLLECTED = 20  # looks between two collections


class Watcher:
    """A thread that notes where the event loop's thread is while a callback runs."""

    def __init__(self) -> None:
        self.running = False  # a callback runs
        self.seen: list[str] = []  # where, during this callback
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        for look in itertools.count(1):
            time.sleep(LOOK_S)
            if (
                look % COLLECTED == 0
            ):  # from Python 3.12 on, the frames that are looked at leave cycles, with bodies in them
                gc.collect()
            frame = sys._current_frames().get(self._loop_thread)
            if self.running and frame is not None:
                stack = traceback.extract_stack(frame)[-FRAMES:]
                self.seen.append(" < ".join(f"{Path(at.filename).name}:{at.lineno}" for at in reversed(stack)))


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

    watcher = Watcher()
    ticking = ticks()

    def timed(handle: asyncio.Handle) -> None:
        callback = handle._callback  # type: ignore[attr-defined]
        before, gc_s = resource.getrusage(resource.RUSAGE_THREAD), collected[1]
        watcher.seen.clear()
        watcher.running = True
        ticking.ran_s()
        began_s = time.thread_time()
        run(handle)
        cpu_s = min(time.thread_time() - began_s, ticking.ran_s())
        watcher.running = False
        if cpu_s > NOTED_S:
            after = resource.getrusage(resource.RUSAGE_THREAD)
            noted = Callback(
                time.monotonic(),
                cpu_s,
                repr(callback)[:500],
                os.getpid(),
                after.ru_stime - before.ru_stime,
                after.ru_minflt - before.ru_minflt,
                collected[1] - gc_s,
                list(watcher.seen),
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
    pid: int
    kernel_s: float  # of cpu_s, roughly
    faults: int  # pages that had to be found
    gc_s: float
    seen: list[str]  # where the loop's thread was, every LOOK_S of wall time


def long_callbacks(path: Path, since_s: float) -> list[Callback]:
    """Those that ended after a time on the monotonic clock, the longest first."""
    read: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    found = [Callback(**one) for one in read if one["at_s"] >= since_s]
    return sorted(found, key=lambda one: -one.cpu_s)
