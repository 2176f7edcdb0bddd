"""How many engines a deployment should have: a decision about promises, made of the engines' own reports.

    more    when a new request would wait longer than `wait_s` for its first pass, for `up_after_s`
    fewer   when the others could take on an engine's work and stay below `fill`, without a queue, for `down_after_s`

The predicted wait is the work that is queued, in tokens, over the rate at which the engines compute it. It grows as
soon as a burst arrives, long before requests are late. The two conditions leave a gap between them, so that a steady
load moves nothing: engines that are fuller than `fill` are not made fewer, and below it there is no queue. Owns the
decision and what it remembers. Knows no clock, no ray and no sockets; the simulator can run it as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import BadConfig


@dataclass(frozen=True)
class ScaleRules:
    """The bounds and the patience of the decision."""

    least: int = 1  # engines
    most: int = 1
    wait_s: float = 1.0  # predicted waiting time from which on engines are added
    fill: float = 0.7  # share of the places (or KV blocks) in use that the remaining engines may have after a removal
    up_after_s: float = 1.0  # how long the wait must have been too long
    down_after_s: float = 60.0  # how long one engine fewer must have been enough
    up_pause_s: float = 5.0  # after a change, before more are added: what was added must show first
    down_pause_s: float = 30.0  # after a change, before one is removed

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise BadConfig(
                f"min_replicas is {self.least} and max_replicas {self.most}; give 1 or more, and no more than the other"
            )
        if not (self.wait_s > 0 and 0 < self.fill < 1):
            raise BadConfig("the waiting time to scale at must be above 0, and the fill between 0 and 1")
        if min(self.up_after_s, self.down_after_s, self.up_pause_s, self.down_pause_s) < 0:
            raise BadConfig("the times of autoscaling must not be negative")


@dataclass(frozen=True)
class EngineLoad:
    """One engine that is up, as it reported."""

    waiting_tokens: int  # work of requests that wait: prompt tokens to compute and outputs expected
    tokens_per_s: float | None  # computed while it was busy, lately; None: not known yet
    fill: float  # share of its places or of its KV blocks in use, whichever is larger


class Autoscaler:
    """Decides from time to time; time is an argument.

    >>> scaler = Autoscaler(ScaleRules(least=1, most=4, wait_s=2.0, up_after_s=1.0))
    >>> busy = EngineLoad(waiting_tokens=5000, tokens_per_s=1000.0, fill=1.0)
    >>> [scaler.decide([busy], starting=0, now_s=now) for now in (0.0, 0.5, 1.0)]  # 5 s of work for one, 2 s wanted
    [1, 1, 3]
    """

    def __init__(self, rules: ScaleRules) -> None:
        self.rules = rules
        self.wanted = rules.least
        self._short_since_s: float | None = None
        self._idle_since_s: float | None = None
        self._changed_s = -math.inf

    def decide(self, loads: Sequence[EngineLoad], starting: int, now_s: float) -> int:
        """How many engines there should be. `loads`: of those that are up; `starting`: how many are on their way."""
        rules = self.rules
        needed = self._needed(loads)
        self._short_since_s = _since(needed > self.wanted, self._short_since_s, now_s)
        self._idle_since_s = _since(self._one_is_spare(loads, starting), self._idle_since_s, now_s)
        since_change_s = now_s - self._changed_s
        if _lasted(self._short_since_s, rules.up_after_s, now_s) and since_change_s >= rules.up_pause_s:
            self._change(needed, now_s)
        elif _lasted(self._idle_since_s, rules.down_after_s, now_s) and since_change_s >= rules.down_pause_s:
            self._change(self.wanted - 1, now_s)
        return self.wanted

    def predicted_wait_s(self, loads: Sequence[EngineLoad]) -> float:
        """How long a new request would wait; 0 where no rate is known yet."""
        rates = [one.tokens_per_s for one in loads if one.tokens_per_s]
        if not rates:
            return 0.0
        return sum(one.waiting_tokens for one in loads) / (sum(rates) / len(rates) * len(loads))

    def _needed(self, loads: Sequence[EngineLoad]) -> int:
        """So many that the predicted wait is kept; no fewer than are wanted now."""
        wait_s = self.predicted_wait_s(loads)
        if wait_s <= self.rules.wait_s:
            return self.wanted
        needed = min(wait_s / self.rules.wait_s * len(loads), self.rules.most)  # the rate grows with their number
        return max(self.wanted, math.ceil(needed))

    def _one_is_spare(self, loads: Sequence[EngineLoad], starting: int) -> bool:
        """Whether one engine fewer would do: there is no queue, and what is in use fits into the others."""
        if self.wanted <= self.rules.least or starting or len(loads) < self.wanted:
            return False  # engines that are not up yet must first show what they can do
        if any(one.waiting_tokens for one in loads):
            return False
        return sum(one.fill for one in loads) <= self.rules.fill * (len(loads) - 1)

    def _change(self, wanted: int, now_s: float) -> None:
        self.wanted = min(max(wanted, self.rules.least), self.rules.most)
        self._changed_s = now_s
        self._short_since_s = self._idle_since_s = None


def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    """When it began to hold; None if it does not."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _lasted(since_s: float | None, least_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= least_s
