"""The seams: what the engine asks of the rooms it must not know.

Each port has at least one real implementation and one fake in the tests.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.core.plan import StepPlan, StepResult


class LateMasks(Protocol):
    """Which tokens a grammar allows, known only after the forward pass has begun."""

    rows: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.uint32]  # packed bits, one line per row


class Executor(Protocol):
    """Computes passes, in the order they were handed over, at most a few in flight.

    forward() may change the row tables at once, while earlier passes still compute: so a row must not be started
    again before the last pass that names it has come back. KV blocks are read and written strictly in pass order.
    """

    def forward(self, plan: StepPlan) -> None:
        """Begin a pass; returns as soon as it can."""

    def sample(self, masks: LateMasks | None) -> None:
        """Choose the tokens of the pass just begun."""

    def result(self) -> StepResult:
        """Wait for the oldest pass not yet taken. Raises what the pass raised."""

    def close(self) -> None:
        """Give everything back; no further calls."""
