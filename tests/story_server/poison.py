"""An executor that breaks when a certain request is in a pass.

The engine's process loads it through its debugging hook. A request whose prompt holds the token of
`_TEST_POISON=TOKEN:HOW` makes every pass it is in raise, crash or hang. Knows plans; wraps any executor.
"""

import os
import signal
import time
from pathlib import Path

from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.processes.hooks import EXECUTOR_WRAPPER

VARIABLE = "_TEST_POISON"


class Poisoned:
    """Hands every pass to the inner executor, unless a poisoned request is in it."""

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


def poisoned(executor: Executor) -> Executor:
    """What the engine's process calls."""
    token, _, how = os.environ[VARIABLE].partition(":")
    return Poisoned(executor, int(token), how)


def poison_env(token: int, how: str) -> dict[str, str]:
    """Environment variables for a server whose engine breaks when this token is in a prompt: raise, crash or hang."""
    return {
        EXECUTOR_WRAPPER: f"{__name__}:{poisoned.__name__}",
        VARIABLE: f"{token}:{how}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
