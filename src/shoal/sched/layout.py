"""Layout: in what shape a pass is computed.

ragged   rows end to end, no padding anywhere
padded   a rectangle: every row as wide as the widest, and rows whose request has ended compute on until another
         request takes their place or the batch is over
shrink   a rectangle that loses a row as soon as its request ends
"""

from collections.abc import Sequence
from typing import Protocol


class Layout(Protocol):
    """The shape of a pass."""

    keeps_dead: bool  # rows of ended requests compute on

    def width(self, counts: Sequence[int]) -> int:
        """Columns of the rectangle; 0: there is none."""


class Ragged:
    """No rectangle, no padding."""

    keeps_dead = False

    def width(self, counts: Sequence[int]) -> int:
        return 0


class Padded:
    """Every row as wide as the widest; nobody leaves."""

    keeps_dead = True

    def width(self, counts: Sequence[int]) -> int:
        return max(counts)


class Shrink(Padded):
    """Every row as wide as the widest; whoever ends leaves."""

    keeps_dead = False


LAYOUT: dict[str, type[Layout]] = {"ragged": Ragged, "padded": Padded, "shrink": Shrink}
