"""Drafts that a model computes: whether they pay, for which requests and how many tokens each.

Other drafters cost the host next to nothing, so they are asked first and their drafts are judged afterwards. A draft
model takes passes of its own. So it is asked only if the pass is expected to yield more tokens per second with it:

    tokens    rows + what so many draft tokens gain, by the share of them that was accepted so far
    seconds   the pass with so many positions more + the passes of the draft model, by what they took so far

Where that is less than without, it is not asked; except now and then, for the shortest request and within a small share
of the time, since texts change. A request that it knows little of (a long prompt, or one that comes back) is a case of
its own: it must first compute that, which must be worth it for the tokens that the request is likely to get.

Drafts that stay on the device are taken as they are: how many tokens they have was decided before they were computed.
What they took is known when their passes have come back (`settle`).

Owns the shares and the times. Knows no drafter but its port, no blocks, no torch and no clock.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from shoal.core.drafts import Draft, ModelDrafter
from shoal.core.request import Request
from shoal.sched.decodetime import DecodeTimes
from shoal.sched.steptime import StepModel

SIZES = (1, 2, 3, 4, 6, 8, 11, 15)  # draft tokens of a row that are considered
FIRST = 4  # … before anything is known
MARGIN = 0.02  # by which a pass must be better with drafts than without
SHARE = 0.005  # of the time: what asking may cost where it does not pay
MOST_CREDIT = 50  # passes' time that may be saved up for that
PROBE = 3  # tokens that are asked for then
NEAR = 32  # positions that are computed without a second thought
LIKELY = 32  # tokens that a request is expected to get, besides as many as it has got so far
FIRST_RATE, FIRST_STRENGTH = 0.7, 6.0  # share of draft tokens accepted, before any was, and tokens that counts for
OWN_STRENGTH = 6.0  # tokens that the share of all requests counts for in that of one
OWN_MEMORY = 0.97  # what is left of a request's past after one token
MEMORY = 400  # tokens of all requests that are remembered, about
REST = 16  # passes that are not waited for after one was in vain


class Costs(Protocol):
    """What a pass takes (speculation.PassCosts)."""

    rows: int
    base_s: float
    token_s: float

    @property
    def known(self) -> bool: ...
    def rate(self, tokens: int, gained: float, more_s: float = 0.0) -> float: ...


class Share:
    """How many of the draft tokens that were tried were right, of late."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0


class NoModelDrafts:
    """There is no draft model."""

    names: Sequence[str] = ()
    asked = False
    spent_s = 0.0

    def choose(self, candidates: Mapping[Request, int], costs: Costs, room: int) -> Mapping[Request, int]:
        return {}

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        return {}

    def settle(self) -> None:
        pass

    def worth_waiting(self, requests: Iterable[Request], costs: Costs, most: int) -> bool:
        return False

    def in_vain(self) -> None:
        pass

    def learn(self, request: Request, draft: Draft, right: int, known: int) -> None:
        pass

    def committed(self) -> None:
        pass

    def rehearsed(self, positions: int, seconds: float) -> None:
        pass

    def ended(self, request: Request, by_itself: bool) -> None:
        pass


