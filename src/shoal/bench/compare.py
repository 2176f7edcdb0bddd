"""Compare: the same requests through every preset on the same model, at every rate.

Groups are swept (static by size, dynamic by window at the size of the slots) at the middle rate, and the best of each
by median normalised latency is kept, so that the baseline is a fair one. Takes a make_engine, which builds an engine
with given settings over the model loaded once, or a simulated one; and a RunOnce, which sends the requests through it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from shoal.bench.cpu_noise import NoiseWatch
from shoal.bench.kept_runs import NothingKept
from shoal.bench.live_tape import LiveTape, NoTape
from shoal.bench.record import Promise, RunRecord, summarise
from shoal.bench.replay import replay
from shoal.bench.split_engines import SplitEngines
from shoal.config.presets import preset_of
from shoal.core.work import NO_WORK, DeviceRates, ModelWork
from shoal.engine.loop import EngineLoop
from shoal.workload.arrivals import at_once, cv_of, gamma, replay_at_rate
from shoal.workload.traces import TraceRequest

START_S = 1.0  # of an engine, before each run
MakeEngine = Callable[[dict[str, Any]], EngineLoop]


@dataclass(frozen=True)
class ComparePlan:
    """What to compare."""

    presets: tuple[str, ...]
    rates: tuple[float, ...]  # requests per second; 0: all at once
    trace: list[TraceRequest]
    prompts: list[list[int]]
    max_tokens: int
    slots: int
    promise: Promise
    price_per_hour: float
    arrivals: str = "poisson"  # or replay, or gamma:CV
    users: int = 0
    windows_ms: tuple[float, ...] = (20.0, 100.0, 500.0)
    seed: int = 0
    repeats: int = 0  # most repeats of a run that other programs disturbed

    @property
    def middle_rate(self) -> float:
        """At which variants are tried, and runs are recorded for the live page."""
        return self.rates[len(self.rates) // 2]


@dataclass
class Results:
    """The best run of each preset and rate, and the runs that were tried and not kept."""

    kept: list[RunRecord] = field(default_factory=list)
    tried: list[RunRecord] = field(default_factory=list)


def group_sizes(slots: int) -> list[int]:
    """A quarter, a half and all of the slots."""
    return sorted({max(1, slots // 4), max(1, slots // 2), slots})


def variants(preset: str, plan: ComparePlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, settings) of every variant of a preset."""
    batching = preset_of(preset).settings["batching"]
    if batching == "static":
        for size in group_sizes(plan.slots):
            yield f"{preset} ({size})", {"group_size": size}
    elif batching == "dynamic":
        for window_ms in plan.windows_ms:
            yield f"{preset} ({plan.slots}, {window_ms:g} ms)", {"group_size": plan.slots, "window_ms": window_ms}
    else:
        yield preset, {}


def arrive(plan: ComparePlan, rate: float) -> list[TraceRequest]:
    """The trace with arrival times for this rate."""
    if not rate or plan.users:
        return at_once(plan.trace)
    cv = cv_of(plan.arrivals)
    return replay_at_rate(plan.trace, rate) if cv is None else gamma(plan.trace, rate, cv, plan.seed)


def count_runs(plan: ComparePlan) -> int:
    tried = sum(sum(1 for _ in variants(preset, plan)) for preset in plan.presets)
    return tried + len(plan.presets) * (len(plan.rates) - 1)


def expected_s(plan: ComparePlan, work_s: float) -> float:
    """How long all runs take, if one whose requests arrive faster than they are computed takes `work_s`."""

    def one_s(rate: float) -> float:
        arriving_s = len(plan.trace) / rate if rate and not plan.users else 0.0
        return max(arriving_s + work_s / len(plan.trace), work_s) + START_S

    middle = plan.middle_rate
    tried = sum(sum(1 for _ in variants(preset, plan)) for preset in plan.presets)
    return tried * one_s(middle) + len(plan.presets) * sum(one_s(rate) for rate in plan.rates if rate != middle)


