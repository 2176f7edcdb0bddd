"""Experiments on scheduling policies: the same requests under two or more settings, on the real engine in real time.

overload   1.5 times what fcfs can serve, one fifth of it with latency promises: slo against fcfs
flood      one tenant offers a light load, another far too much: fair against fcfs
bursts     requests in bursts: fcfs, sjf and slo
lanes      very long prompts among short ones, with and without separate passes
sjf        mean latency of shortest job first against fcfs
budget     a pass sized by the promise against fixed sizes, when giant prompts arrive among streams

Takes a make_engine; knows the experiments and their figures, not how they are drawn.
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from shoal.bench.cpu_noise import NoiseWatch, under_banner
from shoal.bench.record import RequestRecord, RunRecord, spread
from shoal.bench.replay import Replay
from shoal.core.events import PassEvents
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.workload.arrivals import gamma, poisson, replay_at_rate
from shoal.workload.prompts import make_prompts
from shoal.workload.synthetic import draw_lengths
from shoal.workload.traces import TraceRequest, fit, read_trace

MakeEngine = Callable[[dict[str, Any]], EngineLoop]


@dataclass(frozen=True)
class PlannedRequest:
    """One request of an experiment."""

    trace: TraceRequest
    tier: str = ""
    tenant: str = ""
    kind: str = ""  # the class it is counted in

    def at(self, at_s: float) -> "PlannedRequest":
        return PlannedRequest(
            TraceRequest(at_s, self.trace.prompt, self.trace.output), self.tier, self.tenant, self.kind
        )


class PolicyReplay(Replay):
    """A replay whose requests belong to tiers and tenants."""

    planned: Sequence[PlannedRequest] = ()
    _awaited: frozenset[str] = frozenset()  # ids of the awaited kind that have not ended

    def await_kind(self, kind: str) -> None:
        """Stop when all requests of this kind have ended; the others are aborted."""
        self._awaited = frozenset(str(number) for number, one in enumerate(self.planned) if kind and one.kind == kind)

    def _note(self, events: PassEvents) -> int:
        ended = super()._note(events)
        if self._awaited and events.finished:
            self._awaited -= {end.id for end in events.finished}
            if not self._awaited:
                self._coming.clear()
                for id in list(self.loop.scheduler.requests):
                    self.loop.scheduler.abort(id)
        return ended

    def _request(self, number: int) -> Request:
        request = super()._request(number)
        request.tier, request.tenant = self.planned[number].tier, self.planned[number].tenant
        return request


@dataclass
class Finding:
    """One experiment: its runs, a table, and its summary figures."""

    name: str
    title: str
    runs: dict[str, RunRecord]
    kinds: dict[str, list[str]]  # run → the kind of each request
    rows: list[dict[str, Any]]
    figures: dict[str, float] = field(default_factory=dict)
    promise_s: dict[str, float] = field(default_factory=dict)  # "ttft" and "gap", where there is a promise
    highlighted: tuple[str, ...] = ()  # the runs whose lines have a colour; none: the first three


class Lab:
    """Runs experiments on one loaded model."""

    def __init__(self, make_engine: MakeEngine, vocab_size: int, settings: "Sizes", progress: bool = True) -> None:
        self.make_engine = make_engine
        self.vocab_size = vocab_size
        self.sizes = settings
        self.progress = progress

    def warn(self, message: str) -> None:
        tqdm.write(message, file=sys.stderr)

    def run(
        self, label: str, planned: Sequence[PlannedRequest], settings: dict[str, Any], until: str = ""
    ) -> RunRecord:
        """One run, to the end or until all of one kind have ended; repeated if other programs disturbed it.

        Requests must be in order of arrival.
        """
        for last in (False, False, True):
            record = self._run(label, planned, settings, until)
            if record.noise is None or not record.noise.disturbs:
                break
            what = "its times are not reliable" if last else "running it again"
            self.warn(f"{label}: {record.noise.remark()}; {what}")
        return record

    def _run(self, label: str, planned: Sequence[PlannedRequest], settings: dict[str, Any], until: str) -> RunRecord:
        trace = [one.trace for one in planned]
        loop = self.make_engine({"max_num_seqs": self.sizes.slots, "prefix_caching": False, **settings})
        try:
            longest = max(one.output for one in trace)
            replay = PolicyReplay(loop, trace, make_prompts(trace, self.vocab_size), longest)
            replay.planned = planned
            replay.await_kind(until)
            watch = NoiseWatch()
            with tqdm(total=len(trace), desc=label, unit="req", disable=not self.progress, leave=False) as bar:
                seconds, busy_s = replay.run(bar)
            noise = watch.noise()
        finally:
            loop.close()
        slots, records, passes = self.sizes.slots, replay.recorder.requests, replay.recorder.passes
        return RunRecord(label, label, 0.0, settings, slots, records, passes, seconds, busy_s, noise)

    def chats(self, count: int, seed: int = 0) -> list[TraceRequest]:
        """Lengths of chats, scaled to this machine."""
        sizes = self.sizes
        return fit(
            draw_lengths("azure-conv", count, seed), scale=sizes.prompt_scale, output_scale=sizes.output_scale
        ).requests

    def saturation(self, settings: dict[str, Any] | None = None) -> float:
        """Requests per second that fcfs finishes with all slots full: over the middle of a run that starts with all."""
        planned = [PlannedRequest(one) for one in self.chats(self.sizes.requests // 2, seed=7)]
        run = self.run("saturation", planned, settings or {})
        ends = sorted(record.ended_s for record in run.requests if record.ended_s is not None)
        first, last = len(ends) // 10, len(ends) * 8 // 10
        return (last - first) / (ends[last] - ends[first])

    # ---- the experiments ------------------------------------------------------------------------------------------

    def overload(self) -> Finding:
        sizes = self.sizes
        rate = 1.5 * self.saturation()
        chance = random.Random(3)
        tiers = ["premium" if chance.random() < 0.2 else "batch" for _ in range(sizes.requests)]
        trace = poisson(self.chats(sizes.requests), rate, seed=1)
        planned = [PlannedRequest(one, tier, kind=tier) for one, tier in zip(trace, tiers, strict=True)]
        promise = {"premium": {"ttft": sizes.ttft_s, "itl": sizes.itl_s, "weight": 8}, "batch": {}}
        ways: dict[str, dict[str, Any]] = {
            "fcfs": {"tiers": promise},
            "slo": {"order": "slo", "tiers": promise},
            "slo, budget by promise": {"order": "slo", "tiers": promise, "budget": "promise"},
        }
        runs = {name: self.run(name, planned, settings) for name, settings in ways.items()}
        kinds = dict.fromkeys(runs, tiers)
        rows = [
            {"policy": name, "kind": kind, **_latencies(_of(run, tiers, kind)), "req_s": len(planned) / run.seconds}
            for name, run in runs.items()
            for kind in ("premium", "batch")
        ]
        best = "slo, budget by promise"
        premium = _of(runs[best], tiers, "premium")
        figures = {
            "offered_req_s": rate,
            "premium_ttft_p99_s": spread([one.ttft_s or 0.0 for one in premium])["p99"],
            "premium_mean_gap_p99_s": spread(_mean_gaps(premium))["p99"],
            "throughput_of_fcfs": runs["fcfs"].seconds / runs[best].seconds,
        }
        title = f"1.5x what fcfs can serve ({rate:.2f} req/s), 20% premium"
        return Finding("overload", title, runs, kinds, rows, figures, {"ttft": sizes.ttft_s, "gap": sizes.itl_s})

    def flood(self) -> Finding:
        """Passes are small here, so that the flood's prompts delay others only briefly; all runs use the same size."""
        sizes = self.sizes
        small = {"max_num_batched_tokens": 4 * sizes.slots}
        rate = self.saturation(small)
        calm_trace = poisson(self.chats(max(12, sizes.requests * 5 // 6), seed=2), 0.2 * rate, seed=2)
        until_s = calm_trace[-1].at_s
        flood_trace = poisson(self.chats(int(2.5 * rate * until_s) + 1, seed=3), 2.0 * rate, seed=4)
        calm = [PlannedRequest(one, tenant="calm", kind="calm") for one in calm_trace]
        both = sorted(
            calm + [PlannedRequest(one, tenant="flood", kind="flood") for one in flood_trace if one.at_s <= until_s],
            key=lambda one: one.trace.at_s,
        )
        third = both[: 1 + both.index(calm[len(calm) // 3])]  # under fcfs waits only grow: a third is enough
        planned = {"alone": calm, "fcfs": third, "fair": both, "fair, one slot free": both}
        ways: dict[str, dict[str, Any]] = {
            "alone": {},
            "fcfs": {},
            "fair": {"order": "fair"},
            "fair, one slot free": {"order": "fair", "headroom": 1.01 / sizes.slots},
        }
        runs = {name: self.run(name, planned[name], {**small, **ways[name]}, until="calm") for name in ways}
        kinds = {name: [one.kind for one in planned[name]] for name in runs}
        rows = [
            {"policy": name, "kind": kind, **_latencies(_of(run, kinds[name], kind)), "req_s": _ended(run)}
            for name, run in runs.items()
            for kind in ("calm", "flood")
            if kind in kinds[name]
        ]
        p99 = {name: spread(_first_tokens(_of(run, kinds[name], "calm")))["p99"] for name, run in runs.items()}
        figures = {"offered_req_s": 2.2 * rate}
        for name, short in (("fair", "fair"), ("fair, one slot free", "one_free")):
            took = spread([one.committed_s - one.planned_s for one in runs[name].passes])
            figures[f"{short}_pass_p50_s"] = took["p50"]
            figures[f"{short}_pass_p99_s"] = took["p99"]
            figures[f"{short}_more_than_alone_s"] = p99[name] - p99["alone"]
            figures[f"{short}_more_in_median_passes"] = (p99[name] - p99["alone"]) / took["p50"]
        title = f"one tenant floods at 2x capacity, the other offers 20% ({len(calm)} requests)"
        return Finding("flood", title, runs, kinds, rows, figures, {}, ("fcfs", "fair", "fair, one slot free"))

    def bursts(self) -> Finding:
        sizes = self.sizes
        prompts, outputs = sizes.prompt_scale / 2, sizes.output_scale * 4
        rate = 0.8 * self.saturation()
        if sizes.burst_trace:
            found = read_trace(sizes.burst_trace, sizes.requests)
            lengths = fit(found, scale=prompts, output_scale=outputs).requests
            trace, bursty = replay_at_rate(lengths, rate), "the trace's own arrivals"
        else:
            found = draw_lengths("azure-code", sizes.requests, 5)
            lengths = fit(found, scale=prompts, output_scale=outputs).requests
            trace, bursty = gamma(lengths, rate, 3.0, seed=6), "gamma arrivals"
        gaps = _between([one.at_s for one in trace])
        variation = statistics.pstdev(gaps) / statistics.mean(gaps)
        chance = random.Random(4)
        tiers = ["premium" if chance.random() < 0.2 else "batch" for _ in trace]
        promise = {"premium": {"ttft": sizes.ttft_s, "itl": sizes.itl_s, "weight": 8}, "batch": {}}
        planned = [PlannedRequest(one, tier, kind=tier) for one, tier in zip(trace, tiers, strict=True)]
        ways: dict[str, dict[str, Any]] = {
            "fcfs": {"tiers": promise},
            "sjf": {"order": "sjf", "tiers": promise},
            "slo, budget by promise": {"order": "slo", "tiers": promise, "budget": "promise"},
        }
        runs = {name: self.run(name, planned, settings) for name, settings in ways.items()}
        rows = [
            {"policy": name, "kind": kind, **_latencies(_of(run, tiers, kind)), "req_s": len(planned) / run.seconds}
            for name, run in runs.items()
            for kind in ("premium", "batch")
        ]
        title = f"code completion in bursts at 0.8 of capacity ({bursty}, CV {variation:.1f})"
        kinds = dict.fromkeys(runs, tiers)
        return Finding("bursts", title, runs, kinds, rows, {}, {"ttft": sizes.ttft_s, "gap": sizes.itl_s})

    def lanes(self) -> Finding:
        sizes = self.sizes
        short = self.chats(sizes.requests // 2, seed=8)
        trace = poisson(
            [TraceRequest(0.0, min(one.prompt, 64), one.output) for one in short], 0.5 * self.saturation(), 9
        )
        until_s = trace[-1].at_s
        count = 4
        long = [TraceRequest(until_s * (number + 0.5) / count, sizes.long_prompt, 24) for number in range(count)]
        planned = sorted(
            [PlannedRequest(one, kind="short") for one in trace] + [PlannedRequest(one, kind="long") for one in long],
            key=lambda one: one.trace.at_s,
        )
        kinds = [one.kind for one in planned]
        ways: dict[str, dict[str, Any]] = {
            "all share passes": {},
            "lanes, 25% long": {"lane_tokens": 256, "long_share": 0.25},
            "lanes, 50% long": {"lane_tokens": 256, "long_share": 0.5},
        }
        runs = {name: self.run(name, planned, settings) for name, settings in ways.items()}
        rows = [
            {"policy": name, "kind": kind, **_latencies(_of(run, kinds, kind)), "req_s": len(planned) / run.seconds}
            for name, run in runs.items()
            for kind in ("short", "long")
        ]
        return Finding(
            "lanes", f"prompts of {sizes.long_prompt} tokens among short ones", runs, dict.fromkeys(runs, kinds), rows
        )

    def sjf(self) -> Finding:
        sizes = self.sizes
        trace = poisson(self.chats(sizes.requests, seed=10), 1.1 * self.saturation(), seed=11)
        planned = [PlannedRequest(one, kind="all") for one in trace]
        runs = {name: self.run(name, planned, {"order": name}) for name in ("fcfs", "sjf")}
        kinds = {name: ["all"] * len(planned) for name in runs}
        rows: list[dict[str, Any]] = [
            {"policy": name, "kind": "all", **_latencies(run.requests), "req_s": len(planned) / run.seconds}
            for name, run in runs.items()
        ]
        mean = {row["policy"]: row["e2e_mean_s"] for row in rows}
        return Finding("sjf", "1.1x capacity", runs, kinds, rows, {"mean_of_fcfs": mean["sjf"] / mean["fcfs"]})

    def budget(self) -> Finding:
        sizes = self.sizes
        streams = [
            PlannedRequest(TraceRequest(0.0, 16, 160), "premium", kind="stream") for _ in range(sizes.slots // 2)
        ]
        giants = [
            PlannedRequest(TraceRequest(4.0 + 6.0 * number, sizes.long_prompt, 4), "batch", kind="giant")
            for number in range(3)
        ]
        planned = streams + giants
        kinds = [one.kind for one in planned]
        promise = {"premium": {"ttft": 60.0, "itl": sizes.itl_s}, "batch": {}}
        ways: dict[str, dict[str, Any]] = {
            f"fixed {size}": {"max_num_batched_tokens": size, "tiers": promise} for size in (32, 64, 128, 512)
        }
        ways["by promise"] = {"budget": "promise", "max_num_batched_tokens": 512, "tiers": promise}
        runs = {name: self.run(name, planned, settings) for name, settings in ways.items()}
        rows = [
            {"policy": name, "kind": kind, **_latencies(_of(run, kinds, kind)), "req_s": len(planned) / run.seconds}
            for name, run in runs.items()
            for kind in ("stream", "giant")
        ]
        title = (
            f"prompts of {sizes.long_prompt} tokens among {len(streams)} streams promised {sizes.itl_s:g} s per token"
        )
        promised, shown = {"gap": sizes.itl_s}, ("fixed 64", "fixed 512", "by promise")
        return Finding("budget", title, runs, dict.fromkeys(runs, kinds), rows, {}, promised, shown)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiments, scaled to the machine they run on."""

    requests: int = 120
    slots: int = 16
    prompt_scale: float = 1 / 32
    output_scale: float = 1 / 12
    ttft_s: float = 3.0
    itl_s: float = 0.5
    long_prompt: int = 1536
    burst_trace: str = ""  # a trace file with the arrivals of the bursts; without one they are drawn


EXPERIMENTS: dict[str, Callable[[Lab], Finding]] = {
    "overload": Lab.overload,
    "flood": Lab.flood,
    "bursts": Lab.bursts,
    "lanes": Lab.lanes,
    "sjf": Lab.sjf,
    "budget": Lab.budget,
}


def _of(run: RunRecord, kinds: Sequence[str], kind: str) -> list[RequestRecord]:
    return [one for one, its in zip(run.requests, kinds, strict=True) if its == kind]


def _first_tokens(requests: Iterable[RequestRecord]) -> list[float]:
    return [one.ttft_s for one in requests if one.ttft_s is not None]


def _ended(run: RunRecord) -> float:
    """Requests per second that finished."""
    return sum(one.reason in ("stop", "length") for one in run.requests) / run.seconds


def _mean_gaps(requests: Iterable[RequestRecord]) -> list[float]:
    return [sum(one.gaps_s) / len(one.gaps_s) for one in requests if one.gaps_s]


def _between(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def _latencies(requests: Sequence[RequestRecord]) -> dict[str, float]:
    ttft = spread(_first_tokens(requests))
    gaps = spread([gap for one in requests for gap in one.gaps_s])
    e2e = spread([one.e2e_s for one in requests if one.e2e_s is not None and one.reason in ("stop", "length")])
    return {
        "requests": len(requests),
        "ttft_p50_s": ttft["p50"],
        "ttft_p99_s": ttft["p99"],
        "gap_p50_s": gaps["p50"],
        "gap_p99_s": gaps["p99"],
        "mean_gap_p99_s": spread(_mean_gaps(requests))["p99"],
        "e2e_mean_s": e2e["mean"],
        "e2e_p99_s": e2e["p99"],
        "preemptions": sum(one.preemptions for one in requests),
    }


def table(finding: Finding) -> str:
    """The rows as text, then the summary figures."""
    columns = list(finding.rows[0])
    cells = [[_cell(row[name]) for name in columns] for row in finding.rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(columns)]
    lines = [f"{finding.name}: {finding.title}"]
    lines += [_line(line, widths) for line in [columns, *cells]]
    lines += [f"{name} = {value:.3f}" for name, value in finding.figures.items()]
    lines += [f"{name}: {run.noise.remark()}" for name, run in finding.runs.items() if run.noise and run.noise.remark()]
    return under_banner("\n".join(lines), [run.noise for run in finding.runs.values()])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names left-aligned, numbers right-aligned."""
    parts = zip(cells, widths, strict=True)
    return "  ".join(text.ljust(size) if at < 2 else text.rjust(size) for at, (text, size) in enumerate(parts))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
