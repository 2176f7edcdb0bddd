"""Drafts: what the scheduler asks about tokens that are guessed and verified. And the answer without any.

The policy with drafts is in speculation.py. Knows requests and passes; decides nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.core.drafts import Draft, Drafter, NoDrafter
from shoal.core.request import Request
from shoal.sched.flight import Flight
from shoal.sched.pass_builder import PassBuilder


class DraftPolicy(Protocol):
    """How many draft tokens of which requests a pass verifies."""

    on: bool
    drafter: Drafter
    names: Sequence[str]  # of all drafters

    def started(self, request: Request) -> None:
        """It got a row."""

    def stopped(self, request: Request) -> None:
        """It has none any more; it may get one again."""

    def ended(self, request: Request, by_itself: bool) -> None:
        """It has ended."""

    def waits(self, flights: Sequence[Flight]) -> bool:
        """Whether nothing is to be planned before the oldest of these passes has come back."""

    def choose(self, batch: PassBuilder, flights: Sequence[Flight], room: int) -> Mapping[Request, Draft]:
        """Drafts for decoding requests of this pass, of at most `room` tokens in all."""

    def meanwhile(self) -> None:
        """Passes compute, and the next to come back is about to be waited for: do what can be done before."""

    def committed(
        self, flight: Flight, accepted: Mapping[Request, int], tokens: int, busy_s: float, now_s: float, more: bool
    ) -> None:
        """A pass has come back: how many draft tokens of each request were accepted, how many tokens all requests got,
        how long the device took (0: that is not known); and whether requests are still running."""

    def rehearsed(self, positions: int, seconds: float, of_draft: bool = False) -> None:
        """Before there were requests, a pass of so many positions, of the model or of its draft model, took so long."""

    def counts(self, request: Request) -> tuple[int, int]:
        """Its draft tokens that were verified so far, and of those accepted."""

    def check(self, running: Mapping[Request, None]) -> None:
        """It knows these requests, and no others as running."""


class NoDrafts:
    """One token per row and pass."""

    on = False
    drafter: Drafter = NoDrafter()
    names: Sequence[str] = ()

    def started(self, request: Request) -> None:
        pass

    def stopped(self, request: Request) -> None:
        pass

    def ended(self, request: Request, by_itself: bool) -> None:
        pass

    def waits(self, flights: Sequence[Flight]) -> bool:
        return False

    def choose(self, batch: PassBuilder, flights: Sequence[Flight], room: int) -> Mapping[Request, Draft]:
        return {}

    def meanwhile(self) -> None:
        pass

    def committed(
        self, flight: Flight, accepted: Mapping[Request, int], tokens: int, busy_s: float, now_s: float, more: bool
    ) -> None:
        pass

    def rehearsed(self, positions: int, seconds: float, of_draft: bool = False) -> None:
        pass

    def counts(self, request: Request) -> tuple[int, int]:
        return 0, 0

    def check(self, running: Mapping[Request, None]) -> None:
        pass
