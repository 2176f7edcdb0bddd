"""The figures of a run of any length in bounded memory: what record.summarise says, without the records.

Owns counters and histograms with steps of 0.2%, so percentiles are right to 0.1%. Takes the place of RunRecorder where
keeping every token's time would take gigabytes; there are no plots then. Knows requests by number.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shoal.bench.cpu_noise import noise_figures
from shoal.bench.record import PERCENTILES, Promise
from shoal.core.events import PassEvents
from shoal.sched.scheduler import Scheduler
from shoal.workload.traces import TraceRequest

STEP = math.log(1.002)
SMALLEST_S = 1e-9


class Histogram:
    """How often values occurred, by their logarithm.

    >>> found = Histogram()
    >>> for value in range(1, 1001):
    ...     found.add(value)
    >>> round(found.spread()["p50"]), found.spread()["max"]
    (500, 1000)
    """

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._count = 0
        self._total = 0.0
        self._largest = 0.0

    def add(self, value: float, times: int = 1) -> None:
        if not times:
            return
        self._bins[round(math.log(max(value, SMALLEST_S)) / STEP)] += times
        self._count += times
        self._total += value * times
        self._largest = max(self._largest, value)

    def spread(self) -> dict[str, float]:
        """Mean, percentiles and maximum, named as in record.spread."""
        found = {"mean": self._total / max(self._count, 1)}
        wanted = [(percent, percent / 100 * self._count) for percent in PERCENTILES]
        seen = 0
        for key, times in sorted(self._bins.items()):
            seen += times
            while wanted and seen >= wanted[0][1]:
                value = math.exp(key * STEP)
                found[f"p{wanted.pop(0)[0]}"] = min(value, self._largest) if value > 2 * SMALLEST_S else 0.0
        for percent, _ in wanted:
            found[f"p{percent}"] = 0.0
        found["max"] = self._largest
        return found


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    arrived_s: float
    first_s: float = math.nan
    started_s: float = math.nan
    tokens: int = 0


class RunTally:
    """Counts what happens, as RunRecorder keeps it. Memory grows with the requests that have not ended."""

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self.requests = self.finished = self.outputs = self.kept = self.preemptions = self.cached = 0
        self.useful = self.padded = self.recomputed = self.vain = self.passes = self.rows = self.budget = 0
        self.busy_s = self.peak = 0.0
        self.refusals: Counter[str] = Counter()
        self.spreads = {name: Histogram() for name in ("ttft_s", "gap_s", "waited_s", "e2e_s", "normalised_s")}
        self._open: dict[str, OpenRequest] = {}
        self._owners: list[str] = []  # of the tokens of the last pass
        self._latest: set[str] = set()  # the same, without those that have ended
        self._owners_s = 0.0  # when they came
        self._last_s: dict[str, float] = {}  # when the last token of every other request came

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None:
        self.requests += 1
        self._open[str(number)] = OpenRequest(at_s)

    def refused(self, number: int, kind: str) -> None:
        self.refusals[kind] += 1
        del self._open[str(number)]

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        for start in events.admitted:
            if not start.resumed:
                self._open[start.id].started_s = events.planned_s
        if not events.scheduled_ids:
            return
        computed = events.computed_tokens + events.padded_tokens
        self.busy_s += events.busy_s
        self.passes += 1
        self.rows += len(events.scheduled_ids)
        self.useful += events.computed_tokens
        self.padded += events.padded_tokens
        self.recomputed += events.recomputed_tokens
        self.vain += events.vain_tokens
        self.budget += max(events.budget_tokens, computed)
        self.peak = max(self.peak, events.blocks_held / events.blocks_total)

    def delivered(self, events: PassEvents, at_s: float) -> None:
        """Hot: once per pass, and little for each token. Most tokens of a pass follow one of the same earlier pass."""
        owners = events.owners
        self.outputs += len(owners)
        if owners == self._owners:
            self.spreads["gap_s"].add(at_s - self._owners_s, len(self._latest))
            self.spreads["gap_s"].add(0.0, len(owners) - len(self._latest))
            self._owners_s = at_s
        elif owners:
            self._note_tokens(events, at_s)
        for end in events.finished:
            one = self._open.pop(end.id)
            self._latest.discard(end.id)
            self._last_s.pop(end.id, None)
            self.preemptions += end.preemptions
            self.cached += end.cached_tokens
            if end.reason.value in ("stop", "length"):
                self._finish(one, end.outputs, at_s)
            else:
                self.refusals[end.reason.value] += 1

    def _note_tokens(self, events: PassEvents, at_s: float) -> None:
        """Tokens of other requests than in the last pass. Several of one request follow each other without a gap."""
        owners, gaps, before, last_s = events.owners, self.spreads["gap_s"], self._latest, self._last_s
        latest = set(owners)
        gaps.add(0.0, len(owners) - len(latest))
        gaps.add(at_s - self._owners_s, len(latest & before))
        last_s.update(dict.fromkeys(before - latest, self._owners_s))
        for id in latest - before:
            if id in last_s:
                gaps.add(at_s - last_s.pop(id))
            elif math.isnan(self._open[id].first_s):
                self._open[id].first_s = at_s
        self._owners, self._latest, self._owners_s = owners, latest, at_s

    def _finish(self, one: OpenRequest, outputs: int, at_s: float) -> None:
        self.finished += 1
        ttft_s, e2e_s, spreads = one.first_s - one.arrived_s, at_s - one.arrived_s, self.spreads
        spreads["ttft_s"].add(ttft_s)
        spreads["e2e_s"].add(e2e_s)
        spreads["waited_s"].add(one.started_s - one.arrived_s)
        spreads["normalised_s"].add(e2e_s / outputs)
        gap_s = (at_s - one.first_s) / max(outputs - 1, 1)
        self.kept += ttft_s <= self.promise.ttft_s and gap_s <= self.promise.gap_s

    def figures(self, seconds: float, slots: int, price_per_hour: float) -> dict[str, Any]:
        """As record.summarise, without what needs the records."""
        spreads = {name: one.spread() for name, one in self.spreads.items()}
        computed, needless = max(self.useful + self.padded, 1), self.recomputed + self.vain
        e2e = spreads["e2e_s"]
        seconds = max(seconds, 1e-9)
        return {
            "requests": self.requests,
            "finished": self.finished,
            "refused": dict(self.refusals),
            "seconds": seconds,
            "passes": self.passes,
            "useful_tokens": self.useful,
            "padded_tokens": self.padded,
            "padding_share": self.padded / computed,
            "recomputed_tokens": self.recomputed,
            "vain_tokens": self.vain,
            "wasted_share": (self.padded + needless) / computed,
            "preemptions": self.preemptions,
            "cached_tokens": self.cached,
            "slot_use": self.rows / max(self.passes * slots, 1),
            "budget_use": (self.useful + self.padded) / max(self.budget, 1),
            "device_busy": self.busy_s / seconds,
            "kv_waste": None,  # would need the records
            "kv_peak": self.peak,
            "mfu": None,  # would need the model's costs
            "mbu": None,
            "useful_work": (self.useful - needless) / computed,
            **noise_figures(None),
            **spreads,
            "tail_over_median": e2e["p99"] / e2e["p50"] if e2e["p50"] else 0.0,
            "output_tok_s": self.outputs / seconds,
            "request_s": self.finished / seconds,
            "goodput_share": self.kept / max(self.requests, 1),
            "goodput_request_s": self.kept / seconds,
            "cost_per_million_tokens": price_per_hour * seconds / 3600 / max(self.outputs, 1) * 1e6,
        }
