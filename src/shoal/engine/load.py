"""How loaded an engine is, for the autoscaler.

Owns the rate: positions computed per second of computing, in which the past fades. Reads the scheduler's tables and
the records of passes. Knows no clock, no sockets and no other engines.
"""

import math
from typing import Any

from shoal.core.events import PassEvents
from shoal.engine.reporter import Reporter, outputs_left
from shoal.sched.scheduler import Scheduler

FADE_S = 20.0  # seconds of computing after which a pass counts a third


class LoadMeter:
    """Watches one engine."""

    def __init__(self, scheduler: Scheduler, reporter: Reporter) -> None:
        self._scheduler = scheduler
        self._reporter = reporter
        self._tokens = self._seconds = 0.0

    def take(self, events: PassEvents) -> None:
        if events.busy_s > 0 and events.computed_tokens:
            kept = math.exp(-events.busy_s / FADE_S)
            self._tokens = kept * self._tokens + events.computed_tokens
            self._seconds = kept * self._seconds + events.busy_s

    def load(self) -> dict[str, Any]:
        """The fields of cluster.autoscale.EngineLoad, and how many requests run and wait."""
        scheduler, expected = self._scheduler, self._reporter.expected_output()
        waiting = list(scheduler.waiting)
        pool = scheduler.kv.pool
        places = len(scheduler.running) / scheduler.limits.max_num_seqs
        return {
            "waiting_tokens": sum(len(one.tokens) + outputs_left(one, expected) for one in waiting),
            "tokens_per_s": self._tokens / self._seconds if self._seconds else None,
            "fill": min(1.0, max(places, pool.held / max(1, pool.total))),
            "running": len(scheduler.running),
            "waiting": len(waiting),
        }
