"""The routing policies: which engine gets a job.

    round-robin  one after the other
    least-load   the one with the least work queued, in tokens: prompt tokens not computed yet and expected outputs
    prefix       the one where the job ends soonest: least work queued plus what it has to compute of the prompt there

`prefix` weighs both in tokens. A missing token counts MISS times: it is computed before the job's first token, and its
block takes the place of another that will be missed later. So jobs go to the engine that holds their prefix until it is
busier than another by more than a new copy of the prefix costs; then that one gets a copy, too. A prefix of more jobs
than one engine's share of them needs several copies anyway: until it has them, a missing token counts HOT_MISS times.
Knows jobs by their work and the engines that are up; remembers whose turn it is and the prefixes of the last jobs.
"""

from collections import Counter, deque
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


class RecentPrefixes:
    """Which share of the last jobs has a prefix.

    >>> recent = RecentPrefixes()
    >>> for _ in range(RecentPrefixes.LEAST):
    ...     recent.note(b"system prompt")
    >>> recent.share(b"system prompt"), recent.share(b"another")
    (1.0, 0.0)
    """

    MOST = 256  # jobs
    LEAST = 32  # with fewer jobs than that, shares are taken of so many: the first ones say little

    def __init__(self) -> None:
        self._last: deque[bytes | None] = deque()
        self._counts: Counter[bytes | None] = Counter()

    def note(self, prefix: bytes | None) -> None:
        """A job has this prefix; None: none that an engine holds."""
        self._last.append(prefix)
        self._counts[prefix] += 1
        if len(self._last) > self.MOST:
            oldest = self._last.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def share(self, prefix: bytes) -> float:
        return self._counts[prefix] / max(len(self._last), self.LEAST)


class LongestPrefix:
    """The longest prefix, weighed against load."""

    uses_names = True
    MISS = 3.0  # cost of a missing token, in tokens of load
    HOT_MISS = 0.5  # … of a prefix that needs more copies; several jobs share that cost

    def __init__(self) -> None:
        self._recent = RecentPrefixes()

    def choose(self, work: Work, engines: Sequence[RoutedEngine]) -> RoutedEngine:
        hits = {one.number: one.hits(work.names) for one in engines}
        most = max(hits.values())
        prefix = work.names[most - 1] if most else None
        self._recent.note(prefix)
        miss = self.MISS
        if prefix is not None:
            copies = sum(found == most for found in hits.values())
            miss = self.HOT_MISS if copies < round(self._recent.share(prefix) * len(engines)) else miss

        def cost(one: RoutedEngine) -> float:
            return one.load + miss * (work.tokens - hits[one.number] * one.block_size)

        return min(engines, key=lambda one: (cost(one), one.load, one.placed, one.number))


ROUTING: dict[str, type[RoundRobin] | type[LeastLoad] | type[LongestPrefix]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix": LongestPrefix,
}
