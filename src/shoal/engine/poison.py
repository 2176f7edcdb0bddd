"""For tests alone: an executor that breaks when a certain request is in a pass.

Switched on by the environment of the engine's process, `_SHOAL_TEST_POISON=TOKEN:HOW`: a request whose prompt holds
that token makes every pass it is in raise, crash or hang. Knows plans; wraps any executor.
"""

import os
import signal
import time
from collections.abc import Mapping

from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks

VARIABLE = "_SHOAL_TEST_POISON"


class Poisoned:
    """Passes everything on, unless the poison is in it."""

    def __init__(self, inner: Executor, token: int, how: str) -> None:
        self.inner = inner
        self.token = token
        self.how = how
        self._rows: set[int] = set()

    def forward(self, plan: StepPlan) -> None:
        for start in plan.starting:
            self._rows.discard(start.row)
            if self.token in start.tokens[: start.prompt_len]:
                self._rows.add(start.row)
        if self._rows.intersection(plan.rows.tolist()):
            if self.how == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif self.how == "hang":
                time.sleep(1e6)
            raise RuntimeError("a poisoned request was in this pass")
        self.inner.forward(plan)

    def sample(self, masks: LateMasks | None) -> None:
        self.inner.sample(masks)

    def result(self) -> StepResult:
        return self.inner.result()

    def close(self) -> None:
        self.inner.close()


def poisoned(executor: Executor, environ: Mapping[str, str]) -> Executor:
    """The executor itself, unless a test asks for poison."""
    asked = environ.get(VARIABLE)
    if not asked:
        return executor
    token, _, how = asked.partition(":")
    return Poisoned(executor, int(token), how or "raise")
