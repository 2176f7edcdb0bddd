"""A profile of some passes: a timeline of host and device as a Chrome trace, and a table of the kernels.

Takes a loop and does not step it. The trace opens in chrome://tracing or https://ui.perfetto.dev.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.engine.loop import EngineLoop

PASSES = 20
NAMES = (("scheduler", "plan", "plan"), ("scheduler", "commit", "commit"), ("executor", "forward", "forward"),
         ("executor", "sample", "sample"), ("executor", "result", "wait for tokens"))  # fmt: skip
HOST = {name for _, _, name in NAMES}


class PassProfiler:
    """Call step() after every pass: it records PASSES of them, from number `first` on."""

    def __init__(self, path: str, first: int) -> None:
        self.path = path
        self.first = first
        self.kernels: list[tuple[str, float, int]] = []  # name, µs per pass, launches per pass
        self._passes = 0
        self._profile: Any = None

    def step(self) -> None:
        self._passes += 1
        if self._passes == self.first:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds, acc_events=True)
            self._profile.start()
        elif self._passes == self.first + PASSES:
            self.stop()

    def stop(self) -> None:
        """Write the trace; does nothing if no recording was started or it has been written."""
        if self._profile is None:
            return
        self._profile.stop()
        self._profile.export_chrome_trace(self.path)
        passes = min(PASSES, self._passes - self.first + 1)
        time_us: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for event in self._profile.events():
            if event.device_type.name == "CUDA" and event.name not in HOST:
                time_us[event.name] += event.self_device_time_total
                launches[event.name] += 1
        self.kernels = [(name, total / passes, launches[name] // passes) for name, total in time_us.most_common()]
        self._profile = None

    def table(self, most: int = 15) -> str:
        """The kernels that took longest."""
        total = sum(us for _, us, _ in self.kernels) or 1.0
        lines = [f"{'µs per pass':>11}  {'share':>6}  {'launches':>8}  kernel"]
        lines += [
            f"{us:>11.1f}  {us / total:>6.1%}  {count:>8}  {name[:70]}" for name, us, count in self.kernels[:most]
        ]
        return "\n".join([*lines, f"{total:>11.1f}  total"])


@contextmanager
def named(loop: EngineLoop) -> Iterator[None]:
    """Name the host's phases of a pass in the trace."""
    owners = {"scheduler": loop.scheduler, "executor": loop.executor}

    def wrapped(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            with record_function(name):
                return call(*args)

        return inner

    for owner, method, name in NAMES:
        setattr(owners[owner], method, wrapped(getattr(owners[owner], method), name))
    try:
        yield
    finally:
        for owner, method, _ in NAMES:
            delattr(owners[owner], method)
