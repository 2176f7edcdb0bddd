"""slo: promises first.

Tiers are listed by importance. A waiting request of a higher tier goes before all of lower ones; within a tier, who has
the least slack goes first: the time left until it would be too late to start, given how long its prompt takes. So that
nobody starves, one of a lower tier goes after every `weight` of a higher one that were let past it.

    premium (weight 3)   p p p   p p p   p …
    standard (weight 2)        s       s
    batch                                  b          one b for every two s

A request whose promise would break before a place is free takes the place of one of a lower tier.
Owns the line and its counters. Knows no blocks and no clock.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Self

from shoal.core.request import Request
from shoal.core.tiers import Tiers
from shoal.sched.order import BaseOrder
from shoal.sched.queue import PATIENCE
from shoal.sched.setup import Setup
from shoal.sched.steptime import StepModel

MARGIN = 0.25  # of the promise: begin to make way when so little is left beyond the prompt's own time
SPARE_PASSES = 2  # … or so many passes, whichever is more


class Slo(BaseOrder):
    """Who goes first, by promise."""

    overtakes = True

    def __init__(self, tiers: Tiers, steps: StepModel, budget: int = 512) -> None:
        self.tiers = tiers
        self.steps = steps
        self.budget = budget  # positions in one pass
        self.passed = [0.0] * len(tiers)  # by rank: let past a lower tier that waits, since one of that went
        self._line = SloQueue(self)

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.tiers, setup.steps, setup.config.pass_tokens)

    def queue(self) -> "SloQueue":
        return self._line

    def arrived(self, request: Request) -> None:
        request.work = self.steps.prompt_s(len(request.tokens), self.budget)

    def started(self, request: Request, tokens: int) -> None:
        rank = request.promise.rank
        if self._line.waits_below(rank):
            self.passed[rank] += 1
        self.passed[:rank] = [0.0] * rank

    def key(self, request: Request) -> tuple[float, ...]:
        """Its rank, then when it must start: both fixed on arrival."""
        promise = request.promise
        late = promise.ttft_s - request.work if promise.ttft_s < 1e9 else 0.0
        return (promise.rank, request.arrived_s + late, request.order)

    def urgent(self, request: Request, now_s: float) -> bool:
        """Its promise breaks if it does not start soon."""
        promise = request.promise
        if promise.ttft_s >= 1e9 or request.outputs:
            return False
        margin_s = max(MARGIN * promise.ttft_s, SPARE_PASSES * self.steps.coefficients[0])
        return now_s + request.work + margin_s >= request.arrived_s + promise.ttft_s

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """A higher tier need not wait for one of a lower tier that does not fit, up to a point."""
        return request.promise.rank < blocked.promise.rank and blocked.overtaken < PATIENCE

    def victim(self, running: Iterable[Request]) -> Request:
        """Of the lowest tier, who loses least; of equals the newest."""
        return max(running, key=lambda one: (one.promise.rank, -one.computed, one.order))

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        """Who makes way for this one: nobody of its own tier or above, nor one whose patience was used up."""
        rank = request.promise.rank
        lower = [one for one in running if one.promise.rank > rank and one.overtaken < PATIENCE]
        return self.victim(lower) if lower else None


class SloQueue:
    """One line per tier."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._lines: list[list[tuple[tuple[float, ...], int, Request]]] = [[] for _ in slo.tiers]
        self._weights = [tier.weight for tier in slo.tiers]
        self.newcomers = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def __iter__(self) -> Iterator[Request]:
        return iter([request for line in self._lines for _, _, request in line])

    def waits_below(self, rank: int) -> bool:
        """Somebody of a lower tier waits."""
        return any(self._lines[rank + 1 :])

    def first(self) -> Request | None:
        return next(self.in_order(), None)

    def oldest(self) -> Request | None:
        return min(self, key=lambda request: request.arrived_s, default=None)

    def in_order(self) -> Iterator[Request]:
        """The line as it stands, counting as if everybody named so far had started."""
        passed = list(self._slo.passed)
        places = [0] * len(self._lines)
        while True:
            left = [rank for rank, line in enumerate(self._lines) if places[rank] < len(line)]
            if not left:
                return
            lowest = left[-1]
            rank = next(one for one in left if one == lowest or passed[one] < self._weights[one])
            request = self._lines[rank][places[rank]][2]
            places[rank] += 1
            if rank < lowest:
                passed[rank] += 1
            passed[:rank] = [0.0] * rank
            yield request

    def push(self, request: Request, key: tuple[float, ...]) -> None:
        insort(self._lines[request.promise.rank], (key, request.order, request))
        self.newcomers += not request.preemptions

    def remove(self, request: Request, key: tuple[float, ...]) -> None:
        line = self._lines[request.promise.rank]
        place = bisect_left(line, (key, request.order), key=lambda entry: entry[:2])
        assert line[place][2] is request, f"{request.id} is not where it should be in the line"
        del line[place]
        self.newcomers -= not request.preemptions

    def check(self) -> None:
        assert self.newcomers == sum(not request.preemptions for request in self), "newcomers are counted wrongly"
        for rank, line in enumerate(self._lines):
            assert line == sorted(line, key=lambda entry: entry[:2]), "a tier's line is out of order"
            assert all(request.promise.rank == rank for _, _, request in line), "somebody waits in another tier's line"
