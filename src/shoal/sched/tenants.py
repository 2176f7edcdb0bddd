"""Tenants: how much one key may ask for at once, and per minute.

Two limits, both per tenant. Requests alive at once: each of the n samples of a prompt is one. Tokens per minute: a
leaky bucket that holds one minute's worth and runs out at limit / 60 tokens a second; a prompt is poured in when it is
accepted (once for the n samples of a job), each output token when it is committed. A job is refused if its prompt
would make the bucket run over; but an empty bucket takes any prompt, so one larger than the limit is not refused for
ever: it is paid for by a longer wait afterwards. Output is never cut; it, too, makes the next job wait. What was
poured in is not given back when a request is aborted or comes too late.

So the prompt tokens accepted within any 60 s are at most  limit + max(limit, the largest prompt):  what leaks out
meanwhile, and what is in the bucket at the end.

The bucket is kept as one number, the time when it will be empty. Limits may change while the server runs: the next
that asks meets the new ones. What is in the bucket stays in it, and leaks out at the new rate from then on. A tenant
with no request alive and an empty bucket is forgotten. The tenant "" (no key) has no limits. Knows no clock, no
scheduling and no names of keys.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.core.request import Request
from shoal.errors import BadParameter, RateLimited

MINUTE_S = 60.0
GRAIN_S = 1e-6  # two times closer than this are the same: now + (then - now) need not be then
BUSY_RETRY_S = 1.0  # when one of a key's requests will end is not known


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have; None is no limit."""

    max_concurrent: int | None = None  # requests alive
    tokens_per_minute: int | None = None


LimitsOf: TypeAlias = Callable[[str], TenantLimits | None]


def no_limits(tenant: str) -> TenantLimits | None:
    """No tenant is limited."""
    return None


class Account:
    """One tenant that has requests alive, or has had some lately."""

    __slots__ = ("charged", "empty_s", "parked", "rate")

    def __init__(self, limits: TenantLimits) -> None:
        self.rate = _rate_of(limits)  # tokens that leak out in a second
        self.empty_s = -math.inf  # when all will have leaked out
        self.charged: dict[str, int] = {}  # request alive → its output tokens that were counted
        self.parked = False  # stands in the heap of those to be forgotten

    def take_rate(self, limits: TenantLimits, now_s: float) -> None:
        """From now on it leaks at the rate of these limits. Without a rate, nothing was ever poured in."""
        rate = _rate_of(limits)
        if rate == self.rate:
            return
        held = max(0.0, self.empty_s - now_s) * (self.rate or 0.0)
        self.empty_s = now_s + held / rate if rate and held else -math.inf
        self.rate = rate

    def pour(self, tokens: int, now_s: float) -> None:
        """Nothing comes back: an answer cut at a stop string has fewer tokens than were charged, and those stay."""
        if self.rate is not None and tokens > 0:
            self.empty_s = max(self.empty_s, now_s) + tokens / self.rate


