"""slo: promises first.

Tiers are listed by importance. A waiting request of a higher tier goes before all of lower ones; within a tier, the
least slack goes first: the time left until it would be too late to start, given how long its prompt takes. So that no
request starves, one of a lower tier goes after every `weight` of a higher one that overtook it.

    premium (weight 3)   p p p   p p p   p …
    standard (weight 2)        s       s
    batch                                  b          one b for every two s

A request whose promise would break before a slot is free preempts one of a lower tier.
Owns the queue and its counters. Knows no blocks and no clock.
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

MARGIN = 0.25  # of the promise: begin to preempt when so little is left beyond the prompt's own time
SPARE_PASSES = 2  # … or so many passes, whichever is more


class Slo(BaseOrder):
    """The order of starting, by promise."""

    overtakes = True

    def __init__(self, tiers: Tiers, steps: StepModel, budget: int = 512) -> None:
        self.tiers = tiers
        self.steps = steps
        self.budget = budget  # positions in one pass
        self.passed = [0.0] * len(tiers)  # by rank: starts ahead of a waiting lower tier, since one of that started
        self._queue = SloQueue(self)

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.tiers, setup.steps, setup.config.pass_tokens)

    def queue(self) -> "SloQueue":
        return self._queue

    def arrived(self, request: Request) -> None:
        request.work = self.steps.prompt_s(len(request.tokens), self.budget)

    def started(self, request: Request, tokens: int) -> None:
        rank = request.promise.rank
        if self._queue.waits_below(rank):
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
        """Of the lowest tier, the request that loses least; of equals the newest."""
        return max(running, key=lambda one: (one.promise.rank, -one.computed, one.order))

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        """A request of a lower tier that was not overtaken too often."""
        rank = request.promise.rank
        lower = [one for one in running if one.promise.rank > rank and one.overtaken < PATIENCE]
        return self.victim(lower) if lower else None


class SloQueue:
    """One queue per tier."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._queues: list[list[tuple[tuple[float, ...], int, Request]]] = [[] for _ in slo.tiers]
        self._weights = [tier.weight for tier in slo.tiers]
        self.newcomers = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[Request]:
        return iter([request for queue in self._queues for _, _, request in queue])

    def waits_below(self, rank: int) -> bool:
        """Whether a request of a lower tier waits."""
        return any(self._queues[rank + 1 :])

    def first(self) -> Request | None:
        return next(self.in_order(), None)

    def oldest(self) -> Request | None:
        return min(self, key=lambda request: request.arrived_s, default=None)

    def in_order(self) -> Iterator[Request]:
        """The queue in order, as if every request yielded so far had started."""
        passed = list(self._slo.passed)
        taken = [0] * len(self._queues)
        while True:
            left = [rank for rank, queue in enumerate(self._queues) if taken[rank] < len(queue)]
            if not left:
                return
            lowest = left[-1]
            rank = next(one for one in left if one == lowest or passed[one] < self._weights[one])
            request = self._queues[rank][taken[rank]][2]
            taken[rank] += 1
            if rank < lowest:
                passed[rank] += 1
            passed[:rank] = [0.0] * rank
            yield request

    def push(self, request: Request, key: tuple[float, ...]) -> None:
        insort(self._queues[request.promise.rank], (key, request.order, request))
        self.newcomers += request.newcomer

    def remove(self, request: Request, key: tuple[float, ...]) -> None:
        queue = self._queues[request.promise.rank]
        index = bisect_left(queue, (key, request.order), key=lambda entry: entry[:2])
        assert queue[index][2] is request, f"{request.id} is not where it should be in the queue"
        del queue[index]
        self.newcomers -= request.newcomer

    def check(self) -> None:
        assert self.newcomers == sum(request.newcomer for request in self), "newcomers are counted wrongly"
        for rank, queue in enumerate(self._queues):
            assert queue == sorted(queue, key=lambda entry: entry[:2]), "a tier's queue is out of order"
            assert all(request.promise.rank == rank for _, _, request in queue), "a request is in another tier's queue"