class ModelDrafts(NoModelDrafts):
    """Asks a draft model where that pays."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.names = drafter.names
        self.asked = False  # for the pass that comes back next
        self.spent_s = 0.0  # … and what the draft model took for it, as far as that is known
        self.steps = StepModel()
        self.times = DecodeTimes(self.steps)
        self._drafter = drafter
        self._all = Share()
        self._own: dict[Request, Share] = {}
        self._read = 0  # KV positions that its last pass read
        self._credit_s = 0.0
        self._rest = 0  # passes that are not waited for

    # ---- what is asked for ----------------------------------------------------------------------------------------

    def choose(self, candidates: Mapping[Request, int], costs: Costs, room: int) -> Mapping[Request, int]:
        """The requests to ask for, and how many tokens each; candidates: the most that each can use."""
        if not candidates or len(candidates) > room:
            return {}
        most = max(candidates.values())
        if not (costs.known and self.times.known):
            near = [request for request in candidates if self._drafter.behind(request) < math.inf]
            return {request: min(candidates[request], FIRST) for request in near}
        count = len(candidates)
        if not self._best(count, 1.0, costs, most, room)[0]:
            return {}  # not even if all were right
        size, saved_s = self._best(count, self._mean(candidates), costs, most, room)
        chosen = [request for request in candidates if size and self._worth(request, size, saved_s / count)]
        if chosen:
            return {request: min(candidates[request], size) for request in chosen}
        return self._probe(candidates, costs)

    def worth_waiting(self, requests: Iterable[Request], costs: Costs, most: int) -> bool:
        """Whether the next pass is likely to be better if the passes in flight are waited for: only then are the
        tokens known that a draft continues."""
        if self._rest:
            self._rest -= 1
            return False
        found = list(requests)
        if not found or not costs.known or not self.times.known:
            return bool(found)
        count, room = len(found), len(found) * most
        if not self._best(count, 1.0, costs, most, room)[0]:
            return False
        size, saved_s = self._best(count, self._mean(found), costs, most, room)
        return size > 0 and any(self._worth(request, size, saved_s / count) for request in found)

    def in_vain(self) -> None:
        """A pass was waited for, and then there was nothing to compute."""
        self._rest = REST

    def _best(self, count: int, rate: float, costs: Costs, most: int, room: int) -> tuple[int, float]:
        """The draft tokens of each of so many rows that yield most tokens per second, and the seconds that they save in
        a pass; 0 if there are more without."""
        best, highest, saved_s, gained = 0, 1 + MARGIN, 0.0, 0.0
        step_s, before = self.times.seconds(count, self._read), 0
        for size in SIZES:
            if size > most or size * count > room:
                break
            gained += sum(rate**place for place in range(before + 1, size + 1))
            before = size
            found = costs.rate(size * count, gained * count, step_s * size)
            if found > highest:
                best, highest = size, found
                saved_s = (costs.rows + gained * count) * costs.token_s * (1 - 1 / found)
        return best, saved_s

    def _worth(self, request: Request, size: int, saved_s: float) -> bool:
        """Whether what it has to compute first is worth it, for drafts of `size` that save so much in each pass."""
        behind = self._drafter.behind(request)
        if behind <= NEAR or behind == math.inf:
            return behind <= NEAR
        likely = min(request.end - request.planned, LIKELY + request.outputs)
        gained = sum(self._rate(request) ** place for place in range(1, size + 1))
        first_s = self.times.seconds(int(behind), self._read) - self.times.seconds(1, self._read)
        return first_s < saved_s * likely / (1 + gained)

    def _probe(self, candidates: Mapping[Request, int], costs: Costs) -> Mapping[Request, int]:
        """One request, if its turn has come; the shortest, which costs least."""
        self._credit_s = min(self._credit_s + SHARE * costs.base_s, MOST_CREDIT * costs.base_s)
        step_s = self.times.seconds(1, self._read)
        if self._credit_s < PROBE * step_s:
            return {}
        request = min(candidates, key=lambda one: len(one.tokens))
        behind = self._drafter.behind(request)
        if behind == math.inf:
            return {}
        cost_s = self.times.seconds(int(behind), self._read) + PROBE * step_s
        if self._credit_s < cost_s:
            return {}
        self._credit_s -= cost_s
        return {request: min(candidates[request], PROBE)}

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """Ask it, and learn how long it takes."""
        drafts = self._drafter.propose(wanted)
        self.asked = True
        self._learn_times()
        return drafts

    def settle(self) -> None:
        """Wait for its passes, and learn how long they took. Those of drafts on the device come back before the pass
        that verifies the drafts does."""
        self._drafter.settle()
        self._learn_times()

    def _learn_times(self) -> None:
        for positions, read, seconds in self._drafter.passes:
            self.steps.learn(positions, read, seconds)
            self.times.learn(positions, read, seconds)
            self.spent_s += seconds
            self._read = read

    def committed(self) -> None:
        """The pass for which it was asked has come back."""
        self.asked, self.spent_s = False, 0.0

    def rehearsed(self, positions: int, seconds: float) -> None:
        self.times.rehearse(positions, seconds)

    # ---- what came of it ------------------------------------------------------------------------------------------

    def learn(self, request: Request, draft: Draft, right: int, known: int) -> None:
        """So many of its first tokens were right. The one after them was wrong, if that many are known at all."""
        counts = [count for name, count in draft.drafters if name in self.names]
        if not counts:
            return
        own = self._own.setdefault(request, Share())
        tried = min(right + 1, known, len(draft.tokens))
        for place in range(tried):
            own.right = OWN_MEMORY * own.right + (place < right)
            own.tried = OWN_MEMORY * own.tried + 1
        self._all.right += min(right, tried)
        self._all.tried += tried
        if self._all.tried > MEMORY:
            self._all.right /= 2
            self._all.tried /= 2

    def ended(self, request: Request, by_itself: bool) -> None:
        self._own.pop(request, None)
        self._drafter.ended(request, by_itself)

    def _rate(self, request: Request) -> float:
        """The share of its draft tokens that is accepted, if all before them are."""
        common = (self._all.right + FIRST_STRENGTH * FIRST_RATE) / (self._all.tried + FIRST_STRENGTH)
        own = self._own.get(request)
        return common if own is None else (own.right + OWN_STRENGTH * common) / (own.tried + OWN_STRENGTH)

    def _mean(self, requests: Iterable[Request]) -> float:
        rates = [self._rate(request) for request in requests]
        return sum(rates) / len(rates)
