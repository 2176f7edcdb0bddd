"""Limits per key: how many at once, how many tokens a minute, and that nobody is remembered for ever."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.request import Group, Reason, Request
from shoal.errors import BadParameter, RateLimited, Rejected
from shoal.sched.scheduler import Scheduler
from shoal.sched.tenants import TenantLimits, Tenants
from tests.fakes import FakeExecutor, make_request, make_scheduler


def request_of(tenant: str, number: int, prompt: int = 1, group: Group | None = None) -> Request:
    return make_request(f"{tenant}{number}", [1] * prompt, 5, tenant=tenant, group=group)


def limited(max_concurrent: int | None = None, tokens_per_minute: int | None = None) -> Tenants:
    limits = TenantLimits(max_concurrent, tokens_per_minute)
    return Tenants(lambda tenant: limits)


def come(tenants: Tenants, *requests: Request, now_s: float = 0.0) -> None:
    tenants.allow(requests, now_s)
    tenants.enter(requests, now_s)


def turned_away(tenants: Tenants, *requests: Request, now_s: float = 0.0) -> float:
    """Refused; the seconds it is told to wait."""
    with pytest.raises(RateLimited) as refused:
        tenants.allow(requests, now_s)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


# ---- at once --------------------------------------------------------------------------------------------------------


def test_a_key_may_have_so_many_at_once_and_others_have_their_own() -> None:
    tenants = limited(max_concurrent=2)
    first, second = request_of("a", 1), request_of("a", 2)
    come(tenants, first)
    come(tenants, second)
    with pytest.raises(RateLimited, match=r"this key has 2 requests under way and may have 2 at once"):
        tenants.allow([request_of("a", 3)], 0.0)
    come(tenants, request_of("b", 1), request_of("b", 2))
    tenants.leave(first, 0.0)
    come(tenants, request_of("a", 3))
    assert (tenants.alive("a"), tenants.alive("b")) == (2, 2)


def test_samples_count_one_by_one_and_come_in_together_or_not_at_all() -> None:
    tenants = limited(max_concurrent=3)
    come(tenants, *(request_of("a", number) for number in range(2)))
    turned_away(tenants, request_of("a", 2), request_of("a", 3))
    assert tenants.alive("a") == 2
    with pytest.raises(BadParameter, match="n is 4, but this key may have 3 requests at once"):
        tenants.allow([request_of("b", number) for number in range(4)], 0.0)


def test_without_a_key_there_is_no_limit() -> None:
    tenants = limited(max_concurrent=1, tokens_per_minute=1)
    for number in range(50):
        come(tenants, request_of("", number, prompt=100))
    assert len(tenants) == 0


def test_a_tenant_without_limits_is_not_even_counted() -> None:
    tenants = Tenants(lambda tenant: TenantLimits(1) if tenant == "small" else None)
    come(tenants, request_of("large", 1))
    come(tenants, request_of("large", 2))
    come(tenants, request_of("small", 1))
    turned_away(tenants, request_of("small", 2))
    assert len(tenants) == 1
    tenants.leave(request_of("large", 1), 0.0)


# ---- a minute -------------------------------------------------------------------------------------------------------


def test_a_full_bucket_says_exactly_when_there_is_room() -> None:
    tenants = limited(tokens_per_minute=60)  # one a second
    come(tenants, request_of("a", 1, prompt=50))
    assert turned_away(tenants, request_of("a", 2, prompt=30)) == pytest.approx(20.0)
    assert turned_away(tenants, request_of("a", 2, prompt=30), now_s=19.0) == pytest.approx(1.0)
    come(tenants, request_of("a", 2, prompt=30), now_s=20.0)
    come(tenants, request_of("b", 1, prompt=30), now_s=20.0)


def test_a_bucket_that_was_empty_for_long_has_not_saved_anything_up() -> None:
    tenants = limited(tokens_per_minute=60)
    come(tenants, request_of("a", 1, prompt=10))  # and goes on, so that its tenant is remembered
    come(tenants, request_of("a", 2, prompt=50), now_s=500.0)
    assert turned_away(tenants, request_of("a", 3, prompt=30), now_s=500.0) == pytest.approx(20.0)


def test_an_empty_bucket_takes_a_prompt_larger_than_the_limit_and_then_none_for_long() -> None:
    tenants = limited(tokens_per_minute=60)
    come(tenants, request_of("a", 1, prompt=600))
    assert turned_away(tenants, request_of("a", 2)) == pytest.approx(541.0), "until it holds 59"
    assert turned_away(tenants, request_of("a", 2, prompt=61)) == pytest.approx(600.0), "until it is empty"
    come(tenants, request_of("a", 2, prompt=61), now_s=600.0)


def test_the_samples_of_a_job_share_their_prompt() -> None:
    tenants = limited(tokens_per_minute=60)
    group = Group("g")
    come(tenants, *(request_of("a", number, prompt=50, group=group) for number in range(4)))
    come(tenants, request_of("a", 9, prompt=10))
    turned_away(tenants, request_of("a", 10))


def test_output_is_charged_once_and_a_cut_gives_nothing_back() -> None:
    tenants = limited(tokens_per_minute=60)
    request = request_of("a", 1, prompt=10)
    come(tenants, request)
    request.tokens += [1] * 20
    tenants.charge([request], 0.0)
    tenants.charge([request], 0.0)
    assert turned_away(tenants, request_of("a", 2, prompt=60)) == pytest.approx(30.0)
    del request.tokens[15:]  # a stop string was found in what it had said
    tenants.leave(request, 0.0)
    assert turned_away(tenants, request_of("a", 2, prompt=60)) == pytest.approx(30.0)


def test_who_resumes_pays_only_for_what_is_new() -> None:
    tenants = limited(tokens_per_minute=60)
    request = make_request("a1", [1] * 50, 90, tenant="a", output=[1] * 20)
    tenants.enter([request], 0.0, resumed=True)
    request.tokens += [1] * 6
    tenants.leave(request, 0.0)
    assert turned_away(tenants, request_of("a", 2, prompt=60)) == pytest.approx(6.0)


# ---- limits that change while the server runs -----------------------------------------------------------------------


class Changing:
    """Limits that somebody edits."""

    def __init__(self, max_concurrent: int | None = None, tokens_per_minute: int | None = None) -> None:
        self.now = TenantLimits(max_concurrent, tokens_per_minute)
        self.tenants = Tenants(lambda tenant: self.now)

    def become(self, max_concurrent: int | None = None, tokens_per_minute: int | None = None) -> None:
        self.now = TenantLimits(max_concurrent, tokens_per_minute)


def test_a_new_rate_counts_at_once_for_what_the_bucket_holds() -> None:
    limits = Changing(tokens_per_minute=60)
    tenants = limits.tenants
    come(tenants, request_of("a", 1, prompt=50))  # goes on
    assert turned_away(tenants, request_of("a", 2, prompt=30)) == pytest.approx(20.0)
    limits.become(tokens_per_minute=120)  # two a second
    come(tenants, request_of("a", 2, prompt=30), now_s=0.0)
    assert turned_away(tenants, request_of("a", 3, prompt=60)) == pytest.approx(10.0), "80 held, 20 too many"
    limits.become(tokens_per_minute=30)  # one in two seconds
    assert turned_away(tenants, request_of("a", 3, prompt=30), now_s=10.0) == pytest.approx(120.0), "60 are left"
    assert turned_away(tenants, request_of("a", 3, prompt=30), now_s=70.0) == pytest.approx(60.0)
    come(tenants, request_of("a", 3, prompt=30), now_s=130.0)


def test_a_rate_that_is_lifted_forgets_and_one_that_is_new_charges_only_from_then_on() -> None:
    limits = Changing(tokens_per_minute=60)
    tenants = limits.tenants
    request = request_of("a", 1, prompt=500)
    come(tenants, request)
    turned_away(tenants, request_of("a", 2))
    limits.become()
    come(tenants, request_of("a", 2, prompt=10_000))
    request.tokens += [1] * 1000
    tenants.charge([request], 1.0)
    limits.become(tokens_per_minute=60)
    come(tenants, request_of("a", 3, prompt=20), now_s=1.0)
    request.tokens += [1] * 15
    tenants.charge([request], 1.0)
    assert turned_away(tenants, request_of("a", 4, prompt=60), now_s=1.0) == pytest.approx(35.0)


@pytest.mark.parametrize("later", [10, 600, None])
def test_a_tenant_is_forgotten_whatever_became_of_its_rate(later: int | None) -> None:
    limits = Changing(tokens_per_minute=60)
    tenants = limits.tenants
    first = request_of("a", 1, prompt=30)
    come(tenants, first)
    tenants.leave(first, 0.0)
    limits.become(tokens_per_minute=later)
    second = request_of("a", 2)
    with contextlib.suppress(RateLimited):
        come(tenants, second, now_s=1.0)
        tenants.leave(second, 1.0)
    tenants.check([])
    tenants.forget(1000.0)
    tenants.check([])
    assert len(tenants) == 0


def test_fewer_at_once_counts_for_the_next_and_ends_no_request() -> None:
    limits = Changing(max_concurrent=3)
    tenants = limits.tenants
    running = [request_of("a", number) for number in range(3)]
    come(tenants, *running)
    limits.become(max_concurrent=2)
    assert tenants.alive("a") == 3
    tenants.leave(running.pop(), 0.0)
    turned_away(tenants, request_of("a", 9))
    tenants.leave(running.pop(), 0.0)
    come(tenants, request_of("a", 9))


def step(scheduler: Scheduler, executor: FakeExecutor, now_s: float = 0.0) -> None:
    plan = scheduler.plan(now_s)
    assert plan is not None
    executor.forward(plan)
    executor.sample(None)
    scheduler.commit(executor.result(), now_s)
    scheduler.check()


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_scheduler_charges_every_token_in_the_pass_that_brings_it(batching: str) -> None:
    scheduler = make_scheduler(key_limits=TenantLimits(None, 60), batching=batching, group_size=1)
    executor = FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)
    scheduler.submit(make_request("a", [1] * 3, 4, tenant="t"), 0.0)
    waits = []
    for _ in range(4):
        step(scheduler, executor)
        with pytest.raises(RateLimited) as refused:
            scheduler.submit(make_request("b", [1] * 60, 1, tenant="t"), 0.0)
        waits.append(refused.value.retry_after_s)
    assert waits == pytest.approx([4.0, 5.0, 6.0, 7.0])
    assert scheduler.idle


def test_a_last_token_is_charged_when_it_comes_not_when_it_was_planned() -> None:
    scheduler = make_scheduler(key_limits=TenantLimits(None, 60))
    executor = FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)
    scheduler.submit(make_request("a", [1] * 3, 1, tenant="t"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    executor.forward(plan)
    executor.sample(None)
    scheduler.commit(executor.result(), 100.0)
    with pytest.raises(RateLimited) as refused:
        scheduler.submit(make_request("b", [1] * 60, 1, tenant="t"), 100.0)
    assert refused.value.retry_after_s == pytest.approx(1.0)


@pytest.mark.parametrize("how", ["abort", "error", "timeout"])
def test_however_a_request_ends_its_place_is_free(how: str) -> None:
    scheduler = make_scheduler(key_limits=TenantLimits(1))
    executor = FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)
    scheduler.submit(make_request("a", [1], 9, tenant="t", timeout_s=1.0), 0.0)
    step(scheduler, executor)
    with pytest.raises(RateLimited):
        scheduler.submit(make_request("b", [1], tenant="t"), 0.5)
    if how == "abort":
        scheduler.finish("a", Reason.ABORT)
    elif how == "error":
        for _ in range(2):  # once may be chance
            plan = scheduler.plan(0.0)
            assert plan is not None
            scheduler.fail("broken", 0.0)
    else:
        scheduler.expire(1.0)
    assert len(scheduler.tables.tenants) == 0
    scheduler.submit(make_request("b", [1], tenant="t"), 1.0)


def test_a_refusal_leaves_no_trace() -> None:
    scheduler = make_scheduler(key_limits=TenantLimits(2, 10), max_queue=1)
    scheduler.submit(make_request("a", [1], tenant="t"), 0.0)
    for now_s in (0.0, 1.0, 2.0):
        with pytest.raises(Rejected):
            scheduler.submit(make_request("b", [1] * 9, tenant="t"), now_s)
        with pytest.raises(Rejected):
            scheduler.submit(make_request("b", [1], tenant="stranger"), now_s)
    assert len(scheduler.tables.tenants) == 1
    assert scheduler.tables.tenants.alive("t") == 1
    scheduler.check()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_tenants_come_and_go_and_are_forgotten() -> None:
    """A million keys that came once each are a million entries too many."""
    tenants = limited(max_concurrent=5, tokens_per_minute=600)  # ten a second
    most = 0
    for number in range(20_000):
        request = request_of(f"t{number}", 0, prompt=10)
        come(tenants, request, now_s=number / 100)
        tenants.leave(request, number / 100)
        most = max(most, len(tenants))
    assert most <= 102, "each bucket is empty after a second, and a hundred come in one"
    tenants.check([])
    tenants.forget(1e9)
    assert len(tenants) == 0
    tenants.check([])


def test_without_a_bucket_a_tenant_is_forgotten_at_once() -> None:
    tenants = limited(max_concurrent=5)
    request = request_of("a", 1)
    come(tenants, request)
    tenants.leave(request, 0.0)
    assert len(tenants) == 0


def test_a_tenant_that_comes_back_before_it_is_forgotten_is_kept() -> None:
    tenants = limited(tokens_per_minute=60)
    first, second = request_of("a", 1, prompt=10), request_of("a", 2, prompt=30)
    come(tenants, first)
    tenants.leave(first, 0.0)
    come(tenants, second, now_s=5.0)
    tenants.forget(20.0)
    tenants.check([second])
    assert tenants.alive("a") == 1
    tenants.leave(second, 20.0)
    tenants.forget(39.9)
    assert len(tenants) == 1, "it owes until 40 s"
    tenants.forget(40.0)
    assert len(tenants) == 0


# ---- against a bucket in plain arithmetic ---------------------------------------------------------------------------


class PlainBucket:
    """Level and leak, as one would write it down."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.level = Fraction(0)

    def leak(self, seconds: Fraction) -> None:
        self.level = max(Fraction(0), self.level - Fraction(self.limit, 60) * seconds)

    def accepts(self, tokens: int) -> bool:
        return self.level == 0 or self.level + tokens <= self.limit

    def wait_s(self, tokens: int) -> Fraction:
        over = self.level + tokens - self.limit if tokens <= self.limit else self.level
        return over * 60 / self.limit


