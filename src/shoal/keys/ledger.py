"""The ledger: what each API key has used, what its unfinished calls have reserved, and whether it may begin another.

A call is one HTTP request: all samples of all its prompts, admitted together or not at all. `max_concurrent` counts
the samples of unfinished calls. `tokens_per_minute` = L is a leaky bucket: tokens are poured in when they are used,
prompt and output alike, and L / 60 of them leak out each second. Three numbers decide about a call, the last two summed
over the key's unfinished calls:

    used        what is in the bucket: used so far, and not leaked out yet
    reserved    what the calls are expected to use: their prompts, and for each sample the smaller of max_tokens and the
                usual output of this key's samples. A call's tokens are counted against its reservation as they come;
                what is left of it is returned when the call ends
    worst       what the calls can use at most: their prompts, and max_tokens for each sample

A call is admitted if, with it,

    used + reserved, as far as it is not used yet,  <=  L                       it fits into the bucket, and
    used + worst, as far as it is not used yet,     <=  L + DEBT_MINUTES * L    the key cannot owe too much.

A running call is never cut. If it uses more than it reserved, it is in debt: the bucket runs over, and new calls are
refused until enough has leaked out. Two exceptions, so that no single sequence is refused for ever: a call that finds
the bucket empty and no other call unfinished need not fit into the bucket, and a call of a single sample with no other
call unfinished need not meet the second condition. A call of several samples that never can is a BadParameter.

The bound: let C be the longest single sequence that was asked for (prompt + max_tokens, at most the model's context, or
a text that was to be tokenized). Within any m minutes a key uses at most

    m * L + L + max(DEBT_MINUTES * L, C)   tokens: what leaks out, one bucket, and one debt.

Proof: the left side of the second condition grows only when a call is admitted, since a token that comes moves from
its second term to its first. At each admission it is at most L + DEBT_MINUTES * L, or L + C by the exceptions. So there
is never more in the bucket than L + max(DEBT_MINUTES * L, C); and what is used within m minutes has leaked out
meanwhile (at most m * L) or is in the bucket at the end.

Limits may change while calls run: what is in the bucket stays there and leaks out at the new rate. A tenant with an
empty bucket and no call is forgotten, and with it its usual output. Knows no clock (`now_s` is an argument), no
sockets, no HTTP and no engine; it outlives the engines and fronts that it counts for.
"""

import math
from dataclasses import dataclass

from shoal.errors import BadParameter, RateLimited
from shoal.keys.limits import LimitsOf, TenantLimits

MINUTE_S = 60.0
DEBT_MINUTES = 5.0  # how many minutes' worth of tokens a key may owe when all its calls use their max_tokens
FIRST_USUAL = 256.0  # output tokens of a sample, before any of a tenant has ended
RISE, FALL = 0.25, 0.05  # how far one more output moves the usual one: up fast, down slowly
GRAIN = 1e-6  # tokens; a bucket with less is empty, since sums of floats need not be exact
BUSY_RETRY_S = 1.0  # when one of a key's calls will end is not known


