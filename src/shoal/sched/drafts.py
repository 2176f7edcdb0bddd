"""Drafts: tokens that are guessed and verified, several in one pass.

A drafter proposes tokens that may follow a request's last one; the pass computes them as further positions and accepts
those that its own draws confirm (core/plan.py). Knows requests. Does not know budgets, blocks or passes: the planner
asks last, when all other work of a pass is placed, and takes what fits.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from shoal.core.request import Request


class Drafter(Protocol):
    """Guesses what decoding requests will generate next."""

    def propose(self, requests: Collection[Request], most: int) -> Mapping[Request, Sequence[int]]:
        """Draft tokens for some of these requests, in the order they are to be tried; `most` in all can be used.

        A draft continues the request's tokens, and the `pending` ones after them that are not known yet.
        """


class NoDrafter:
    """One token per row and pass."""

    def propose(self, requests: Collection[Request], most: int) -> Mapping[Request, Sequence[int]]:
        return {}
