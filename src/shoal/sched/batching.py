"""Batching: who may join the running batch now.

continuous   anybody, at every pass, while a slot is free
"""

from typing import Protocol


class Batching(Protocol):
    """How many waiting requests may join this pass."""

    def may_join(self, running: int, slots: int) -> int: ...


class Continuous:
    """The batch is rebuilt at every pass: whoever left makes room at once."""

    def may_join(self, running: int, slots: int) -> int:
        return slots - running


BATCHING: dict[str, type[Batching]] = {"continuous": Continuous}
