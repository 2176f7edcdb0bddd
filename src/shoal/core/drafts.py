"""Drafts: tokens that are guessed, and verified several in one pass (core/plan.py). And the port of what guesses them.

A drafter says what may come next and how sure it is. It does not know what a pass costs: how many of its tokens are
verified is decided elsewhere (sched/speculation.py).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from shoal.core.plan import DRAFTED
from shoal.core.request import Request


class Draft(NamedTuple):
    """Tokens that may follow a request's last one.

    >>> Draft([5, 6, 7], [0.9, 0.9, 0.5], (("grammar", 2), ("suffix", 1))).cut(2)
    Draft(tokens=[5, 6], confidence=[0.9, 0.9], drafters=(('grammar', 2),))
    """

    tokens: Sequence[int]
    confidence: Sequence[float]  # of each: how likely it is right if all before it are
    drafters: Sequence[tuple[str, int]]  # the drafters that proposed them, and how many each, in order

    @property
    def on_device(self) -> bool:
        """Whether its tokens are on the device: DRAFTED, DRAFTED - 1, … stand for them, and how sure the drafter is of
        each is not known."""
        return bool(self.tokens) and self.tokens[0] == DRAFTED

    def cut(self, most: int) -> "Draft":
        """Its first tokens."""
        if most >= len(self.tokens):
            return self
        shares, left = [], most
        for name, count in self.drafters:
            if left > 0:
                shares.append((name, min(count, left)))
                left -= count
        return Draft(self.tokens[:most], self.confidence[:most], tuple(shares))

    def shares(self, accepted: int) -> list[tuple[str, int, int]]:
        """(drafter, tokens, how many of them are among the first `accepted`)."""
        found = []
        for name, count in self.drafters:
            found.append((name, count, min(count, accepted)))
            accepted = max(0, accepted - count)
        return found


class Drafter(Protocol):
    """Guesses what decoding requests will generate next. One object for all requests of an engine."""

    ahead: bool  # it also proposes while tokens of a request are on their way: its drafts continue those
    by_chance: bool  # its drafts are accepted by chance: what a request generates says nothing of them
    names: Sequence[str]  # of the drafters that its drafts name

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """Drafts for some of these requests, of at most so many tokens each. One call for all requests of a pass, so
        that a drafter which computes can compute them together.

        Without `ahead` a draft continues the request's committed tokens, whether or not others are on their way.
        """

    def cost_s(self, rows: int, tokens: int) -> float:
        """About what it takes to ask it for so many requests, which have got so many tokens since it was last asked."""

    def ended(self, request: Request, by_itself: bool) -> None:
        """A request has ended: by itself, or by an abort, an error or a deadline. Forget it."""


class ModelDrafter(Drafter, Protocol):
    """A drafter that computes its drafts in passes of its own, which take a good part of the time of a pass. So it is
    decided before it is asked whether that pays (sched/modeldrafts.py)."""

    # (positions, KV positions read, seconds) of the passes that came back in the last call of `propose` or `settle`
    passes: Sequence[tuple[int, int, float]]

    def settle(self) -> None:
        """Wait for its passes that are still under way, if there are any: those of drafts that stay on the device."""

    def behind(self, request: Request) -> float:
        """Positions that it has to compute before it can draft for this request: 1 if it has computed all but the last;
        infinity if it never can."""


class NoDrafter:
    """Proposes nothing."""

    ahead = False
    by_chance = False
    names: Sequence[str] = ()

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        return {}

    def cost_s(self, rows: int, tokens: int) -> float:
        return 0.0

    def ended(self, request: Request, by_itself: bool) -> None:
        pass
