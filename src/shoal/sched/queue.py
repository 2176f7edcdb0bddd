"""The waiting line: what the scheduler asks of one, and the usual one, sorted by key. Knows keys, not policies."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from shoal.core.request import Request

PATIENCE = 64  # requests that are let past one that does not fit; then nobody may pass it or take its place


class WaitQueue(Protocol):
    """Requests that wait. A request is pushed and removed with the same key."""

    newcomers: int  # of those in line, how many have never run; the others lost their blocks

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def first(self) -> Request | None: ...

    def oldest(self) -> Request | None:
        """Who has waited longest, wherever it stands."""

    def in_order(self) -> Iterator[Request]:
        """The line as it stands, read lazily: stop before changing it."""

    def push(self, request: Request, key: tuple[float, ...]) -> None: ...

    def remove(self, request: Request, key: tuple[float, ...]) -> None: ...

    def check(self) -> None: ...


class SortedQueue:
    """Requests sorted by key; ties by arrival."""

    def __init__(self) -> None:
        self._line: list[tuple[tuple[float, ...], int, Request]] = []
        self.newcomers = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for _, _, request in self._line])

    def first(self) -> Request | None:
        return self._line[0][2] if self._line else None

    def oldest(self) -> Request | None:
        """Who has waited longest, wherever it stands."""
        return min((request for _, _, request in self._line), key=lambda request: request.arrived_s, default=None)

    def in_order(self) -> Iterator[Request]:
        """The line as it stands, read lazily: stop before changing it."""
        return (request for _, _, request in self._line)

    def push(self, request: Request, key: tuple[float, ...]) -> None:
        insort(self._line, (key, request.order, request))
        self.newcomers += not request.preemptions

    def remove(self, request: Request, key: tuple[float, ...]) -> None:
        place = bisect_left(self._line, (key, request.order), key=lambda entry: entry[:2])
        assert self._line[place][2] is request, f"{request.id} is not where it should be in the line"
        del self._line[place]
        self.newcomers -= not request.preemptions

    def check(self) -> None:
        assert self.newcomers == sum(not request.preemptions for request in self), "newcomers are counted wrongly"
