"""A device that takes time but computes nothing: passes and copies on a virtual clock, for tests of policies.

A pass takes constant + per_token · positions + per_read · KV positions read. Copies run beside the passes, one after
the other, each block_s per block. Answers have the length that `ends_after` says, which the scheduler does not know.
What they say is up to `text`; draft tokens are compared with it. With a depth above 1 the host plans ahead, and takes
host_s for each plan and each commit.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
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
    jitter: float = 0.0  # by which share a pass may take longer or shorter, at random
    curve: tuple[tuple[int, float], ...] = ()  # (positions, seconds) of some passes, instead of constant_s and token_s
    first_s: float = 0.0  # what the first two passes of each size with drafts take besides; such a pass is cold

    def of(self, positions: int) -> float:
        """Of a pass, without what it reads."""
        if not self.curve:
            return self.constant_s + self.token_s * positions
        at, seconds = zip(*self.curve, strict=True)
        return float(np.interp(positions, at, seconds))


@dataclass
class Seen:
    """What became of one request."""

    arrived_s: float
    token_s: list[float] = field(default_factory=list)
    reason: Reason | None = None
    refused: str = ""
    kind: str = ""  # of the error that it ended with

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s if self.token_s else math.inf

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class Sim:
    """One scheduler, its device and their clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: Costs | None = None,
        check: bool = False,
        depth: int = 1,
        host_s: float = 0.0,
        text: Callable[[int, int], int] = lambda seed, position: 1,
        coin: Callable[[int, int], bool] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.costs = costs or Costs()
        self.check = check
        self.depth = depth
        self.host_s = host_s
        self.text = text
        self.coin = coin  # whether the draft token of a seed and position is right, whatever it says
        self._sizes: Counter[tuple[int, int]] = Counter()  # passes with drafts by (rows, positions)
        self._free_s = 0.0  # when the device has done all passes
        self._passes: deque[tuple[float, StepResult]] = deque()  # (when it is done, what will have come of it)
        self._seeds: dict[int, int] = {}  # row → its request's seed
        self._random = random.Random(0)
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
            while len(self._passes) < self.depth:
                plan = self.scheduler.plan(self.now_s)
                if plan is None:
                    break
                self.now_s += self.host_s
                self._begin(plan)
            if self._passes:
                self._finish()
            else:
                wake_s = self.scheduler.wake_s(self.now_s)
                known = [at_s for at_s in (wake_s, coming[-1][0] if coming else None) if at_s is not None]
                self._note(self.scheduler.take_events(self.now_s))
                if not known:
                    assert self.scheduler.idle, "requests wait and nothing can be planned"
                    break
                self.now_s = max(self.now_s, min(known))
        return self

    def submit(self, request: Request, at_s: float) -> None:
        self.seen[request.id] = Seen(at_s)
        try:
            self.scheduler.submit(request, at_s)
        except ShoalError as error:
            self.seen[request.id].refused = type(error).__name__

    def _begin(self, plan: StepPlan) -> None:
        costs = self.costs
        begun_s = max(self.now_s, self._free_s)
        for start in plan.starting:
            self._ends[start.row] = start.ends_at
            self._seeds[start.row] = start.seed
        for order in plan.copies:
            took_s = len(order.source) * (costs.out_s if order.direction == "out" else costs.in_s)
            self._copier_free_s = max(self._copier_free_s, begun_s) + took_s
            self._copies.append((self._copier_free_s, order.id, took_s))
        busy_s, cold = 0.0, False
        if len(plan.rows):
            read = int((plan.starts + plan.counts).sum())
            pairs = int((plan.counts * (plan.starts + plan.counts)).sum())
            busy_s = costs.of(len(plan.tokens)) + costs.read_s * read + costs.pair_s * pairs
            busy_s *= 1 + self._random.uniform(-costs.jitter, costs.jitter)
            if (plan.draws > 1).any():
                size = (len(plan.rows), len(plan.tokens))
                self._sizes[size] += 1
                cold = costs.first_s > 0 and self._sizes[size] <= 2
                busy_s += costs.first_s * cold
            self._free_s = begun_s + busy_s
        else:
            self._free_s = max([begun_s, *(done_s for done_s, _, _ in self._copies)])
        done = [copy for copy in self._copies if copy[0] <= self._free_s]
        self._copies = [copy for copy in self._copies if copy[0] > self._free_s]
        drawn = self._draw(plan)
        chosen = plan.draws > 0
        result = StepResult(
            plan.step,
            plan.rows[chosen],
            plan.generations[chosen],
            np.array([len(tokens) for tokens in drawn], dtype=np.int64),
            np.array([token for tokens in drawn for token in tokens], dtype=np.int64),
            copies_done=tuple((number, took_s) for _, number, took_s in done),
            busy_s=busy_s,
            cold=cold,
        )
        self._passes.append((self._free_s, result))

    def _draw(self, plan: StepPlan) -> list[list[int]]:
        """The tokens of each row that draws: its text, up to the first that the draft does not have."""
        drawn: list[list[int]] = []
        rows = zip(plan.rows, plan.starts, plan.counts, plan.draws, np.cumsum(plan.counts), strict=True)
        for row, start, count, draws, end in (map(int, one) for one in rows):
            tokens: list[int] = []
            for place in range(draws):
                position = start + count - draws + place + 1
                last = self._ends[row] == position
                draft = int(plan.tokens[end - draws + place + 1]) if place + 1 < draws else None
                drawn_here = self.text(self._seeds[row], position)
                if draft is not None and self.coin is not None and self.coin(self._seeds[row], position):
                    drawn_here = draft
                tokens.append(SCRIPTED_END if last else drawn_here)
                if draft != tokens[-1]:
                    break
            if draws:
                drawn.append(tokens)
        return drawn

    def _finish(self) -> None:
        done_s, result = self._passes.popleft()
        self.now_s = max(self.now_s, done_s) + self.host_s
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
            self.seen[end.id].reason, self.seen[end.id].kind = end.reason, end.kind

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
