"""Record of one benchmark run: every request and every pass. Summaries and plots are made from it.

Knows times and counts, no engine and no plots. All times are seconds since the run began.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.bench.cpu_noise import Noise, noise_figures
from shoal.core.work import NO_WORK, DeviceRates, ModelWork


@dataclass(slots=True)
class RequestRecord:
    """One request: when it arrived, started, got tokens and ended. Token times are when its client received them."""

    arrived_s: float
    prompt: int
    output: int  # tokens requested
    started_s: float | None = None  # first time in a pass
    token_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    reason: str = ""
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.arrived_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.arrived_s

    @property
    def waited_s(self) -> float | None:
        return None if self.started_s is None else self.started_s - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens, as its client received them."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: its requests with their positions, and its padding."""

    planned_s: float
    committed_s: float
    rows: tuple[tuple[int, int, int], ...]  # (request number, first position, positions)
    useful: int  # positions computed for requests
    padded: int  # padding positions, as counted by the runner
    recomputed: int  # part of useful: computed before and lost
    dead_rows: int  # rows of the rectangle whose request has ended
    budget: int
    waiting: int
    running: int
    kv_held: int  # positions for which blocks are held
    kv_used: int  # positions stored in them
    kv_total: int
    kv_reads: int = 0  # KV positions read
    pairs: int = 0  # (position, position up to it) pairs that attention computed
    lines: int = 0  # positions that tokens were drawn from
    vain: int = 0  # part of useful: of rows whose request had ended, and of draft tokens that were rejected
    late: tuple[int, ...] = ()  # the requests that had ended


@dataclass
class RunRecord:
    """One preset at one rate."""

    preset: str
    label: str  # the preset, with the swept setting if it has one: static(16)
    rate: float  # requests per second offered; 0: all at once
    settings: dict[str, Any]
    slots: int
    requests: list[RequestRecord]
    passes: list[PassRecord]
    seconds: float
    busy_s: float  # seconds in which the device computed
    noise: Noise | None = None  # what other programs took of the CPUs during the run; None: unknown
    work: ModelWork = NO_WORK  # what the model's passes cost
    rates: DeviceRates | None = None  # of the device; None: not measured
    live: list[str] = field(default_factory=list)  # lines for the live page, without their pane; none: not recorded


@dataclass(frozen=True)
class Promise:
    """A latency promise: time to the first token and mean gap, in seconds."""

    ttft_s: float
    gap_s: float


PERCENTILES = (50, 90, 95, 99)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum."""
    if not values:
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}, "max": 0.0}
    at = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, at, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def keeps(request: RequestRecord, promise: Promise) -> bool:
    """Whether this request's promise was kept."""
    if request.reason not in ("stop", "length") or request.ttft_s is None or request.ttft_s > promise.ttft_s:
        return False
    gaps = request.gaps_s
    return not gaps or sum(gaps) / len(gaps) <= promise.gap_s


def utilisation(run: RunRecord) -> dict[str, float | None]:
    """MFU and MBU while the device computed, and the share of its work that requests needed."""
    useful = sum(one.useful for one in run.passes)
    computed = useful + sum(one.padded for one in run.passes)
    needless = sum(one.recomputed + one.vain for one in run.passes)
    found: dict[str, float | None] = {"mfu": None, "mbu": None, "useful_work": (useful - needless) / max(computed, 1)}
    if run.rates is None or run.work == NO_WORK or run.busy_s <= 0:
        return found
    pairs = sum(one.pairs * (one.useful + one.padded) / max(one.useful, 1) for one in run.passes)
    flop = run.work.flop(computed, sum(one.lines for one in run.passes), pairs)
    moved = run.work.moved_bytes(len(run.passes), sum(one.kv_reads for one in run.passes) + computed)
    return found | {"mfu": flop / run.busy_s / run.rates.flop_s, "mbu": moved / run.busy_s / run.rates.bytes_s}


def summarise(run: RunRecord, promise: Promise, price_per_hour: float) -> dict[str, Any]:
    """Every figure of one run, by name."""
    done = [request for request in run.requests if request.reason in ("stop", "length")]
    outputs = sum(len(request.token_s) for request in run.requests)
    useful = sum(one.useful for one in run.passes)
    padded = sum(one.padded for one in run.passes)
    recomputed, vain = (sum(getattr(one, name) for one in run.passes) for name in ("recomputed", "vain"))
    e2e = spread([request.e2e_s for request in done if request.e2e_s is not None])
    normalised = [request.e2e_s / len(request.token_s) for request in done if request.e2e_s and request.token_s]
    kept = sum(keeps(request, promise) for request in run.requests)
    held = sum(one.kv_held for one in run.passes)
    budget = sum(one.budget for one in run.passes)
    return {
        "requests": len(run.requests),
        "finished": len(done),
        "seconds": run.seconds,
        "passes": len(run.passes),
        "useful_tokens": useful,
        "padded_tokens": padded,
        "padding_share": padded / max(useful + padded, 1),
        "recomputed_tokens": recomputed,
        "vain_tokens": vain,
        "wasted_share": (padded + recomputed + vain) / max(useful + padded, 1),
        "preemptions": sum(request.preemptions for request in run.requests),
        "slot_use": sum(one.running for one in run.passes) / max(len(run.passes) * run.slots, 1),
        "budget_use": sum(one.useful + one.padded for one in run.passes) / max(budget, 1),
        **noise_figures(run.noise),
        **utilisation(run),
        "device_busy": run.busy_s / max(run.seconds, 1e-9),
        "kv_waste": 1 - sum(one.kv_used for one in run.passes) / held if held else 0.0,
        "kv_peak": max((one.kv_held / max(one.kv_total, 1) for one in run.passes), default=0.0),
        "ttft_s": spread([request.ttft_s for request in done if request.ttft_s is not None]),
        "gap_s": spread([gap for request in done for gap in request.gaps_s]),
        "waited_s": spread([request.waited_s for request in done if request.waited_s is not None]),
        "e2e_s": e2e,
        "normalised_s": spread(normalised),  # end to end per output token, as Orca reports it
        "tail_over_median": e2e["p99"] / e2e["p50"] if e2e["p50"] else 0.0,
        "output_tok_s": outputs / max(run.seconds, 1e-9),
        "request_s": len(done) / max(run.seconds, 1e-9),
        "goodput_share": kept / max(len(run.requests), 1),
        "goodput_request_s": kept / max(run.seconds, 1e-9),
        "cost_per_million_tokens": price_per_hour * run.seconds / 3600 / max(outputs, 1) * 1e6,
    }