@dataclass(frozen=True, slots=True)
class Demand:
    """What a call asks for."""

    prompt_tokens: int  # of all prompts
    samples: int  # of all prompts together; 0: it generates nothing
    output_tokens: int  # at most: max_tokens of all samples

    @property
    def worst(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def expected(self, usual: float) -> int:
        """What to reserve, where a sample usually has so many tokens."""
        return self.prompt_tokens + min(self.output_tokens, math.ceil(self.samples * usual))


@dataclass(slots=True)
class OpenCall:
    """A call that has not ended."""

    demand: Demand
    reserved: int
    used: int = 0

    @property
    def held(self) -> int:
        """What is left of its reservation."""
        return max(0, self.reserved - self.used)

    @property
    def ahead(self) -> int:
        """What it may still use."""
        return max(0, self.demand.worst - self.used)


class Account:
    """One tenant that has unfinished calls, or has had some lately."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        self.limits = limits
        self.used = 0.0  # tokens in the bucket at `at_s`; 0 without a rate
        self.at_s = now_s
        self.usual = FIRST_USUAL
        self.calls: dict[tuple[str, str], OpenCall] = {}  # by (owner, call id)

    def advance(self, limits: TenantLimits, now_s: float) -> None:
        """Let leak out what leaks until now; from now on under these limits."""
        if now_s > self.at_s:
            self.used = max(0.0, self.used - (self.limits.tokens_per_minute or 0) / MINUTE_S * (now_s - self.at_s))
            self.at_s = now_s
        if limits.tokens_per_minute is None or self.used < GRAIN:
            self.used = 0.0
        self.limits = limits

    @property
    def samples(self) -> int:
        return sum(call.demand.samples for call in self.calls.values())

    @property
    def held(self) -> int:
        return sum(call.held for call in self.calls.values())

    @property
    def ahead(self) -> int:
        return sum(call.ahead for call in self.calls.values())

    def spend(self, call: OpenCall, used: int) -> None:
        """A call has used so many tokens in all. Counted without a rate, too, or a later one would charge for them."""
        more = max(0, used - call.used)
        call.used += more
        if self.limits.tokens_per_minute is not None:
            self.used += more

    def learn(self, call: OpenCall) -> None:
        """A call has ended: so many tokens had its samples on average."""
        output = call.used - call.demand.prompt_tokens
        if call.demand.samples and output > 0:
            more = output / call.demand.samples - self.usual
            self.usual += more * (RISE if more > 0 else FALL)

    # ---- admission --------------------------------------------------------------------------------------------------

    def allow(self, demand: Demand) -> None:
        """Raise if this call must not begin now: RateLimited, or BadParameter if it never may."""
        if self.limits.max_concurrent is not None:
            self._allow_samples(demand, self.limits.max_concurrent)
        if self.limits.tokens_per_minute is not None:
            self._allow_debt(demand, self.limits.tokens_per_minute)
            self._allow_tokens(demand, self.limits.tokens_per_minute)

    def _allow_samples(self, demand: Demand, most: int) -> None:
        if demand.samples > most:
            raise BadParameter(
                f"n times the number of prompts is {demand.samples}, but this key may have {most} requests at once, "
                f"and each sample of each prompt is one; lower n or send fewer prompts at once"
            )
        running = self.samples
        if running + demand.samples > most:
            raise RateLimited(
                f"this key has {running} requests under way and may have {most} at once (each sample of each prompt is "
                f"one); wait until one of them has ended",
                BUSY_RETRY_S,
            )

    def _allow_debt(self, demand: Demand, limit: int) -> None:
        most = limit + DEBT_MINUTES * limit
        if demand.samples > 1 and demand.worst > most:
            raise BadParameter(
                f"max_tokens of all samples and their prompts are {demand.worst} tokens, but a key with {limit} tokens "
                f"per minute may have at most {most:.0f} under way; set a lower max_tokens, n or number of prompts"
            )
        if demand.samples <= 1 and not self.calls:
            return
        over = self.used + self.ahead + demand.worst - most
        if over > GRAIN:
            raise RateLimited(
                f"this key may use {limit} tokens per minute, and its unfinished requests and this one could use "
                f"{self.ahead + demand.worst} more, where at most {max(0.0, most - self.used):.0f} are allowed now; "
                f"set a lower max_tokens, or wait until one has ended",
                BUSY_RETRY_S if self.calls else over * MINUTE_S / limit,
            )

    def _allow_tokens(self, demand: Demand, limit: int) -> None:
        if not self.calls and not self.used:
            return
        expected = demand.expected(self.usual)
        over = self.used + self.held + expected - max(limit, expected)
        if self.calls and expected > limit:
            over = max(over, limit / MINUTE_S)  # it waits until all have ended
        if over > GRAIN:
            wait_s = over * MINUTE_S / limit
            raise RateLimited(
                f"this key may use {limit} tokens per minute, and with the {expected} that this request is expected to "
                f"use it would be more; try again in {wait_s:.1f} s",
                wait_s,
            )


class Ledger:
    """The accounts of all tenants that have limits. `limits_of` may change its mind at any time."""

    def __init__(self, limits_of: LimitsOf) -> None:
        self._limits_of = limits_of
        self._accounts: dict[str, Account] = {}
        self._tenants: dict[tuple[str, str], str] = {}  # (owner, call id) → tenant

    def __len__(self) -> int:
        """How many tenants are remembered."""
        return len(self._accounts)

    def reserve(self, owner: str, call_id: str, tenant: str, demand: Demand, now_s: float) -> None:
        """Begin a call. If it raises (RateLimited, BadParameter), nothing has changed."""
        limits = self._limits_of(tenant)
        account = self._accounts.get(tenant) or Account(limits, now_s)
        account.advance(limits, now_s)
        account.allow(demand)
        self._accounts[tenant] = account
        account.calls[owner, call_id] = OpenCall(demand, demand.expected(account.usual))
        self._tenants[owner, call_id] = tenant

    def charge(self, owner: str, call_id: str, used: int, now_s: float) -> None:
        """A call has used so many tokens so far, its prompts included. Unknown calls are ignored."""
        account = self._account_of(owner, call_id, now_s)
        if account is not None:
            account.spend(account.calls[owner, call_id], used)

    def settle(self, owner: str, call_id: str, used: int, now_s: float) -> None:
        """A call has ended after so many tokens, 0 if it was refused before it began."""
        account = self._account_of(owner, call_id, now_s)
        if account is None:
            return
        call = account.calls.pop((owner, call_id))
        account.spend(call, used)
        account.learn(call)
        tenant = self._tenants.pop((owner, call_id))
        if not account.calls and not account.used:
            del self._accounts[tenant]

    def forget_owner(self, owner: str, now_s: float) -> None:
        """The process that began these calls is gone: they end with what was last charged."""
        for one, call_id in [key for key in self._tenants if key[0] == owner]:
            self.settle(one, call_id, 0, now_s)

    def forget_idle(self, now_s: float) -> None:
        """Drop tenants without calls whose bucket is empty. To be called now and then."""
        for tenant, account in list(self._accounts.items()):
            account.advance(self._limits_of(tenant), now_s)
            if not account.calls and not account.used:
                del self._accounts[tenant]

    def _account_of(self, owner: str, call_id: str, now_s: float) -> Account | None:
        tenant = self._tenants.get((owner, call_id))
        if tenant is None:
            return None
        account = self._accounts[tenant]
        account.advance(self._limits_of(tenant), now_s)
        return account

    def check(self) -> None:
        """Every call is in exactly one account, and none has used more than it asked for."""
        counted = {key: tenant for tenant, account in self._accounts.items() for key in account.calls}
        assert counted == self._tenants, "the calls of a tenant are counted wrongly"
        for account in self._accounts.values():
            assert all(call.used <= call.demand.worst for call in account.calls.values()), "a call used too much"
