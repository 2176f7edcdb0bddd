"""The planner: the fewest replicas that keep a promise, what they cost, and how far that is from breaking.

A number of replicas will do if it sustains the rate (its rate of completion, when requests never run out, is at least
that) and a simulated run keeps every target. Numbers are tried upwards from the first that sustains the rate, so the
one found is the smallest: one fewer breaks the promise or falls behind. Owns the search; the runs are the simulator's.
Knows no flags, no files and no clock.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig
from shoal.sim.cost import PassSize, Times
from shoal.sim.engines import simulated_loop
from shoal.sim.front import FrontTimes, SimulatedFronts
from shoal.sim.profile import Profile
from shoal.sim.promises import KeptTarget, LatencyTarget, PromiseWatch, TargetMissed, TierPromise, tier_names
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import OpenArrivals, RunObserver, VirtualServer
from shoal.workload.arrivals import at_once
from shoal.workload.traces import TraceRequest

Load = Callable[[float], list[TraceRequest]]  # rate → requests with arrival times
LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)  # shares of what one replica completes
APART_S = 1e4  # between requests that are served one at a time
ALONE = 400  # requests that are tried alone, where none share a prefix
ALONE_TOKENS = 8  # of their answers
MOST_HEADROOM = 4.0
HEADROOM_STEP = 0.05


class ScaledTimes:
    """The times of another object, so many times as long."""

    def __init__(self, inner: Times, factor: float) -> None:
        self._inner, self._factor = inner, factor

    def device_s(self, size: PassSize) -> float:
        return self._inner.device_s(size) * self._factor

    def host_s(self, size: PassSize) -> float:
        return self._inner.host_s(size) * self._factor

    def copy_s(self, direction: str, blocks: int) -> float:
        return self._inner.copy_s(direction, blocks) * self._factor


@dataclass(frozen=True)
class FleetSetup:
    """Replicas of one kind: an engine of this config on the profile's device, and a front for each."""

    label: str
    profile: Profile
    config: EngineConfig
    max_tokens: int
    promises: tuple[TierPromise, ...]
    routing: str = "prefix"
    front: bool = True
    slower: float = 1.0  # how many times as long everything takes as the profile says

    def run(self, replicas: int, trace: Sequence[TraceRequest], observer: RunObserver) -> float:
        """One run; returns when it ends, in seconds of virtual time."""
        times = ScaledTimes(self.profile.costs, self.slower) if self.slower != 1 else None
        loops = [simulated_loop(self.profile, self.config, times) for _ in range(replicas)]
        kv = loops[0].scheduler.kv
        make = RequestMaker(self.max_tokens, kv.block_size, kv.keep, tier_names(self.promises))
        fronts = SimulatedFronts(self.profile.front if self.front else FrontTimes(), replicas)
        return VirtualServer(loops, observer, make, fronts, self.routing).run(OpenArrivals(trace))

    def watch(self, replicas: int, trace: Sequence[TraceRequest], stop: bool = False) -> PromiseWatch:
        """A run, and how well it keeps the promises; `stop`: only until one is broken."""
        watch = PromiseWatch(self.promises, trace, stop)
        with contextlib.suppress(TargetMissed):
            self.run(replicas, trace, watch)
        return watch

    def completes(self, trace: Sequence[TraceRequest]) -> float:
        """Requests per second that one replica completes while more are always waiting."""
        watch = PromiseWatch(self.promises, trace)
        seconds = self.run(1, at_once(list(trace)), watch)
        if watch.queued_until_s <= 0 or watch.computed_by_then < watch.computed / 4:
            return len(trace) / seconds  # all fit into one batch
        return len(trace) * watch.computed_by_then / watch.computed / watch.queued_until_s


@dataclass(frozen=True)
class LoadPoint:
    """One replica at one rate."""

    rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    e2e_mean_s: float

    @property
    def power(self) -> float:
        """Kleinrock's: requests per second over the time of one. The knee of a curve is where it is highest."""
        return self.rate / max(self.e2e_mean_s, 1e-9)


@dataclass(frozen=True)
class FleetPlan:
    """The answer."""

    fleet: FleetSetup
    replicas: int
    most: int  # replicas if everything takes longer by the profile's error
    least: int  # … or less
    completes: float  # requests per second of one replica that always has more
    targets: list[KeptTarget]
    fewer: list[KeptTarget] | None  # with one replica fewer; None: it would fall behind, or there would be none
    headroom: float  # the rate may rise by this factor before a target is missed
    points: list[LoadPoint]
    knee: LoadPoint
    device_busy: float
    tried: dict[str, int | None]  # replicas that other settings need

    @property
    def in_error(self) -> float:
        return self.fleet.profile.error


