"""Wall time and virtual time behind one small interface.

Only the engine loop, its clients and the server read a clock; everything below them is told what time it is.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time in seconds."""

    def now_s(self) -> float: ...


class WallClock:
    """Seconds that pass by themselves; only differences mean anything."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Seconds that pass when told to.

    >>> clock = VirtualClock()
    >>> clock.advance(1.5)
    >>> clock.now_s()
    1.5
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        self._now_s += seconds
