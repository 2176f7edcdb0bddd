"""Lanes: long sequences in passes of their own. Headroom: slots that only some requests may take.

A pass takes as long as its longest work, so one giant sequence slows all others in it. With a cap, sequences longer
than that share passes only with each other, and get a set share of the passes while there is work of both kinds. The
cap is for all, or comes from the tiers that are present (premium shares passes only with short ones), whichever is
lower.

Headroom keeps a share of slots and blocks for the highest tier, for short requests if so set, and for requests that the
order policy favours (under `fair`, of tenants that run less than their share). Knows lengths and tiers. Knows neither
blocks nor the order of the queue.
"""

from collections import Counter
from typing import Self

from shoal.core.request import Request
from shoal.core.tiers import Tiers
from shoal.sched.setup import Setup


class Lanes:
    """Which passes are for short sequences, and which for long ones."""

    def __init__(self, longest: int = 0, long_share: float = 0.25, tiers: Tiers | None = None) -> None:
        self.longest = longest  # tokens; 0: no cap but the tiers'
        self.long_share = long_share
        self.on = bool(longest or any(tier.longest for tier in tiers or ()))
        self._present: Counter[int] = Counter()  # caps of tiers → how many of their requests have not ended
        self._credit = 0.0  # long passes owed

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.lane_tokens, setup.config.long_share, setup.tiers)

    def arrived(self, request: Request) -> None:
        if request.promise.longest:
            self._present[request.promise.longest] += 1

    def left(self, request: Request) -> None:
        cap = request.promise.longest
        if cap:
            self._present[cap] -= 1
            if not self._present[cap]:
                del self._present[cap]

    @property
    def cap(self) -> int:
        """Tokens of the longest sequence in the short lane now; 0: there is one lane."""
        return min([cap for cap in (self.longest, *self._present) if cap], default=0)

    def order(self) -> tuple[bool, bool]:
        """Which lane to try first and second; True is the long one."""
        return (True, False) if self._credit >= 1 else (False, True)

    def ran(self, long: bool, other_waits: bool) -> None:
        """A pass of this lane was planned; the other one has work, too, or not."""
        if long:
            self._credit = max(0.0, self._credit - 1)
        elif other_waits:
            self._credit = min(self._credit + self.long_share / max(1e-9, 1 - self.long_share), 1.0 + self.long_share)


class Headroom:
    """What is kept free, and for which requests."""

    def __init__(self, share: float = 0.0, short_tokens: int = 0, tiers: int = 1) -> None:
        self.share = share
        self.short_tokens = short_tokens  # requests of at most so many tokens may use it; 0: length does not matter
        self._tiers = tiers

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.headroom, setup.config.headroom_tokens, len(setup.tiers))

    def may_use(self, request: Request) -> bool:
        highest = self._tiers > 1 and request.promise.rank == 0
        return highest or 0 < len(request.tokens) <= self.short_tokens

    def slots(self, total: int) -> int:
        return min(int(self.share * total + 0.5), total - 1)

    def blocks(self, total: int) -> int:
        return int(self.share * total)
