"""Where a pass's time goes on a CPU: seconds by phase, and how much of the pass is not computing.

Computing is what the C kernels do without the interpreter (or, where plain torch stands in for them, its layers and
head). All the rest is host work: planning, tables, what stands between Python and C, threads that wait for each other.
A phase's time is its own: that of a watched call inside it is the inner one's. With two passes in flight host work
hides behind computing, so the host's share is not the sum of its phases but what a pass takes beyond computing.

Is handed a loop and turns nothing itself. Knows the parts of a loop by name, not by type.
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


class Watch:
    """Own seconds of every phase. Each thread has its own stack of what it is in."""

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
    """The functions of a C library, each timed under its phase; those without one of their own count as the head."""

    def __init__(self, calls: Any, watch: Watch) -> None:
        self._calls, self._watch = calls, watch

    def __getattr__(self, name: str) -> Any:
        timed = self._watch.wrap(getattr(self._calls, name), C_CALLS.get(name, "head"))
        setattr(self, name, timed)  # next time it is found at once
        return timed


class PassPhases:
    """Call step() after every pass: sums up those that are decodes alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.watch = Watch(clock)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.wall_s = 0.0
        self.passes = 0
        self.requests = 0
        self._clock = clock
        self._since_s: float | None = None

    def step(self, events: PassEvents) -> None:
        """A pass has ended. One with prompts in it is forgotten, and so is the first: nobody knows when it began."""
        now_s = self._clock()
        requests = len(events.scheduled_ids)
        if self._since_s is not None and requests and events.computed_tokens == requests:
            self.wall_s += now_s - self._since_s
            for name, seconds in dict(self.watch.seconds).items():  # with two passes in flight the other adds meanwhile
                self.seconds[name] += seconds
            self.passes += 1
            self.requests += requests
        self.watch.seconds.clear()
        self._since_s = now_s

    @property
    def computing_s(self) -> float:
        return sum(self.seconds[name] for name in COMPUTING)

    @property
    def host_share(self) -> float:
        """What a pass takes beyond computing, over what it takes."""
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
        """… and for people."""
        if not self.passes:
            return "no pass was decodes alone: give the workload longer outputs"
        figures = self.figures()
        lines = [f"{'ms per pass':>11}  {'share':>6}  phase"]
        lines += [
            f"{milliseconds:>11.3f}  {share:>6.1%}  {name}{' (computing)' if name in COMPUTING else ''}"
            for name, milliseconds, share in self.rows()
        ]
        lines.append(
            f"{figures['pass_ms']:>11.3f}  in all: {self.passes:,} passes of decodes alone, "
            f"on average {figures['mean_batch']:.1f} requests in each"
        )
        return "\n".join([*lines, f"host work: {self.host_share:.1%} of a pass"])


@contextmanager
def watching(loop: EngineLoop, watch: Watch) -> Iterator[None]:
    """Time the parts of a loop whose executor computes in this process, on the CPU."""
    runner: Any = loop.executor.runner  # type: ignore[attr-defined]
    model = runner.model
    watched = [
        (loop.engine, "begin", "plan"),
        (loop.engine, "finish", "commit"),
        (runner, "update", "inputs"),
        (runner.tables, "gather", "inputs"),
        (runner, "forward", "around the layers"),
        (runner, "sample", "result"),
        (runner.sampler, "sample", "sampling"),
    ]
    calls = getattr(model.ops, "calls", None)
    if calls is not None:
        watched.append((model, "logits", "around the head"))
        model.ops.calls = TimedCalls(calls, watch)
    else:
        watched += [(model, "run_layers", "layers"), (model, "logits", "head")]
    before = [vars(owner).get(name) for owner, name, _ in watched]
    for owner, name, phase in watched:
        setattr(owner, name, watch.wrap(getattr(owner, name), phase))
    try:
        yield
    finally:
        for (owner, name, _), own in zip(watched, before, strict=True):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        if calls is not None:
            model.ops.calls = calls
