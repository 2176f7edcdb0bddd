"""Batching: when waiting requests may start.

continuous   whenever a slot is free
static       in groups of a fixed size, one after the other, each run to its end; a server, which does not know whether
             more requests will come, takes as many as wait
dynamic      a group is closed by its size or by a time window after its first member's arrival, whichever comes first

No request joins a group later, and none is answered before its last member has ended (groups.py); that is the cost of
groups.
"""

from dataclasses import dataclass
from typing import Protocol, Self

from shoal.sched.groups import Groups, NoGroups
from shoal.sched.setup import NoOptions, Setup


@dataclass(frozen=True, slots=True)
class Door:
    """What a policy sees when it decides how many requests may start."""

    now_s: float
    slots: int  # that are free
    members: int  # of the running group that have not ended (0 without groups)
    waiting: int
    oldest_s: float  # when the first waiting request arrived
    more_coming: bool  # the driver knows of requests that are still to arrive


class Batching(Protocol):
    """How many waiting requests may join this pass."""

    grouped: bool  # requests run in groups

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def groups(self) -> NoGroups | Groups:
        """What keeps groups together."""

    def may_join(self, door: Door) -> int: ...

    def wake_s(self, door: Door) -> float | None:
        """When to ask again although nothing has happened; None: not before something does."""


class Continuous(NoOptions):
    """The batch is rebuilt at every pass: a request that ends frees its slot at once."""

    grouped = False

    def groups(self) -> NoGroups:
        return NoGroups()

    def may_join(self, door: Door) -> int:
        return door.slots

    def wake_s(self, door: Door) -> float | None:
        return None


class Static:
    """Wait for `group_size` requests while more are known to come; the last group may be smaller."""

    grouped = True

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.group_size)

    def groups(self) -> Groups:
        return Groups()

    def may_join(self, door: Door) -> int:
        if door.members or (door.waiting < self.group_size and door.more_coming):
            return 0
        return min(self.group_size, door.slots)

    def wake_s(self, door: Door) -> float | None:
        return None


class Dynamic:
    """Wait for `group_size` requests, but no longer than `window_s` after the arrival of the first."""

    grouped = True

    def __init__(self, group_size: int, window_s: float) -> None:
        self.group_size = group_size
        self.window_s = window_s

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.group_size, setup.config.window_ms / 1000)

    def groups(self) -> Groups:
        return Groups()

    def may_join(self, door: Door) -> int:
        closed = door.waiting >= self.group_size or door.now_s >= door.oldest_s + self.window_s
        return min(self.group_size, door.slots) if closed and not door.members else 0

    def wake_s(self, door: Door) -> float | None:
        return door.oldest_s + self.window_s if door.waiting and not door.members else None


BATCHING: dict[str, type[Batching]] = {"continuous": Continuous, "static": Static, "dynamic": Dynamic}