steps = st.tuples(
    st.integers(0, 40),  # eighths of a second before it
    st.integers(1, 200),  # prompt
    st.integers(0, 30),  # output
)


@given(st.integers(1, 300), st.lists(steps, min_size=1, max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_bucket_does_what_plain_arithmetic_says(limit: int, traffic: list[tuple[int, int, int]]) -> None:
    tenants, plain = limited(tokens_per_minute=limit), PlainBucket(limit)
    now_s = 100.0
    accepted: list[tuple[float, int]] = []
    for number, (pause, prompt, output) in enumerate(traffic):
        now_s += pause / 8
        plain.leak(Fraction(pause, 8))
        request = request_of("a", number, prompt)
        if not plain.accepts(prompt):
            wait_s = turned_away(tenants, request, now_s=now_s)
            assert wait_s == pytest.approx(float(plain.wait_s(prompt)), abs=1e-6)
            tenants.allow([request], now_s + wait_s)  # not an instant too early …
            if wait_s > 0.002:
                turned_away(tenants, request, now_s=now_s + wait_s - 0.001)  # … nor too late
            continue
        come(tenants, request, now_s=now_s)
        accepted.append((now_s, prompt))
        request.tokens += [1] * output
        tenants.leave(request, now_s)
        plain.level += prompt + output
        tenants.check([])
    bound = limit + max([limit, *(prompt for _, prompt in accepted)])
    for begin_s, _ in accepted:
        assert sum(prompt for at_s, prompt in accepted if begin_s <= at_s <= begin_s + 60) <= bound
