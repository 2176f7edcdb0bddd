"""Ordering: who goes first, and who gives way.

fcfs   first come, first served; the newest gives way
"""

from collections.abc import Iterable
from typing import Protocol

from shoal.core.request import Request


class Order(Protocol):
    """Compares requests."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Smaller goes first. It must not change while the request waits."""

    def victim(self, running: Iterable[Request]) -> Request:
        """Who of the running loses its blocks."""


class Fcfs:
    """By arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.order,)

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: request.order)


ORDER: dict[str, type[Order]] = {"fcfs": Fcfs}
