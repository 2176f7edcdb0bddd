"""An executor whose passes take a given time at least, so that answers last long enough on the fastest machine.

The engine's process loads it through its debugging hook; _TEST_PASS_S is the time. Wraps any executor.
"""

import os
import time
from pathlib import Path

from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.processes.hooks import EXECUTOR_WRAPPER

VARIABLE = "_TEST_PASS_S"


class Slow:
    """Hands every pass to the inner executor, and its result over no earlier than `pass_s` after the last one."""

    def __init__(self, inner: Executor, pass_s: float) -> None:
        self.inner = inner
        self.pass_s = pass_s

    def forward(self, plan: StepPlan) -> None:
        self.inner.forward(plan)

    def sample(self, masks: LateMasks | None) -> None:
        self.inner.sample(masks)

    def result(self) -> StepResult:
        time.sleep(self.pass_s)
        return self.inner.result()

    def close(self) -> None:
        self.inner.close()


def slow(executor: Executor) -> Executor:
    """What the engine's process calls."""
    return Slow(executor, float(os.environ[VARIABLE]))


def slow_env(pass_s: float) -> dict[str, str]:
    """Environment variables for a server whose passes take so long at least."""
    return {
        EXECUTOR_WRAPPER: f"{__name__}:{slow.__name__}",
        VARIABLE: str(pass_s),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
