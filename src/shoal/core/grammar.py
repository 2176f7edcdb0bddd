"""Grammar: what the engine asks of a constraint on a request's output. Knows token ids only."""

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
