"""Where the time of a pass goes on a CPU: seconds by phase, and how much of the pass is not computing.

Computing is the time in the C kernels without the interpreter (or, where plain torch replaces them, its layers and
head). Everything else is host work: planning, tables, calls from Python to C, threads that wait for each other. A
phase's time excludes timed calls inside it. With two passes in flight, host work hides behind computing, so the host's
share is not the sum of its phases but what a pass takes beyond computing.

Takes a loop and does not step it. Knows the parts of a loop by name, not by type.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.core.events import PassEvents
from shoal.engine.loop import EngineLoop

HOST = ("plan", "commit", "inputs", "around the layers", "around the head", "sampling", "result")
COMPUTING = ("layers", "head", "draw")
REST = "threads, the rest"
C_CALLS = {"shoal_layers": "layers", "shoal_embed": "layers", "shoal_embed8": "layers", "shoal_draw": "draw"}


class PhaseTimer:
    """Seconds of every phase, excluding nested phases. Each thread has its own stack of phases."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._local = threading.local()

    def wrap(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The same call, timed."""

        def inner(*args: Any, **named: Any) -> Any:
            outer: list[float] | None = getattr(self._local, "inside", None)  # seconds of calls inside the outer one
            self._local.inside = mine = [0.0]
            begun_s = self._clock()
            try:
                return call(*args, **named)
            finally:
                took_s = self._clock() - begun_s
                self.seconds[phase] += took_s - mine[0]
                self._local.inside = outer
                if outer is not None:
                    outer[0] += took_s

        return inner


class TimedCalls:
    """The functions of a C library, each timed under its phase; functions without an entry count as the head."""

    def __init__(self, calls: Any, timer: PhaseTimer) -> None:
        self._calls, self._timer = calls, timer

    def __getattr__(self, name: str) -> Any:
        timed = self._timer.wrap(getattr(self._calls, name), C_CALLS.get(name, "head"))
        setattr(self, name, timed)  # found without __getattr__ from now on
        return timed


class PassPhases:
    """Call step() after every pass: sums up the passes of decodes alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.timer = PhaseTimer(clock)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.wall_s = 0.0
        self.passes = 0
        self.requests = 0
        self._clock = clock
        self._since_s: float | None = None

    def step(self, events: PassEvents) -> None:
        """A pass has ended. Passes with prompts are skipped, and so is the first, whose start is unknown."""
        now_s = self._clock()
        requests = len(events.scheduled_ids)
        if self._since_s is not None and requests and events.computed_tokens == requests:
            self.wall_s += now_s - self._since_s
            for name, seconds in dict(self.timer.seconds).items():  # with two passes in flight the other adds meanwhile
                self.seconds[name] += seconds
            self.passes += 1
            self.requests += requests
        self.timer.seconds.clear()
        self._since_s = now_s

    @property
    def computing_s(self) -> float:
        return sum(self.seconds[name] for name in COMPUTING)

    @property
    def host_share(self) -> float:
        """The share of a pass's time that is not computing."""
        return 1 - self.computing_s / self.wall_s if self.wall_s else 0.0

    def rows(self) -> list[tuple[str, float, float]]:
        """(phase, milliseconds of a pass, share of it)."""
        found = {name: self.seconds[name] for name in (*HOST, *COMPUTING)}
        found[REST] = max(0.0, self.wall_s - sum(found.values()))  # with two passes in flight they overlap
        passes, wall_s = max(self.passes, 1), self.wall_s or 1.0
        return [(name, 1000 * seconds / passes, seconds / wall_s) for name, seconds in found.items()]

    def figures(self) -> dict[str, Any]:
        """For machines."""
        return {
            "passes": self.passes,
            "mean_batch": self.requests / max(self.passes, 1),
            "pass_ms": 1000 * self.wall_s / max(self.passes, 1),
            "phases_ms": {name: milliseconds for name, milliseconds, _ in self.rows()},
            "host_share": self.host_share,
        }

    def table(self) -> str:
        """The same as a table, for people."""
        if not self.passes:
            return "no pass consisted of decodes alone: give the workload longer outputs"
        figures = self.figures()
        lines = [f"{'ms per pass':>11}  {'share':>6}  phase"]
        lines += [
            f"{milliseconds:>11.3f}  {share:>6.1%}  {name}{' (computing)' if name in COMPUTING else ''}"
            for name, milliseconds, share in self.rows()
        ]
        lines.append(
            f"{figures['pass_ms']:>11.3f}  total: {self.passes:,} passes of decodes alone, "
            f"on average {figures['mean_batch']:.1f} requests in each"
        )
        return "\n".join([*lines, f"host work: {self.host_share:.1%} of a pass"])


@contextmanager
def timing(loop: EngineLoop, timer: PhaseTimer) -> Iterator[None]:
    """Time the parts of a loop whose executor computes in this process, on the CPU."""
    runner: Any = loop.executor.runner  # type: ignore[attr-defined]
    model = runner.model
    timed_calls = [
        (loop.scheduler, "plan", "plan"),
        (loop.scheduler, "commit", "commit"),
        (runner, "update", "inputs"),
        (runner.tables, "gather", "inputs"),
        (runner, "forward", "around the layers"),
        (runner, "sample", "result"),
        (runner.sampler, "sample", "sampling"),
    ]
    calls = getattr(model.ops, "calls", None)
    if calls is not None:
        timed_calls.append((model, "logits", "around the head"))
        model.ops.calls = TimedCalls(calls, timer)
    else:
        timed_calls += [(model, "run_layers", "layers"), (model, "logits", "head")]
    before = [vars(owner).get(name) for owner, name, _ in timed_calls]
    for owner, name, phase in timed_calls:
        setattr(owner, name, timer.wrap(getattr(owner, name), phase))
    try:
        yield
    finally:
        for (owner, name, _), own in zip(timed_calls, before, strict=True):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        if calls is not None:
            model.ops.calls = calls