class Tenants:
    """Counts what every tenant has asked for. `limits_of` may change its mind about a tenant's limits, but not about
    whether it has any."""

    def __init__(self, limits_of: LimitsOf = no_limits) -> None:
        self._limits_of = limits_of
        self._accounts: dict[str, Account] = {}
        self._parked: list[tuple[float, str]] = []  # (when to look again, tenant): no request alive, bucket not empty

    def __len__(self) -> int:
        """How many tenants are remembered."""
        return len(self._accounts)

    def alive(self, tenant: str) -> int:
        """How many requests of this tenant are alive (0 if it has no limits)."""
        account = self._accounts.get(tenant)
        return len(account.charged) if account else 0

    # ---- at the door ----------------------------------------------------------------------------------------------

    def allow(self, requests: Sequence[Request], now_s: float) -> None:
        """Raise RateLimited if these must not come in now, all together. Counts nothing."""
        for tenant, mine in self._limited(requests).items():
            limits = self._limits_of(tenant)
            if limits is None:
                continue
            account = self._account(tenant, limits, now_s) or Account(limits)
            if limits.max_concurrent is not None:
                _allow_alive(len(account.charged), len(mine), limits.max_concurrent)
            if account.rate is not None:
                _allow_tokens(account, account.rate, _prompt_tokens(mine), now_s)

    def enter(self, requests: Sequence[Request], now_s: float, resumed: bool = False) -> None:
        """They are accepted. Tokens of resumed requests were charged by the engine that accepted them first."""
        self.forget(now_s)
        for tenant, mine in self._limited(requests).items():
            limits = self._limits_of(tenant)
            if limits is None:
                continue
            account = self._account(tenant, limits, now_s)
            if account is None:
                account = self._accounts[tenant] = Account(limits)
            account.charged |= {request.id: request.outputs for request in mine}
            if not resumed:
                account.pour(_prompt_tokens(mine), now_s)

    def _account(self, tenant: str, limits: TenantLimits, now_s: float) -> Account | None:
        """The account of a tenant that is remembered, under the limits it has now."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.take_rate(limits, now_s)
        return account

    def _limited(self, requests: Sequence[Request]) -> dict[str, list[Request]]:
        """By tenant, without requests that have no key."""
        found: dict[str, list[Request]] = {}
        if self._limits_of is not no_limits:
            for request in requests:
                if request.tenant:
                    found.setdefault(request.tenant, []).append(request)
        return found

    # ---- inside ---------------------------------------------------------------------------------------------------

    def charge(self, requests: Iterable[Request], now_s: float) -> None:
        """Pour in the tokens that these generated since the last call; counted without a rate, too, or a later one
        would charge for them."""
        for request in requests:
            account = self._accounts.get(request.tenant)
            if account is not None and request.id in account.charged:
                self._settle(account, request, now_s)

    def _settle(self, account: Account, request: Request, now_s: float) -> None:
        account.pour(request.outputs - account.charged[request.id], now_s)
        account.charged[request.id] = request.outputs

    def leave(self, request: Request, now_s: float) -> None:
        """It has ended."""
        account = self._accounts.get(request.tenant)
        if account is None or request.id not in account.charged:
            return
        self._settle(account, request, now_s)
        del account.charged[request.id]
        if not account.charged and not account.parked:
            if account.empty_s <= now_s:
                del self._accounts[request.tenant]
            else:
                self._park(account, request.tenant)

    def _park(self, account: Account, tenant: str) -> None:
        account.parked = True
        heapq.heappush(self._parked, (account.empty_s, tenant))

    def forget(self, now_s: float) -> None:
        """Drop tenants with no request alive and an empty bucket. Each is in the heap at most once."""
        while self._parked and self._parked[0][0] <= now_s:
            _, tenant = heapq.heappop(self._parked)
            account = self._accounts[tenant]
            account.parked = False
            if account.charged:
                continue  # it will be parked again when the last of them leaves
            if account.empty_s <= now_s:
                del self._accounts[tenant]
            else:
                self._park(account, tenant)

    def check(self, alive: Iterable[Request]) -> None:
        """Exactly the requests alive are counted, and no tenant is remembered without a reason."""
        counted = {(tenant, id) for tenant, account in self._accounts.items() for id in account.charged}
        limited = {(r.tenant, r.id) for r in alive if r.tenant and self._limits_of(r.tenant) is not None}
        assert counted == limited, "the requests of a tenant are counted wrongly"
        parked = [tenant for _, tenant in self._parked]
        assert sorted(parked) == sorted(t for t, account in self._accounts.items() if account.parked), "parked twice"
        for account in self._accounts.values():
            assert account.charged or account.parked, "a tenant will never be forgotten"


def _rate_of(limits: TenantLimits) -> float | None:
    return None if limits.tokens_per_minute is None else limits.tokens_per_minute / MINUTE_S


def _prompt_tokens(requests: Sequence[Request]) -> int:
    """What they bring; the n samples of one prompt bring it once."""
    groups: set[int] = set()
    tokens = 0
    for request in requests:
        if request.group is None or id(request.group) not in groups:
            tokens += len(request.tokens)
            groups.add(id(request.group))
    return tokens


def _allow_alive(alive: int, coming: int, most: int) -> None:
    if coming > most:
        raise BadParameter(
            f"n is {coming}, but this key may have {most} requests at once, and each sample is one; lower n"
        )
    if alive + coming > most:
        raise RateLimited(
            f"this key has {alive} requests under way and may have {most} at once (each of n samples is one); "
            f"wait until one of them has ended",
            BUSY_RETRY_S,
        )


def _allow_tokens(account: Account, rate: float, tokens: int, now_s: float) -> None:
    room_s = max(0.0, MINUTE_S - tokens / rate)  # the bucket may still need so long to be empty
    wait_s = account.empty_s - room_s - now_s
    if wait_s > GRAIN_S:
        raise RateLimited(
            f"this key may use {rate * MINUTE_S:.0f} tokens per minute, and with this prompt of {tokens} tokens "
            f"it would be more; try again in {wait_s:.1f} s",
            wait_s,
        )