class RunOnce(Protocol):
    """One preset at one rate, on a new engine."""

    def __call__(
        self,
        plan: ComparePlan,
        make_engine: MakeEngine,
        preset: str,
        label: str,
        settings: dict[str, Any],
        rate: float,
        bar: "tqdm[Any] | None" = None,
    ) -> RunRecord: ...


def compare(
    plan: ComparePlan,
    make_engine: MakeEngine,
    progress: bool = True,
    run_once: RunOnce | None = None,
    kept: NothingKept | None = None,
    preset_ended: Callable[[str, Sequence[RunRecord]], None] = lambda preset, runs: None,
) -> Results:
    """Run everything. Variants are tried at the middle rate; the best of each preset runs at the other rates.

    Each run is given to `kept` when it ends, and not made again if it is found there.
    """
    results, kept, middle = Results(), kept or NothingKept(), plan.middle_rate
    bar: tqdm[Any] = tqdm(total=count_runs(plan) * len(plan.trace), unit="req", disable=not progress)
    with bar:
        for preset in plan.presets:
            tried = [
                run_one(plan, make_engine, preset, label, settings, middle, bar, run_once, kept)
                for label, settings in variants(preset, plan)
            ]
            best = min(tried, key=lambda run: _latency(run, plan))
            results.tried += [run for run in tried if run is not best]
            extra: dict[str, Any] = {
                name: best.settings[name] for name in ("group_size", "window_ms") if name in best.settings
            }
            for rate in plan.rates:
                again = best
                if rate != middle:
                    again = run_one(plan, make_engine, preset, best.label, extra, rate, bar, run_once, kept)
                results.kept.append(again)
            preset_ended(preset, results.kept[-len(plan.rates) :])
    return results


def _latency(run: RunRecord, plan: ComparePlan) -> float:
    """Median end-to-end time per output token; infinite if no request finished."""
    summary = summarise(run, plan.promise, plan.price_per_hour)
    return float(summary["normalised_s"]["p50"]) if summary["finished"] else float("inf")


def run_one(
    plan: ComparePlan,
    make_engine: MakeEngine,
    preset: str,
    label: str,
    settings: dict[str, Any],
    rate: float,
    bar: "tqdm[Any] | None" = None,
    run_once: RunOnce | None = None,
    kept: NothingKept | None = None,
) -> RunRecord:
    """One preset at one rate, repeated if other programs disturbed it; returns the least disturbed run."""
    name = f"{label} at {rate:g}/s" if rate else label
    kept = kept or NothingKept()
    if bar is not None:
        bar.set_description(name)
    if (found := kept.find(label, rate)) is not None:
        if bar is not None:
            bar.update(len(plan.trace))
        return found
    runs: list[RunRecord] = []
    while len(runs) < 1 + plan.repeats and (not runs or (runs[-1].noise and runs[-1].noise.disturbs)):
        if runs and runs[-1].noise and bar is not None:
            bar.write(f"{name}: {runs[-1].noise.remark()}; running it again")
            bar.total = (bar.total or 0) + len(plan.trace)
        runs.append((run_once or run_live)(plan, make_engine, preset, label, settings, rate, bar))
    best = min(runs, key=lambda run: run.noise.share if run.noise else 0.0)
    kept.add(best)
    return best


