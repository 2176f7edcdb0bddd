"""Wall time and virtual time behind one small interface.

Only the engine loop, its clients and the server read a clock; everything below them takes the time as an argument.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds."""

    def now_s(self) -> float: ...

    def wait_until(self, at_s: float) -> None:
        """Return when it is so late, at once if it is later."""


class WallClock:
    """Seconds that pass by themselves; only differences mean anything."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class VirtualClock:
    """Seconds that pass only on demand.

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

    def wait_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)
