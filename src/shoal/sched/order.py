"""Order: what the scheduler asks of an ordering policy, and the answers that most policies share.

Knows requests. The policies are in ordering.py, fair.py and slo.py.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, Self

from shoal.core.request import Request
from shoal.sched.queue import SortedQueue, WaitQueue
from shoal.sched.setup import NoOptions, Setup


class Order(Protocol):
    """Compares requests."""

    counts: bool  # computed() and generated() are called
    overtakes: bool  # a request may start before one that is ahead of it in the queue, or preempt a running one

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def queue(self) -> WaitQueue:
        """Where requests wait."""

    def arrived(self, request: Request) -> None:
        """A request is about to be queued for the first time: fix what its key needs."""

    def started(self, request: Request, tokens: int) -> None:
        """A request got a row, with so many positions to compute."""

    def computed(self, request: Request, tokens: int) -> None:
        """So many of its positions are in a pass with prompts; called only if the policy counts."""

    def generated(self, request: Request, tokens: int) -> None:
        """A pass brought so many tokens for it; called only if the policy counts."""

    def left(self, request: Request, by_itself: bool) -> None:
        """A request has ended: by itself, or by an abort, an error or a deadline."""

    def key(self, request: Request) -> tuple[float, ...]:
        """The smallest starts first. It must not change while the request waits."""

    def prefill_key(self, request: Request) -> tuple[float, ...]:
        """The smallest gets its share of a pass first. It may change from pass to pass. A waiting request goes before a
        running one if its first number is smaller."""

    def victim(self, running: Iterable[Request]) -> Request:
        """The running request to preempt when blocks run out."""

    def urgent(self, request: Request, now_s: float) -> bool:
        """Whether it must start now, if need be by preempting another request."""

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        """The running request to preempt for this urgent one; None: there is none."""

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """Whether it may start before one that is ahead of it in the queue and does not fit."""

    def favours(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether it may use the headroom, whatever its tier and length."""

    def take_service(self) -> dict[str, float]:
        """What was computed here since the last call, for each tenant with requests; empty if the policy does not count
        that."""

    def served_elsewhere(self, service: Mapping[str, float]) -> None:
        """What other engines have computed since the last call, for each tenant that has requests there."""


class BaseOrder(NoOptions):
    """First come, first served, from a request's own fields; preempts no request for another."""

    counts = False
    overtakes = False

    def queue(self) -> WaitQueue:
        return SortedQueue()

    def arrived(self, request: Request) -> None:
        pass

    def started(self, request: Request, tokens: int) -> None:
        pass

    def computed(self, request: Request, tokens: int) -> None:
        pass

    def generated(self, request: Request, tokens: int) -> None:
        pass

    def left(self, request: Request, by_itself: bool) -> None:
        pass

    def key(self, request: Request) -> tuple[float, ...]:
        """By arrival."""
        return (request.order,)

    def prefill_key(self, request: Request) -> tuple[float, ...]:
        return self.key(request)

    def victim(self, running: Iterable[Request]) -> Request:
        """The last by key."""
        return max(running, key=self.key)

    def urgent(self, request: Request, now_s: float) -> bool:
        return False

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        return None

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        return False

    def favours(self, request: Request, running: Iterable[Request]) -> bool:
        return False

    def take_service(self) -> dict[str, float]:
        return {}

    def served_elsewhere(self, service: Mapping[str, float]) -> None:
        pass
