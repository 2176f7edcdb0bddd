"""A device that computes nothing, at a fixed pace: each pass brings every stream one token, a tick after the last.

With it a real scheduler, host and wire (paced_engine.py) drive the real fronts, so that only the way from the engine to
the client is measured. Knows no model.
"""

import json
import time
from collections import deque
from pathlib import Path

import numpy as np

from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks


class PacedExecutor:
    """An Executor whose passes are done at the next tick; its tokens are some letters of the vocabulary."""

    def __init__(self, tick_s: float, tokens: list[int]) -> None:
        self.tick_s = tick_s
        self._tokens = np.array(tokens, dtype=np.int64)
        self._plans: deque[StepPlan] = deque()
        self._next_s = 0.0

    def forward(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def sample(self, masks: LateMasks | None) -> None:
        pass

    def result(self) -> StepResult:
        plan = self._plans.popleft()
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self.tick_s, now_s - self.tick_s)  # late by more than a tick: no catching up
        if self._next_s > now_s:
            time.sleep(self._next_s - now_s)
        drawing = plan.draws > 0
        rows = plan.rows[drawing]
        tokens = self._tokens[(rows + plan.step) % len(self._tokens)]
        return StepResult(plan.step, rows, plan.generations[drawing], np.ones_like(rows), tokens, busy_s=self.tick_s)

    def close(self) -> None:
        pass


class Emissions:
    """An observer that keeps when each token left the scheduler."""

    def __init__(self) -> None:
        self._passes: list[tuple[float, list[str], list[int]]] = []

    def take(self, events: PassEvents) -> None:
        if events.owners:
            self._passes.append((events.committed_s, events.owners, events.indexes))

    def save(self, path: Path) -> None:
        """request id → when its tokens 0, 1, 2, … were there, in seconds of the monotonic clock."""
        found: dict[str, list[float]] = {}
        for at_s, owners, _ in self._passes:
            for owner in owners:
                found.setdefault(owner, []).append(at_s)
        path.write_text(json.dumps(found))
