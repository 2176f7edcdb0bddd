"""Whole engines with drafts, whose decisions do not depend on the speed of this machine; and what came of the drafts.

The policy weighs drafts by how long passes take. For a tiny model that is mostly the host's time, and on a busy machine
anything. An executor whose passes take no measured time leaves the policy with its first estimate: drafts that have a
fair chance are verified. Used in this process, and by a server's engine through its debugging hook.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal import LLM
from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.processes.hooks import EXECUTOR_WRAPPER


class Untimed:
    """Hands every pass to the inner executor, and tells nothing of how long it took."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner

    def forward(self, plan: StepPlan) -> None:
        self.inner.forward(plan)

    def sample(self, masks: LateMasks | None) -> None:
        self.inner.sample(masks)

    def result(self) -> StepResult:
        return self.inner.result()._replace(busy_s=0.0)

    def close(self) -> None:
        self.inner.close()


def untimed_env() -> dict[str, str]:
    """Environment variables for a server whose engine has such an executor."""
    return {
        EXECUTOR_WRAPPER: f"{__name__}:{Untimed.__name__}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


class Drafts:
    """Draft tokens so far, by drafter."""

    def __init__(self) -> None:
        self.proposed: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    @property
    def rejected(self) -> int:
        return self.proposed.total() - self.accepted.total()

    def count(self, events: PassEvents) -> None:
        self.proposed.update(events.proposed)
        self.accepted.update(events.accepted)


@contextmanager
def drafting(llm: LLM) -> Iterator[Drafts]:
    """Counts the drafts of an engine, which decides without knowing the time."""
    drafts, loop = Drafts(), llm.loop
    executor, step = loop.executor, loop.step

    def counted(until_s: float | None = None) -> PassEvents:
        events = step(until_s)
        drafts.count(events)
        return events

    loop.executor = Untimed(executor)
    loop.step = counted  # type: ignore[method-assign]
    try:
        yield drafts
    finally:
        loop.executor = executor
        loop.step = step  # type: ignore[method-assign]
