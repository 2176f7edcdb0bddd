"""The routing policies: which engine gets a job.

    round-robin  one after the other
    least-load   the one with the least work queued, in tokens: prompt tokens not computed yet and expected outputs
    prefix       the one where the job ends soonest: least work queued plus what it has to compute of the prompt there

`prefix` weighs both in tokens. A missing token counts MISS times: it is computed before the job's first token, and its
block takes the place of another that will be missed later. So jobs go to the engine that holds their prefix until it is
busier than another by more than a new copy of the prefix costs; then that one gets a copy, too. Knows one job and the
engines that are up; keeps no state but whose turn it is.
"""

from collections.abc import Sequence
from typing import Protocol

from shoal.routing.engines import RoutedEngine
from shoal.routing.work import Work


class RoutingPolicy(Protocol):
    """Chooses among engines that are up; there is at least one."""

    uses_names: bool  # whether it needs the engines' prefix caches

    def choose(self, work: Work, engines: Sequence[RoutedEngine]) -> RoutedEngine: ...


class RoundRobin:
    """By turns, whatever they do."""

    uses_names = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, work: Work, engines: Sequence[RoutedEngine]) -> RoutedEngine:
        numbers = sorted(one.number for one in engines)
        self._last = next((number for number in numbers if number > self._last), numbers[0])
        return next(one for one in engines if one.number == self._last)


class LeastLoad:
    """The least work queued; of equals, the one that got the fewest jobs so far."""

    uses_names = False

    def choose(self, work: Work, engines: Sequence[RoutedEngine]) -> RoutedEngine:
        return min(engines, key=lambda one: (one.load, one.placed, one.number))


class LongestPrefix:
    """The longest prefix, weighed against load."""

    uses_names = True
    MISS = 3.0  # cost of a missing token, in tokens of load

    def choose(self, work: Work, engines: Sequence[RoutedEngine]) -> RoutedEngine:
        def cost(one: RoutedEngine) -> float:
            return one.load + self.MISS * (work.tokens - one.hits(work.names) * one.block_size)

        return min(engines, key=lambda one: (cost(one), one.load, one.placed, one.number))


ROUTING: dict[str, type[RoundRobin] | type[LeastLoad] | type[LongestPrefix]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix": LongestPrefix,
}
