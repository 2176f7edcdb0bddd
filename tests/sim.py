"""A device that takes time but computes nothing: passes and copies on a virtual clock, for tests of policies.

A pass takes constant + per_token · positions + per_read · KV positions read. Copies run beside the passes, one after
the other, each block_s per block. Answers have the length that `ends_after` says, which the scheduler does not know.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.plan import SCRIPTED_END, StepPlan, StepResult
from shoal.core.request import Reason, Request
from shoal.errors import ShoalError
from shoal.sched.scheduler import Scheduler


@dataclass
class Costs:
    constant_s: float = 0.010
    token_s: float = 0.0005
    read_s: float = 0.0
    pair_s: float = 0.0  # of one position looking back at one other: what no linear model of a pass knows
    out_s: float = 0.0001  # of one block
    in_s: float = 0.0001


@dataclass
class Seen:
    """What became of one request."""

    arrived_s: float
    token_s: list[float] = field(default_factory=list)
    reason: Reason | None = None
    refused: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s if self.token_s else math.inf

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class Sim:
    """One scheduler, its device and their clock. One pass at a time."""

    def __init__(self, scheduler: Scheduler, costs: Costs | None = None, check: bool = False) -> None:
        self.scheduler = scheduler
        self.costs = costs or Costs()
        self.check = check
        self.now_s = 0.0
        self.seen: dict[str, Seen] = {}
        self.records: list[PassEvents] = []
        self._ends: dict[int, int] = {}  # row → position of its last token
        self._copies: list[tuple[float, int, float]] = []  # (done at, id, seconds)
        self._copier_free_s = 0.0

    def run(self, arrivals: Iterable[tuple[float, Request]]) -> "Sim":
        """To the end of all that come: (when, who), in order of time."""
        coming = list(arrivals)[::-1]
        while coming or not self.scheduler.idle:
            while coming and coming[-1][0] <= self.now_s:
                at_s, request = coming.pop()
                self.submit(request, at_s)
            plan = self.scheduler.plan(self.now_s)
            if plan is None:
                wake_s = self.scheduler.wake_s(self.now_s)
                known = [at_s for at_s in (wake_s, coming[-1][0] if coming else None) if at_s is not None]
                self._note(self.scheduler.take_events(self.now_s))
                if not known:
                    assert self.scheduler.idle, "requests wait and nothing can be planned"
                    break
                self.now_s = max(self.now_s, min(known))
                continue
            self._compute(plan)
        return self

    def submit(self, request: Request, at_s: float) -> None:
        self.seen[request.id] = Seen(at_s)
        try:
            self.scheduler.submit(request, at_s)
        except ShoalError as error:
            self.seen[request.id].refused = type(error).__name__

    def _compute(self, plan: StepPlan) -> None:
        costs = self.costs
        for start in plan.starting:
            self._ends[start.row] = start.ends_at
        for order in plan.copies:
            took_s = len(order.source) * (costs.out_s if order.direction == "out" else costs.in_s)
            self._copier_free_s = max(self._copier_free_s, self.now_s) + took_s
            self._copies.append((self._copier_free_s, order.id, took_s))
        busy_s = 0.0
        if len(plan.rows):
            read = int((plan.starts + plan.counts).sum())
            pairs = int((plan.counts * (plan.starts + plan.counts)).sum())
            busy_s = costs.constant_s + costs.token_s * len(plan.tokens) + costs.read_s * read + costs.pair_s * pairs
            self.now_s += busy_s
        else:
            self.now_s = max([self.now_s, *(done_s for done_s, _, _ in self._copies)])
        done = [copy for copy in self._copies if copy[0] <= self.now_s]
        self._copies = [copy for copy in self._copies if copy[0] > self.now_s]
        chosen = plan.draws > 0
        rows = plan.rows[chosen]
        ends = (plan.starts + plan.counts)[chosen]
        tokens = [
            SCRIPTED_END if self._ends[row] == end else 1 for row, end in zip(rows.tolist(), ends.tolist(), strict=True)
        ]
        result = StepResult(
            plan.step,
            rows,
            plan.generations[chosen],
            np.ones_like(rows),
            np.array(tokens, dtype=np.int64),
            copies_done=tuple((number, took_s) for _, number, took_s in done),
            busy_s=busy_s,
        )
        self._note(self.scheduler.commit(result, self.now_s))
        if self.check:
            self.scheduler.check()

    def _note(self, events: PassEvents) -> None:
        self.records.append(events)
        for id in events.owners:
            self.seen[id].token_s.append(self.now_s)
        for one in events.rejected:
            self.seen[one.id].refused = one.kind
        for end in events.finished:
            self.seen[end.id].reason = end.reason

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def computed(self) -> int:
        return sum(one.computed_tokens for one in self.records)

    @property
    def recomputed_share(self) -> float:
        return sum(one.recomputed_tokens for one in self.records) / self.computed

    @property
    def preemptions(self) -> int:
        return sum(len(one.preempted) for one in self.records)

    @property
    def peak_blocks(self) -> int:
        return max(one.blocks_held for one in self.records)

    def quantile(self, values: Iterable[float], q: float) -> float:
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def scripted(id: str, prompt: int | list[int], output: int, max_tokens: int = 0, **more: object) -> Request:
    """A request whose answer has `output` tokens, which only the device knows."""
    tokens = [2 + (hash_of(id) + place * 7) % 40 for place in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens or output, temperature=0.0)
    return Request(id, tokens, params, stop_ids=frozenset({SCRIPTED_END}), ends_after=output, **more)  # type: ignore[arg-type]


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text))
