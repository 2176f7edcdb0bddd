"""Batching: who may join the running batch now.

continuous   anybody, at every pass, while a slot is free
static       groups of a fixed size: wait until there are so many, run them to the end, then the next group
dynamic      groups too, but a group is closed by its size or by a time window after its first member, whichever first

In a group nobody joins later and nobody is answered before its last member has ended; that is what groups cost.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Door:
    """What a policy sees when it decides who may come in."""

    now_s: float
    slots: int  # that are free
    inside: int  # members of the group that runs and has not ended (0 unless grouped)
    waiting: int
    oldest_s: float  # when the first in line arrived
    more_coming: bool  # the driver knows of requests that are still to arrive


class Batching(Protocol):
    """How many waiting requests may join this pass."""

    grouped: bool  # results are held back until the whole group has ended

    def may_join(self, door: Door) -> int: ...

    def wake_s(self, door: Door) -> float | None:
        """When to ask again although nothing has happened; None: not before something does."""


class Continuous:
    """The batch is rebuilt at every pass: whoever left makes room at once."""

    grouped = False

    def may_join(self, door: Door) -> int:
        return door.slots

    def wake_s(self, door: Door) -> float | None:
        return None


class Static:
    """Wait for `group_size` requests. The last group may be smaller, when no more are coming."""

    grouped = True

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def may_join(self, door: Door) -> int:
        if door.inside or (door.waiting < self.group_size and door.more_coming):
            return 0
        return min(self.group_size, door.slots)

    def wake_s(self, door: Door) -> float | None:
        return None


class Dynamic:
    """Wait for `group_size` requests, but no longer than `window_s` after the first of them came."""

    grouped = True

    def __init__(self, group_size: int, window_s: float) -> None:
        self.group_size = group_size
        self.window_s = window_s

    def may_join(self, door: Door) -> int:
        closed = door.waiting >= self.group_size or door.now_s >= door.oldest_s + self.window_s
        return min(self.group_size, door.slots) if closed and not door.inside else 0

    def wake_s(self, door: Door) -> float | None:
        return door.oldest_s + self.window_s if door.waiting and not door.inside else None


BATCHING: dict[str, type[Batching]] = {"continuous": Continuous, "static": Static, "dynamic": Dynamic}
