"""Grammar: what the engine asks of a constraint on a request's output. Knows token ids only."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Grammar(Protocol):
    """The state of one sample in its grammar. Lives in the engine's process, one per sample; raises nothing."""

    ended: bool  # the output is complete: no token may follow
    error: str  # why it cannot go on; empty while it can

    def accept(self, token: int) -> bool:
        """The sample generated this token. False: that was not allowed, and it cannot go on."""

    def fill(self, line: npt.NDArray[np.uint32]) -> None:
        """Set the bit of every token that may come next, clear all others (all of them where it cannot go on)."""

    def forced(self) -> Sequence[int]:
        """The tokens that come next where there is no choice, as they are usually spelled; empty where there is one."""

    def allows(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first, may come next, one after the other. End tokens are not counted."""

    def fill_ahead(self, lines: npt.NDArray[np.uint32], tokens: Sequence[int]) -> None:
        """Line i as fill() would set it after the first i of these tokens, for one line more than there are tokens. The
        state stays as it is; a line that cannot be followed is cleared, and so are those after it."""
