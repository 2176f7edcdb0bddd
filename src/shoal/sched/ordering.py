"""Ordering: which request starts first, and which is preempted.

fcfs       first come, first served; the newest is preempted
priority   the lowest number first, then by arrival; waiting makes up for a higher number, so that no request starves
sjf        the shortest predicted work first; waiting makes up for longer work
fair       the tenant that was served least first (fair.py)
slo        the highest tier first, in it the least slack; preempts lower tiers to keep a promise (slo.py)

All requests age alike, so their order never changes while they wait: what a key needs is fixed on arrival.
"""

from typing import Self

from shoal.core.request import Request
from shoal.sched.fair import Fair
from shoal.sched.lengths import OutputLengths
from shoal.sched.order import BaseOrder, Order
from shoal.sched.setup import Setup
from shoal.sched.slo import Slo


class Fcfs(BaseOrder):
    """By arrival."""


class Priority(BaseOrder):
    """By the request's own priority, lower first; one step is worth `age_s` seconds of waiting."""

    def __init__(self, age_s: float = 60.0) -> None:
        self.age_s = age_s

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.priority_age)

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.priority * self.age_s + request.arrived_s, request.order)


class Sjf(BaseOrder):
    """Shortest job first. Work is counted in passes' worth: a prompt's positions are computed many at a time, an
    answer's one by one. A second of waiting makes up for `age` of it.
    """

    OUTPUT_PRICE = 8.0  # what one output token costs, in prompt tokens
    QUANTILE = 0.5

    def __init__(self, age: float = 200.0) -> None:
        self.age = age
        self._lengths = OutputLengths()

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.sjf_age)

    def arrived(self, request: Request) -> None:
        left = max(1, self._lengths.quantile(request, self.QUANTILE) - request.outputs)
        request.work = len(request.tokens) + self.OUTPUT_PRICE * left

    def left(self, request: Request, by_itself: bool) -> None:
        if by_itself:
            self._lengths.learn(request)

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.work / self.age + request.arrived_s, request.order)


ORDER: dict[str, type[Order]] = {"fcfs": Fcfs, "priority": Priority, "sjf": Sjf, "fair": Fair, "slo": Slo}
