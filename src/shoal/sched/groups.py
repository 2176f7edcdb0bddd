"""Groups: batches in which no request joins later and no request is answered before the last one has ended.

The only place that decides which record an event goes to: that of its pass, or the one that is held back until the
group has ended. Owns the members of the running group and the events held back. `NoGroups` is continuous batching:
every event goes out with its pass. Knows requests and records; does not know how large a group is (batching.py).
"""

import sys

from shoal.core.events import PassEvents
from shoal.core.request import Request
from shoal.sched.queue import WaitQueue


class NoGroups:
    """Requests join and leave at every pass."""

    members: frozenset[Request] = frozenset()  # requests of the running group that have not ended
    news = False  # events held back are due

    def join(self, request: Request) -> None:
        """A request has started."""

    def leave(self, request: Request) -> None:
        """A request has ended."""

    def record(self, request: Request, events: PassEvents) -> PassEvents:
        """Where to record an event of this request, when `events` is the record of the moment."""
        return events

    def record_of_pass(self, events: PassEvents) -> PassEvents:
        """Where to record what a pass brought to its requests that have not ended."""
        return events

    def release(self, events: PassEvents) -> None:
        """Add the events that were held back, if they are due."""

    def budget(self, max_num_batched_tokens: int) -> int:
        """Positions that one pass may compute."""
        return max_num_batched_tokens

    def first_of(self, waiting: WaitQueue) -> Request | None:
        """The waiting request from whose arrival a batching window is counted."""
        return waiting.first()


class Groups:
    """One group at a time. Its members stay members when they are preempted."""

    def __init__(self) -> None:
        self.members: set[Request] = set()
        self._held = PassEvents(step=-1)

    @property
    def news(self) -> bool:
        return bool(not self.members and self._held.finished)

    def join(self, request: Request) -> None:
        self.members.add(request)

    def leave(self, request: Request) -> None:
        self.members.discard(request)

    def record(self, request: Request, events: PassEvents) -> PassEvents:
        # a member's earlier events are held back, and its end must not overtake them
        return self._held if request in self.members else events

    def record_of_pass(self, events: PassEvents) -> PassEvents:
        return self._held  # only members are computed

    def release(self, events: PassEvents) -> None:
        if not self.members and (self._held.owners or self._held.finished):
            held, self._held = self._held, PassEvents(step=-1)
            events.add(held)

    def budget(self, max_num_batched_tokens: int) -> int:
        return sys.maxsize  # a group is taken whole

    def first_of(self, waiting: WaitQueue) -> Request | None:
        return None if self.members else waiting.oldest()  # no window is counted while a group runs
