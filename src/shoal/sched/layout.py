"""Layout: in what shape a pass is computed.

ragged   rows end to end, no padding anywhere
"""

from typing import Protocol


class Layout(Protocol):
    """The shape of a pass."""

    def padding(self, counts: list[int]) -> int:
        """Positions computed for nobody, given how many each row computes."""


class Ragged:
    """No rectangle, no padding."""

    def padding(self, counts: list[int]) -> int:
        return 0


LAYOUT: dict[str, type[Layout]] = {"ragged": Ragged}
