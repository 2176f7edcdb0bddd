"""Ordering: who goes first, and who gives way.

fcfs       first come, first served; the newest gives way
priority   the lowest number first, then by arrival; waiting makes up for a higher number, so that nobody starves
sjf        the shortest predicted work first; waiting makes up for longer work
fair       the tenant that was served least first (fair.py)
slo        the highest tier first, in it the least slack; takes the place of lower ones to keep a promise (slo.py)

Everybody ages alike, so who is ahead of whom never changes while they wait: what a key needs is fixed on arrival.
"""

from collections.abc import Iterable
from typing import Protocol

from shoal.core.request import Request
from shoal.sched.fair import Fair
from shoal.sched.lengths import OutputLengths
from shoal.sched.queue import SortedQueue, WaitQueue
from shoal.sched.slo import Slo


class Order(Protocol):
    """Compares requests."""

    counts: bool  # wants to be told of every token
    overtakes: bool  # some may start before others that stand ahead of them, or take their place

    def queue(self) -> "WaitQueue":
        """Where requests wait."""

    def arrived(self, request: Request) -> None:
        """It is about to join the line, for the first time: fix what its key needs."""

    def started(self, request: Request, tokens: int) -> None:
        """It got a place, with so many positions to compute."""

    def computed(self, request: Request, tokens: int) -> None:
        """So many of its positions are in a pass with prompts; told only if the policy counts."""

    def said(self, request: Request) -> None:
        """A token was committed; told only if the policy counts."""

    def left(self, request: Request, by_itself: bool) -> None:
        """It has ended; by itself, or by an abort, an error or a deadline."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Smaller goes first. It must not change while the request waits."""

    def prefill_key(self, request: Request) -> tuple[float, ...]:
        """Smaller gets its part of a pass first, as things are now; by the first number, newcomers before who runs."""

    def victim(self, running: Iterable[Request]) -> Request:
        """Who of the running loses its blocks."""

    def urgent(self, request: Request, now_s: float) -> bool:
        """It must start now, at the cost of others if need be."""

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        """Who of the running makes way for this urgent one; None: nobody."""

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """Whether it may start before one that stands ahead of it and does not fit."""

    def favours(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether it may use the headroom, whatever its tier and length."""


class BaseOrder:
    """An order that needs to know nothing but what a request says of itself, and makes nobody give way."""

    counts = False
    overtakes = False

    def queue(self) -> "WaitQueue":
        return SortedQueue()

    def arrived(self, request: Request) -> None:
        pass

    def started(self, request: Request, tokens: int) -> None:
        pass

    def computed(self, request: Request, tokens: int) -> None:
        pass

    def said(self, request: Request) -> None:
        pass

    def left(self, request: Request, by_itself: bool) -> None:
        pass

    def key(self, request: Request) -> tuple[float, ...]:
        """By arrival."""
        return (request.order,)

    def prefill_key(self, request: Request) -> tuple[float, ...]:
        return self.key(request)

    def urgent(self, request: Request, now_s: float) -> bool:
        return False

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        return None

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        return False

    def favours(self, request: Request, running: Iterable[Request]) -> bool:
        return False


class Fcfs(BaseOrder):
    """By arrival."""

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: request.order)


class Priority(BaseOrder):
    """By the request's own priority, lower first; one step is worth `age_s` seconds of waiting."""

    def __init__(self, age_s: float = 60.0) -> None:
        self.age_s = age_s

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.priority * self.age_s + request.arrived_s, request.order)

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


class Sjf(BaseOrder):
    """Shortest job first. Work is counted in passes' worth: a prompt's positions are computed many at a time, an
    answer's one by one. A second of waiting makes up for `age` of it.
    """

    OUTPUT_PRICE = 8.0  # what one output token costs, in prompt tokens
    QUANTILE = 0.5

    def __init__(self, age: float = 200.0) -> None:
        self.age = age
        self._lengths = OutputLengths()

    def arrived(self, request: Request) -> None:
        left = max(1, self._lengths.quantile(request, self.QUANTILE) - request.outputs)
        request.work = len(request.tokens) + self.OUTPUT_PRICE * left

    def left(self, request: Request, by_itself: bool) -> None:
        if by_itself:
            self._lengths.learn(request)

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.work / self.age + request.arrived_s, request.order)

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


ORDER: dict[str, type[Order]] = {"fcfs": Fcfs, "priority": Priority, "sjf": Sjf, "fair": Fair, "slo": Slo}
