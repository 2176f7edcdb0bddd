"""Layout: in what shape a pass is computed.

ragged   rows end to end, no padding
padded   a rectangle: every row as wide as the widest, and a row whose request has ended is computed on until another
         request takes it or the batch is over
shrink   a rectangle that loses a row as soon as its request ends

Owns the number of dead rows, which are padding. Knows counts, not requests.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from shoal.sched.setup import NoOptions, Setup


class Layout(Protocol):
    """The shape of a pass."""

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def width(self, counts: Sequence[int]) -> int:
        """Columns of the rectangle; 0: there is none."""

    def started(self) -> None:
        """A request has started."""

    def ended(self, running: int) -> None:
        """A running request has ended; so many still run."""

    def dead_rows(self, paused: int) -> int:
        """Rows of padding in a pass that decodes, when so many running requests are not in it."""


class Ragged(NoOptions):
    """No rectangle, no padding."""

    def width(self, counts: Sequence[int]) -> int:
        return 0

    def started(self) -> None:
        pass

    def ended(self, running: int) -> None:
        pass

    def dead_rows(self, paused: int) -> int:
        return 0


class Shrink(Ragged):
    """Every row as wide as the widest; a row leaves with its request."""

    def width(self, counts: Sequence[int]) -> int:
        return max(counts)


class Padded(Shrink):
    """Every row as wide as the widest; rows stay until the batch is over or another request takes them."""

    def __init__(self) -> None:
        self._dead = 0  # rows whose request has ended

    def started(self) -> None:
        self._dead = max(0, self._dead - 1)  # it takes a dead row

    def ended(self, running: int) -> None:
        self._dead = self._dead + 1 if running else 0

    def dead_rows(self, paused: int) -> int:
        return self._dead + paused


LAYOUT: dict[str, type[Layout]] = {"ragged": Ragged, "padded": Padded, "shrink": Shrink}