class FleetPlanner:
    """Searches the fewest replicas for one load."""

    def __init__(
        self,
        load: Load,
        rate: float,
        most: int,
        tell: Callable[[str], None] = lambda what: None,
        loads: Sequence[float] = LOADS,
    ) -> None:
        self.load, self.rate, self.most, self.tell, self.loads = load, rate, most, tell, loads
        self.trace = load(rate)

    def keeps(self, fleet: FleetSetup, replicas: int, rate: float | None = None) -> bool:
        """Whether so many replicas keep every target."""
        self.tell(f"{fleet.label}: {replicas} at {rate or self.rate:.3g}/s")
        return fleet.watch(replicas, self.trace if rate is None else self.load(rate), stop=True).kept

    def first(self, completes: float) -> int:
        """The fewest replicas that do not fall behind."""
        return max(1, math.ceil(self.rate / completes - 1e-9))

    def fewest(self, fleet: FleetSetup, start: int, most: int | None = None) -> int | None:
        """The fewest from `start` on; None: there is no such number up to the most."""
        for replicas in range(start, (most or self.most) + 1):
            if self.keeps(fleet, replicas):
                return replicas
        return None

    def plan(self, fleets: Sequence[FleetSetup]) -> FleetPlan:
        """The fewest replicas over all these settings; of equals the first. Raises BadConfig if there are none."""
        tried: dict[str, int | None] = {}
        best: tuple[int, FleetSetup, float] | None = None
        for fleet in fleets:
            if best is None:
                self.check_possible(fleet)
            self.tell(f"{fleet.label}: what one replica completes")
            completes = fleet.completes(self.trace)
            found = self.fewest(fleet, self.first(completes), best[0] - 1 if best else None)
            tried[fleet.label] = found
            if found is not None:
                best = found, fleet, completes
        if best is None:
            raise BadConfig(self.too_many(fleets[0]))
        return self._answer(*best, tried)

    def too_many(self, fleet: FleetSetup) -> str:
        start = self.first(fleet.completes(self.trace))
        if start > self.most:
            return (
                f"{self.rate:g} requests per second need at least {start} replicas, and --max-replicas is {self.most}; "
                "raise it, lower the rate, or choose a faster card"
            )
        missed = [one for one in fleet.watch(self.most, self.trace).targets() if not one.kept]
        return (
            f"{self.most} replicas do not keep the promise: "
            + "; ".join(missed_in_words(one) for one in missed)
            + ". Raise --max-replicas, or promise less"
        )

    def check_possible(self, fleet: FleetSetup) -> None:
        """Raise BadConfig if a request that has an engine for itself is not fast enough: then no fleet is."""
        self.tell(f"{fleet.label}: one request at a time")
        for found, prompt in alone(fleet, self.trace):
            if not found.kept:
                of_tier = f" of tier {found.tier}" if found.tier else ""
                raise BadConfig(
                    f"no number of replicas keeps the promise{of_tier} {found.target}: even one request at a time has "
                    f"{found.target.name} = {found.found_s:.3g} s on {fleet.profile.card.name} (for a prompt of "
                    f"{prompt:,} tokens); promise at least that, shorten the prompts, or choose a faster card"
                )

    def _answer(self, replicas: int, fleet: FleetSetup, completes: float, tried: dict[str, int | None]) -> FleetPlan:
        error = fleet.profile.error
        slow, fast = replace(fleet, slower=1 + error), replace(fleet, slower=1 / (1 + error))
        most = self.fewest(slow, max(replicas, self.first(completes / slow.slower)), 4 * self.most)
        least = self.fewest(fast, min(replicas, self.first(completes / fast.slower)), replicas)
        watch = fleet.watch(replicas, self.trace)
        sustained = replicas > 1 and replicas - 1 >= self.first(completes)
        points = [self._point(fleet, share * completes) for share in self.loads]
        return FleetPlan(
            fleet=fleet,
            replicas=replicas,
            most=most or 4 * self.most,
            least=least or replicas,
            completes=completes,
            targets=watch.targets(),
            fewer=fleet.watch(replicas - 1, self.trace).targets() if sustained else None,
            headroom=self.headroom(fleet, replicas, completes),
            points=points,
            knee=max(points, key=lambda point: point.power),
            device_busy=watch.busy_s / replicas / max(self.trace[-1].at_s, 1e-9),
            tried=tried,
        )

    def _point(self, fleet: FleetSetup, rate: float) -> LoadPoint:
        watch = fleet.watch(1, self.load(rate))
        p50, p99 = ({what: watch.percentile(what, percent) for what in ("ttft", "gap")} for percent in (50, 99))
        return LoadPoint(rate, p50["ttft"], p99["ttft"], p50["gap"], p99["gap"], watch.mean("e2e"))

    def headroom(self, fleet: FleetSetup, replicas: int, completes: float) -> float:
        """How many times the rate these replicas take, to one step, before a target is missed or they fall behind."""
        good, bad = 1.0, min(MOST_HEADROOM, max(1.0, replicas * completes / self.rate)) + HEADROOM_STEP
        while bad - good > HEADROOM_STEP:
            middle = (good + bad) / 2
            if self.keeps(fleet, replicas, self.rate * middle):
                good = middle
            else:
                bad = middle
        return good

    def by_promise(self, plan: FleetPlan, factors: Sequence[float]) -> list[tuple[float, int | None]]:
        """The fewest replicas if so many times as much time is promised; None: no number will do."""
        found: list[tuple[float, int | None]] = []
        start: int | None = self.first(plan.completes)
        for factor in sorted(factors, reverse=True):  # a stricter promise never needs fewer
            fleet = replace(plan.fleet, promises=tuple(one.scaled(factor) for one in plan.fleet.promises))
            if start is not None and all(kept.kept for kept, _ in alone(fleet, self.trace)):
                start = self.fewest(fleet, start, 4 * self.most)
            else:
                start = None
            found.append((factor, start))
        return found[::-1]


