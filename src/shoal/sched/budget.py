"""Budget: how many positions one pass may compute.

fixed     --max-num-batched-tokens, always
promise   as many as fit into the tightest inter-token promise of the running requests, by the step-time model; the
          fixed number is the upper bound, and prompts always get a few positions, so that they make progress

Knows the model of passes and promises. Does not know which prompts get the tokens.
"""

import math
from collections.abc import Iterable
from typing import Protocol, Self

from shoal.core.request import Request
from shoal.sched.setup import NoOptions, Setup
from shoal.sched.steptime import StepModel

LEAST = 16  # positions of prompts in a pass, however tight the promise
SAFETY = 0.9  # of the promise: passes differ by chance; how wrong the model was of late comes on top
GROWTH = 2  # a pass is at most so many times larger than the largest before


class Budget(Protocol):
    """The size of a pass."""

    learns: bool  # it needs to know how long passes take

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def prompt_tokens(self, running: Iterable[Request], decodes: int, most: int) -> int:
        """Positions for prompts beside so many decodes, when at most `most` more fit into the pass."""

    def draft_tokens(self, running: Iterable[Request], positions: int, most: int) -> int:
        """Positions for drafts in a pass of so many others, when at most `most` more fit into it."""


class Fixed(NoOptions):
    """All that fits."""

    learns = False

    def prompt_tokens(self, running: Iterable[Request], decodes: int, most: int) -> int:
        return most

    def draft_tokens(self, running: Iterable[Request], positions: int, most: int) -> int:
        return most


class PromiseBudget:
    """The largest pass that still meets the tightest inter-token promise."""

    learns = True

    def __init__(self, steps: StepModel) -> None:
        self.steps = steps

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.steps)

    def prompt_tokens(self, running: Iterable[Request], decodes: int, most: int) -> int:
        tightest_s, read = self._tightest(running)
        if tightest_s == math.inf:
            return most
        # the model does not know passes far larger than any before: grow step by step
        most = min(most, max(LEAST, GROWTH * self.steps.largest))
        if not self.steps.known:
            return most
        within_s = SAFETY * tightest_s / self.steps.miss
        return min(most, max(LEAST, self.steps.tokens_within(within_s, read) - decodes))

    def draft_tokens(self, running: Iterable[Request], positions: int, most: int) -> int:
        tightest_s, read = self._tightest(running)
        if tightest_s == math.inf or not self.steps.known:
            return most
        return max(0, min(most, self.steps.tokens_within(SAFETY * tightest_s, read) - positions))

    def _tightest(self, running: Iterable[Request]) -> tuple[float, int]:
        """The shortest time between tokens that a decoding request was promised, and the KV positions that all read."""
        tightest_s, read = math.inf, 0
        for request in running:
            read += request.planned
            if len(request.tokens) > request.prompt_len and request.promise.itl_s < tightest_s:  # it decodes
                tightest_s = request.promise.itl_s
        return tightest_s, read


BUDGET: dict[str, type[Budget]] = {"fixed": Fixed, "promise": PromiseBudget}
