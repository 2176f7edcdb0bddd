"""The waiting queue: what the scheduler asks of one, and the usual one, sorted by key. Knows keys, not policies."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from shoal.core.request import Request

PATIENCE = 64  # requests that may overtake one that does not fit; then none may overtake or preempt it


class WaitQueue(Protocol):
    """Requests that wait. A request is pushed and removed with the same key."""

    newcomers: int  # waiting requests that were neither preempted nor resumed

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def first(self) -> Request | None: ...

    def oldest(self) -> Request | None:
        """The request that has waited longest, wherever it stands."""

    def in_order(self) -> Iterator[Request]:
        """The queue in order, read lazily: stop before changing it."""

    def push(self, request: Request, key: tuple[float, ...]) -> None: ...

    def remove(self, request: Request, key: tuple[float, ...]) -> None: ...

    def check(self) -> None: ...


class SortedQueue:
    """Requests sorted by key; ties by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, ...], int, Request]] = []
        self.newcomers = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for _, _, request in self._entries])

    def first(self) -> Request | None:
        return self._entries[0][2] if self._entries else None

    def oldest(self) -> Request | None:
        """The request that has waited longest, wherever it stands."""
        return min((request for _, _, request in self._entries), key=lambda request: request.arrived_s, default=None)

    def in_order(self) -> Iterator[Request]:
        """The queue in order, read lazily: stop before changing it."""
        return (request for _, _, request in self._entries)

    def push(self, request: Request, key: tuple[float, ...]) -> None:
        insort(self._entries, (key, request.order, request))
        self.newcomers += request.newcomer

    def remove(self, request: Request, key: tuple[float, ...]) -> None:
        index = bisect_left(self._entries, (key, request.order), key=lambda entry: entry[:2])
        assert self._entries[index][2] is request, f"{request.id} is not where it should be in the queue"
        del self._entries[index]
        self.newcomers -= request.newcomer

    def check(self) -> None:
        assert self.newcomers == sum(request.newcomer for request in self), "newcomers are counted wrongly"