def alone(fleet: FleetSetup, trace: Sequence[TraceRequest]) -> list[tuple[KeptTarget, int]]:
    """Every target when requests are served one at a time, with short answers; and the longest prompt that met it.

    These are lower bounds: answers that go on read more KV.
    """
    step = 1 if any(one.prefix for one in trace) else max(1, len(trace) // ALONE)
    chosen = [
        replace(one, at_s=number * APART_S, output=min(one.output, ALONE_TOKENS))
        for number, one in enumerate(trace[::step])
    ]
    anyone = TierPromise("", 1.0, (LatencyTarget("ttft", 99, math.inf),))
    watch = AloneWatch(chosen)
    replace(fleet, promises=(anyone,), config=replace(fleet.config, order="fcfs", tiers=None)).run(1, chosen, watch)
    return [watch.kept(promise.tier, target, trace[::step]) for promise in fleet.promises for target in promise.targets]


class AloneWatch:
    """The first token and the mean gap of each request."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self.first_s = [math.inf] * len(trace)
        self.last_s = [math.inf] * len(trace)
        self._trace = trace

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None: ...

    def refused(self, number: int, kind: str) -> None: ...

    def passed(self, events: Any, scheduler: Any) -> None: ...

    def delivered(self, events: Any, at_s: float) -> None:
        for id, index in zip(events.owners, events.indexes, strict=True):
            number = int(id)
            self.last_s[number] = at_s - self._trace[number].at_s
            if not index:
                self.first_s[number] = self.last_s[number]

    def kept(self, tier: str, target: LatencyTarget, whole: Sequence[TraceRequest]) -> tuple[KeptTarget, int]:
        found = []  # (seconds, times, prompt)
        for number, one in enumerate(whole):
            drawn, first_s = self._trace[number].output, self.first_s[number]
            gap_s = (self.last_s[number] - first_s) / (drawn - 1) if drawn > 1 and first_s < math.inf else 0.0
            if target.what == "gap":
                found.append((gap_s, one.output - 1, one.prompt))
            else:
                rest_s = gap_s * (one.output - 1) if target.what == "e2e" else 0.0
                found.append((first_s + rest_s, 1, one.prompt))
        found.sort()
        total = sum(times for _, times, _ in found)
        wanted, seen = total - target.allowed(total), 0
        for seconds, times, prompt in found:
            seen += times
            if seen >= wanted:
                return KeptTarget(tier, target, seconds, seconds <= target.seconds), prompt
        return KeptTarget(tier, target, 0.0, True), 0


def missed_in_words(one: KeptTarget) -> str:
    of_tier = f"tier {one.tier}: " if one.tier else ""
    got = f"{one.found_s:.3g} s" if one.found_s < 1e6 else "never (requests are refused)"
    return f"{of_tier}{one.target.name} is {got} instead of {one.target.seconds:g} s"