def run_live(
    plan: ComparePlan,
    make_engine: MakeEngine,
    preset: str,
    label: str,
    settings: dict[str, Any],
    rate: float,
    bar: "tqdm[Any] | None" = None,
    work: ModelWork = NO_WORK,
    rates: DeviceRates | None = None,
) -> RunRecord:
    """One run on a new engine, in real time. `work` and `rates`: for what passes use of the device, where known."""
    chosen = {**preset_of(preset).settings, **settings}
    loop = make_engine(chosen)
    tape = LiveTape(plan.promise, work, rates) if rate == plan.middle_rate else NoTape()
    followed(loop, tape)
    watch = NoiseWatch()
    try:
        run = replay(
            loop,
            arrive(plan, rate),
            plan.prompts,
            preset=preset,
            label=label,
            rate=rate,
            max_tokens=plan.max_tokens,
            users=plan.users,
            bar=bar,
            tape=tape,
        )
        noise = watch.noise()
    finally:
        loop.close()
    run.settings = chosen
    run.noise = noise
    return run


def followed(loop: EngineLoop | SplitEngines, tape: NoTape) -> None:
    """Two engines have a thread each, on which they show their records to the tape."""
    if isinstance(loop, SplitEngines):
        loop.watch = tape.take
        for one in loop.parts:
            tape.follow(one.scheduler)
    else:
        tape.follow(loop.scheduler)


def rows_of(runs: Sequence[RunRecord], plan: ComparePlan) -> list[dict[str, Any]]:
    """Every figure of every run, for tables and machines."""
    return [
        {
            "preset": run.preset,
            "label": run.label,
            "rate": run.rate,
            "settings": run.settings,
            **summarise(run, plan.promise, plan.price_per_hour),
        }
        for run in runs
    ]


class SpeedUp(NamedTuple):
    """Requests per second that two systems finish at the same median normalised latency."""

    latency_s: float
    ours: float
    theirs: float

    @property
    def times(self) -> float:
        return self.ours / self.theirs


def speed_up(runs: Sequence[RunRecord], plan: ComparePlan, of: Sequence[str], over: Sequence[str]) -> SpeedUp | None:
    """The best of `of` against the best of `over`, as Orca reports it.

    Taken at one latency: the lowest of `over`'s points that `of` reaches too, not the point with the largest ratio.
    """
    ours = curve(runs, plan, of)
    theirs = curve(runs, plan, over)
    if not ours or not theirs:
        return None
    for latency, throughput in theirs:  # lowest latency first
        reached = at_latency(ours, latency)
        if reached is not None:
            return SpeedUp(latency, reached, throughput)
    return None


def by_batching(presets: Sequence[str], batching: str) -> list[str]:
    return [name for name in presets if preset_of(name).settings["batching"] == batching]


def in_words(found: SpeedUp | None) -> str:
    """The report's sentence on continuous batching against the best static groups."""
    if found is None:
        return ""
    return (
        f"At the same median latency per output token ({found.latency_s * 1e3:,.0f} ms) the best continuous preset "
        f"finished {found.ours:.2f} requests per second and the best static group {found.theirs:.2f}: "
        f"{found.times:.1f} times as many."
    )


def curve(runs: Sequence[RunRecord], plan: ComparePlan, names: Sequence[str]) -> list[tuple[float, float]]:
    """(median normalised latency, requests per second finished) by rate, the best of these presets at each."""
    points: dict[float, tuple[float, float]] = {}
    for run in runs:
        if run.preset in names:
            summary = summarise(run, plan.promise, plan.price_per_hour)
            point = (summary["normalised_s"]["p50"], summary["request_s"])
            if run.rate not in points or point[0] < points[run.rate][0]:
                points[run.rate] = point
    return sorted(points.values())


def at_latency(points: Sequence[tuple[float, float]], latency: float) -> float | None:
    """Throughput reached within this latency: the highest point at or below it, or on the line to the next one.

    >>> at_latency([(1.0, 2.0), (3.0, 4.0)], 2.0)
    3.0
    """
    below = [point for point in points if point[0] <= latency]
    if not below:
        return None
    above = [point for point in points if point[0] > latency]
    best = max(throughput for _, throughput in below)
    if above:
        (x0, y0), (x1, y1) = below[-1], above[0]
        best = max(best, y0 + (y1 - y0) * (latency - x0) / (x1 - x0))
    return best
