"""Promises to requests by percentile, and an observer that counts how well a simulated run keeps them.

    --promise ttft_p99=2,gap_p99=0.1                      all requests
    --promise tier=premium,share=0.2,ttft_p99=0.5         one request in five; another --promise names the rest

Owns the form of a promise and what keeping it means: of 1,000 requests, at most 10 may exceed a p99; a request that is
refused exceeds everything. Knows requests by their number in a trace; no scheduling and no costs.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.core.events import PassEvents
from shoal.errors import BadConfig
from shoal.sched.scheduler import Scheduler
from shoal.workload.traces import TraceRequest

WHAT = {"ttft": "time to the first token", "gap": "gap between two tokens", "e2e": "time to the last token"}
TARGET = re.compile(r"(ttft|gap|e2e)_p(\d{1,2}(?:\.\d+)?)")
EXAMPLE = "ttft_p99=2,gap_p99=0.1"
STEPS = 1e-6  # times are counted in microseconds
NEVER_S = 1e9  # what a refused request waits for


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """So large a share, in percent, of requests (of gaps: of gaps) takes at most so long."""

    what: str  # a key of WHAT
    percent: float
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.what}_p{self.percent:g}"

    def allowed(self, count: int) -> int:
        """How many of so many may exceed it."""
        return math.floor(count * (1 - self.percent / 100) + 1e-9)

    def __str__(self) -> str:
        return f"{self.name} of {self.seconds:g} s"


@dataclass(frozen=True)
class TierPromise:
    """What the requests of one tier are promised, and which share of all requests they are."""

    tier: str
    share: float
    targets: tuple[LatencyTarget, ...]

    def scaled(self, factor: float) -> "TierPromise":
        """With so many times as much time."""
        return replace(self, targets=tuple(replace(one, seconds=one.seconds * factor) for one in self.targets))


def parse_promise(text: str) -> TierPromise:
    """From a flag.

    >>> parse_promise("tier=premium,share=0.2,ttft_p99=0.5").targets[0].name
    'ttft_p99'
    """
    tier, share, targets = "", math.nan, list[LatencyTarget]()
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        found = TARGET.fullmatch(key)
        if not equals or not (found or key in ("tier", "share")):
            raise BadConfig(f"a promise such as {EXAMPLE} has no {part!r}; known: tier, share, ttft_pN, gap_pN, e2e_pN")
        if key == "tier":
            tier = value
        elif found:
            percent = float(found[2])
            if not percent:
                raise BadConfig(f"the promise {part} promises nothing; give a percentile above 0, such as p99")
            targets.append(LatencyTarget(found[1], percent, _above_zero(value, part)))
        else:
            share = _above_zero(value, part)
    if not targets:
        raise BadConfig(f"the promise {text!r} has no times; add some, such as {EXAMPLE}")
    return TierPromise(tier, share, tuple(targets))


def _above_zero(value: str, part: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise BadConfig(f"the promise {part}: {value!r} is not a number above 0")
    return number


def parse_promises(texts: Sequence[str]) -> tuple[TierPromise, ...]:
    """Several tiers: all have names, and one may leave out its share, which is the rest."""
    found = [parse_promise(text) for text in texts]
    if len(found) == 1 and math.isnan(found[0].share):
        return (replace(found[0], share=1.0),)
    names = [one.tier for one in found]
    if len(set(names)) < len(names) or not all(names):
        raise BadConfig("several promises, or one for a share of the requests, need a tier=NAME each, all different")
    given = sum(one.share for one in found if not math.isnan(one.share))
    without = [one for one in found if math.isnan(one.share)]
    rest = 1 - given
    if len(without) > 1 or (without and rest <= 0) or (not without and abs(rest) > 1e-6):
        raise BadConfig(f"the shares of the tiers add up to {given:g}, not to 1; one tier may leave out its share")
    return tuple(replace(one, share=rest) if math.isnan(one.share) else one for one in found)


def tier_names(promises: Sequence[TierPromise], length: int = 100) -> list[str]:
    """The tiers of requests in turn, each as often as its share says and spread evenly.

    >>> tier_names(parse_promises(["tier=a,share=0.25,ttft_p99=1", "tier=b,ttft_p99=9"]), 4)
    ['b', 'a', 'b', 'b']
    """
    if len(promises) == 1:
        return [promises[0].tier]
    given = dict.fromkeys((one.tier for one in promises), 0)
    found = []
    for number in range(1, length + 1):
        behind = max(promises, key=lambda one: one.share * number - given[one.tier])
        given[behind.tier] += 1
        found.append(behind.tier)
    return found


@dataclass(frozen=True)
class KeptTarget:
    """One target of one tier, after a run."""

    tier: str
    target: LatencyTarget
    found_s: float  # the percentile as it was; infinite where requests were refused
    kept: bool


class TargetMissed(Exception):
    """The run need not go on: a target is missed, whatever follows."""


class TierCount:
    """What the requests of one tier have got."""

    def __init__(self, promise: TierPromise, requests: int, gaps: int) -> None:
        self.promise = promise
        self.totals = {"ttft": requests, "gap": gaps, "e2e": requests}
        self.values: dict[str, Counter[int]] = {what: Counter() for what in WHAT}
        self._left = [(one, one.allowed(self.totals[one.what])) for one in promise.targets]

    def add(self, what: str, seconds: float, times: int = 1) -> None:
        self.values[what][round(seconds / STEPS)] += times
        for number, (target, left) in enumerate(self._left):
            if target.what == what and seconds > target.seconds:
                self._left[number] = target, left - times

    @property
    def broken(self) -> bool:
        return any(left < 0 for _, left in self._left)

    def kept(self) -> list[KeptTarget]:
        return [
            KeptTarget(self.promise.tier, target, self.at(target.what, target.percent), left >= 0)
            for target, left in self._left
        ]

    def at(self, what: str, percent: float) -> float:
        """The smallest time that so many percent do not exceed; what never came counts as infinite."""
        total, found = self.totals[what], self.values[what]
        if not total:
            return 0.0
        keys = np.array(sorted(found))
        counts = np.cumsum([found[key] for key in keys.tolist()])
        index = int(np.searchsorted(counts, total - LatencyTarget(what, percent, 0.0).allowed(total)))
        return float(keys[index] * STEPS) if index < len(keys) else math.inf


class PromiseWatch:
    """Counts how well a run keeps promises; with `stop` it ends the run as soon as one is broken for certain."""

    def __init__(self, promises: Sequence[TierPromise], trace: Sequence[TraceRequest], stop: bool = False) -> None:
        self._stop = stop
        self._tiers = tier_names(promises)
        requests: Counter[str] = Counter()
        gaps: Counter[str] = Counter()
        for number, one in enumerate(trace):
            tier = self._tiers[number % len(self._tiers)]
            requests[tier] += 1
            gaps[tier] += one.output - 1
        self.tiers = {one.tier: TierCount(one, requests[one.tier], gaps[one.tier]) for one in promises}
        self.outputs = self.refusals = self.preemptions = self.computed = self.recomputed = 0
        self.busy_s = 0.0
        self.queued_until_s = 0.0  # when a pass last left requests in the queue
        self.computed_by_then = 0
        self._arrived_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def _tier(self, id: str) -> TierCount:
        return self.tiers[self._tiers[int(id) % len(self._tiers)]]

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None:
        self._arrived_s[str(number)] = at_s

    def refused(self, number: int, kind: str) -> None:
        self._lose(str(number))

    def _lose(self, id: str) -> None:
        self.refusals += 1
        self._arrived_s.pop(id, None)
        if self._last_s.pop(id, None) is None:
            self._tier(id).add("ttft", NEVER_S)
        self._tier(id).add("e2e", NEVER_S)

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        self.busy_s += events.busy_s
        self.computed += events.computed_tokens - events.recomputed_tokens
        self.recomputed += events.recomputed_tokens
        if events.waiting:
            self.queued_until_s, self.computed_by_then = events.committed_s, self.computed

    def delivered(self, events: PassEvents, at_s: float) -> None:
        self.outputs += len(events.owners)
        several = len(self.tiers) > 1
        gaps = Counter((self._last_s.get(id), self._tier(id).promise.tier if several else "") for id in events.owners)
        alone = next(iter(self.tiers.values()))
        for (then_s, name), times in gaps.items():
            if then_s is not None:
                (self.tiers[name] if several else alone).add("gap", at_s - then_s, times)
        self._last_s.update(dict.fromkeys(events.owners, at_s))
        if 0 in events.indexes:
            for id, index in zip(events.owners, events.indexes, strict=True):
                if not index:
                    self._tier(id).add("ttft", at_s - self._arrived_s[id])
        for end in events.finished:
            self.preemptions += end.preemptions
            if end.reason.value not in ("stop", "length"):
                self._lose(end.id)
                continue
            self._last_s.pop(end.id, None)
            self._tier(end.id).add("e2e", at_s - self._arrived_s.pop(end.id))
        if self._stop and any(one.broken for one in self.tiers.values()):
            raise TargetMissed

    @property
    def kept(self) -> bool:
        return not any(one.broken for one in self.tiers.values())

    def targets(self) -> list[KeptTarget]:
        return [target for one in self.tiers.values() for target in one.kept()]

    def percentile(self, what: str, percent: float) -> float:
        """Over all tiers."""
        values: Counter[int] = Counter()
        for one in self.tiers.values():
            values.update(one.values[what])
        if not values:
            return 0.0
        keys = np.array(sorted(values))
        counts = np.cumsum([values[key] for key in keys.tolist()])
        return float(keys[np.searchsorted(counts, percent / 100 * counts[-1])] * STEPS)

    def mean(self, what: str) -> float:
        values = [pair for one in self.tiers.values() for pair in one.values[what].items()]
        return sum(key * times for key, times in values) * STEPS / max(1, sum(times for _, times in values))
