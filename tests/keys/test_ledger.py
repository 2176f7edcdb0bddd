"""The ledger: what a key may use within any time, whatever its calls do, and that nothing is lost or kept for ever."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import BadParameter, RateLimited
from shoal.keys.ledger import BUSY_RETRY_S, DEBT_MINUTES, FIRST_USUAL, Demand, Ledger
from shoal.keys.limits import TenantLimits


def limited(max_concurrent: int | None = None, tokens_per_minute: int | None = None) -> Ledger:
    limits = TenantLimits(max_concurrent, tokens_per_minute)
    return Ledger(lambda tenant: limits)


def begin(
    ledger: Ledger, id: str, prompt: int = 1, n: int = 1, most: int = 1, now_s: float = 0.0, key: str = "a"
) -> None:
    ledger.reserve("front", id, key, Demand(prompt, n, n * most), now_s)
    ledger.check()


def end(ledger: Ledger, id: str, used: int, now_s: float = 0.0) -> None:
    ledger.settle("front", id, used, now_s)
    ledger.check()


def refused(ledger: Ledger, prompt: int = 1, n: int = 1, most: int = 1, now_s: float = 0.0) -> float:
    """Refused for now; the seconds that it is told to wait."""
    with pytest.raises(RateLimited) as error:
        begin(ledger, "refused", prompt, n, most, now_s)
    assert error.value.retry_after_s is not None
    return error.value.retry_after_s


# ---- at once --------------------------------------------------------------------------------------------------------


def test_a_key_may_have_so_many_at_once_and_others_have_their_own() -> None:
    ledger = limited(max_concurrent=2)
    begin(ledger, "1")
    begin(ledger, "2")
    with pytest.raises(RateLimited, match="this key has 2 requests under way and may have 2 at once"):
        begin(ledger, "3")
    begin(ledger, "3", n=2, key="b")
    end(ledger, "1", 2)
    begin(ledger, "4")
    assert refused(ledger) == BUSY_RETRY_S


def test_every_sample_of_every_prompt_is_one_and_a_call_begins_as_a_whole() -> None:
    ledger = limited(max_concurrent=4)
    begin(ledger, "1", n=2)
    refused(ledger, n=3)
    begin(ledger, "2", n=2)
    end(ledger, "1", 5)
    begin(ledger, "3", n=2)


def test_more_samples_than_a_key_may_ever_have_is_a_bad_request() -> None:
    ledger = limited(max_concurrent=4)
    with pytest.raises(BadParameter, match="is 5, but this key may have 4 requests at once"):
        begin(ledger, "1", prompt=5, n=5)
    assert len(ledger) == 0


def test_what_generates_nothing_takes_no_place() -> None:
    ledger = limited(max_concurrent=1)
    begin(ledger, "1")
    ledger.reserve("front", "2", "a", Demand(10, 0, 90), 0.0)
    refused(ledger)


# ---- tokens per minute ----------------------------------------------------------------------------------------------


def test_a_prompt_and_the_usual_output_are_reserved_and_the_rest_is_returned() -> None:
    ledger = limited(tokens_per_minute=1000)
    begin(ledger, "1", prompt=100, most=5000)
    begin(ledger, "2", prompt=100, most=10)  # max_tokens is less than usual
    assert refused(ledger, prompt=1000 - 100 - 256 - 110 + 1, most=0) == pytest.approx(60 / 1000)
    end(ledger, "1", used=120)
    begin(ledger, "3", prompt=1000 - 120 - 110, most=0)


def test_tokens_are_charged_as_they_come_and_beyond_the_reservation_as_debt() -> None:
    ledger = limited(tokens_per_minute=60)
    begin(ledger, "1", prompt=10, most=340)
    ledger.charge("front", "1", 50, 0.0)
    ledger.charge("front", "1", 50, 0.0)
    ledger.charge("front", "1", 350, 0.0)
    end(ledger, "1", 350)
    assert refused(ledger, prompt=1, most=0) == pytest.approx(291), "291 above the bucket, one leaks out each second"
    refused(ledger, prompt=1, most=0, now_s=290.9)
    begin(ledger, "2", prompt=1, most=0, now_s=291.1)


def test_a_call_that_was_refused_later_gets_everything_back() -> None:
    ledger = limited(tokens_per_minute=100)
    begin(ledger, "1", prompt=90, most=10)
    refused(ledger, prompt=90, most=10)
    end(ledger, "1", used=0)
    assert len(ledger) == 0
    begin(ledger, "2", prompt=90, most=10)


def test_an_empty_bucket_takes_one_sequence_of_any_size_and_then_none_for_long() -> None:
    ledger = limited(tokens_per_minute=60)
    begin(ledger, "1", prompt=5000, most=100_000)
    refused(ledger, most=0)
    end(ledger, "1", 5000)
    assert refused(ledger, prompt=60, most=0) == pytest.approx(5000)
    assert refused(ledger, prompt=900, most=0, now_s=1000.0) == pytest.approx(4000), "it waits for an empty bucket"
    begin(ledger, "2", prompt=900, most=0, now_s=5000.0)


def test_one_sequence_may_always_run_alone_while_it_is_expected_to_fit() -> None:
    ledger = limited(tokens_per_minute=1000)
    begin(ledger, "1", prompt=10, most=100_000)
    end(ledger, "1", 20)
    begin(ledger, "2", prompt=10, most=100_000)


def test_what_a_key_could_owe_is_bounded() -> None:
    ledger = limited(tokens_per_minute=1000)
    for number in range(200):  # its usual output becomes 1
        begin(ledger, "short", prompt=0, most=1, now_s=60.0 * number)
        end(ledger, "short", 1, now_s=60.0 * number + 1)
    now_s = 60.0 * 200
    for number in range(int((1 + DEBT_MINUTES) * 1000 / 900)):
        begin(ledger, f"long-{number}", prompt=0, most=900, now_s=now_s)
    with pytest.raises(RateLimited, match="lower max_tokens, or wait until one has ended") as error:
        begin(ledger, "one more", prompt=0, most=900, now_s=now_s)
    assert error.value.retry_after_s == BUSY_RETRY_S


def test_samples_that_could_never_be_paid_for_are_a_bad_request() -> None:
    ledger = limited(tokens_per_minute=1000)
    with pytest.raises(BadParameter, match="6004 tokens, but a key with 1000 tokens per minute may have at most 6000"):
        begin(ledger, "1", prompt=4, n=2, most=3000)
    begin(ledger, "1", n=2, prompt=0, most=3000)


def test_a_bucket_that_was_empty_for_long_has_saved_nothing_up() -> None:
    ledger = limited(tokens_per_minute=60)
    begin(ledger, "1", prompt=60, most=0)
    end(ledger, "1", 60)
    begin(ledger, "2", prompt=60, most=0, now_s=1e6)
    end(ledger, "2", 60, now_s=1e6)
    assert refused(ledger, prompt=60, most=0, now_s=1e6) == pytest.approx(60)


def test_the_usual_output_follows_what_comes_and_is_slow_to_fall() -> None:
    ledger = limited(tokens_per_minute=100_000)
    for number in range(3):
        begin(ledger, str(number), most=4000, n=2, prompt=0)
        end(ledger, str(number), 2 * 2000)
    usual = ledger._accounts["a"].usual
    assert usual > 2 * FIRST_USUAL
    begin(ledger, "short", most=4000)
    end(ledger, "short", 2)
    assert 0.9 * usual < ledger._accounts["a"].usual < usual
    begin(ledger, "none", most=4000)
    end(ledger, "none", 0)  # refused: it tells nothing
    assert 0.9 * usual < ledger._accounts["a"].usual


# ---- owners and limits come and go ----------------------------------------------------------------------------------


def test_when_a_front_dies_its_calls_end_with_what_was_charged() -> None:
    ledger = limited(max_concurrent=2, tokens_per_minute=6000)
    ledger.reserve("front-0", "1", "a", Demand(100, 1, 4000), 0.0)
    ledger.reserve("front-1", "1", "a", Demand(100, 1, 100), 0.0)
    ledger.charge("front-0", "1", 3000, 0.0)
    ledger.forget_owner("front-0", 0.0)
    ledger.check()
    ledger.charge("front-0", "1", 4000, 0.0)  # of a call that is not known any more
    ledger.settle("front-0", "1", 4000, 0.0)
    refused(ledger, n=2, prompt=0)
    begin(ledger, "2", prompt=6000 - 3000 - 200, most=0)
    refused(ledger, prompt=1, most=0)


def test_new_limits_count_from_the_next_call_on_and_what_is_in_the_bucket_stays() -> None:
    now: dict[str, TenantLimits] = {"a": TenantLimits(None, 600)}
    ledger = Ledger(now.__getitem__)
    begin(ledger, "1", prompt=600, most=0)
    end(ledger, "1", 600)
    now["a"] = TenantLimits(None, 60)
    assert refused(ledger, prompt=60, most=0, now_s=30.0) == pytest.approx(300), "10 a second until it is noticed"
    now["a"] = TenantLimits(1, None)
    begin(ledger, "2", prompt=1000, most=9, now_s=31.0)
    refused(ledger, now_s=31.0)
    ledger.charge("front", "2", 1005, 31.0)
    now["a"] = TenantLimits(None, 60)
    ledger.charge("front", "2", 1009, 32.0)
    assert refused(ledger, prompt=60, most=0, now_s=32.0) == pytest.approx(4), "only what came under the new limit"


def test_a_tenant_is_forgotten_when_it_owes_nothing() -> None:
    ledger = limited(max_concurrent=5, tokens_per_minute=60)
    begin(ledger, "1", prompt=50, most=0)
    ledger.forget_idle(1000.0)
    assert len(ledger) == 1, "its call still runs"
    end(ledger, "1", 50, now_s=1000.0)
    ledger.forget_idle(1049.0)
    assert len(ledger) == 1
    ledger.forget_idle(1050.1)
    assert len(ledger) == 0
    only_places = limited(max_concurrent=1)
    begin(only_places, "1", prompt=50)
    end(only_places, "1", 51)
    assert len(only_places) == 0


def test_a_refusal_changes_nothing() -> None:
    ledger = limited(max_concurrent=1)
    with pytest.raises(BadParameter):
        begin(ledger, "1", n=2)
    assert len(ledger) == 0
    begin(ledger, "1")
    refused(ledger)
    end(ledger, "1", 1)
    begin(ledger, "2")


def test_a_clock_that_stands_still_or_goes_back_does_not_refill() -> None:
    ledger = limited(tokens_per_minute=60)
    begin(ledger, "1", prompt=60, most=0, now_s=100.0)
    end(ledger, "1", 60, now_s=90.0)
    assert refused(ledger, prompt=60, most=0, now_s=80.0) == pytest.approx(60)


# ---- the bound ------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """One key's calls on a ledger, and every token that it was given."""

    limit: int
    now_s: float = 0.0
    used: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens)
    calls: dict[str, tuple[Demand, int]] = field(default_factory=dict)  # demand, tokens so far
    longest: int = 0  # single sequence
    begun: int = 0
    waits_s: list[float] = field(default_factory=list)  # that it was told

    def __post_init__(self) -> None:
        limits = TenantLimits(None, self.limit)
        self.ledger = Ledger(lambda tenant: limits)

    def open(self, prompt: int, n: int, most: int) -> None:
        demand = Demand(prompt, n, n * most)
        self.begun += 1
        try:
            self.ledger.reserve("front", str(self.begun), "a", demand, self.now_s)
        except RateLimited as error:
            self.waits_s.append(error.retry_after_s or 0.0)
            return
        except BadParameter:
            return
        if n == 1:
            self.longest = max(self.longest, demand.worst)
        self.calls[str(self.begun)] = (demand, 0)

    def generate(self, number: int, share: float, ends: bool) -> None:
        """One call uses a share of what it may still use; then it may end."""
        if not self.calls:
            return
        id = list(self.calls)[number % len(self.calls)]
        demand, before = self.calls[id]
        total = before + round((demand.worst - before) * share)
        self.used.append((self.now_s, total - before))
        self.calls[id] = (demand, total)
        if ends:
            self.ledger.settle("front", id, total, self.now_s)
            del self.calls[id]
        else:
            self.ledger.charge("front", id, total, self.now_s)
        self.ledger.check()

    def check_bound(self) -> None:
        """In every window: m * limit + one bucket + one debt."""
        assert all(wait_s > 0 for wait_s in self.waits_s)
        debt = max(DEBT_MINUTES * self.limit, self.longest)
        for first, (begin_s, _) in enumerate(self.used):
            tokens = 0
            for at_s, more in self.used[first:]:
                tokens += more
                minutes = (at_s - begin_s) / 60
                assert tokens <= minutes * self.limit + self.limit + debt + 1e-3, (begin_s, at_s)

    def end_all(self) -> None:
        for id, (_, total) in self.calls.items():
            self.ledger.settle("front", id, total, self.now_s)
        self.ledger.check()
        owed = self.ledger._accounts["a"].used if len(self.ledger) else 0.0
        assert owed <= sum(tokens for _, tokens in self.used) + 1e-3, "more was charged than was used"
        self.ledger.forget_idle(self.now_s + (owed + 1) * 60 / self.limit)
        assert len(self.ledger) == 0, "something of it is kept for ever"


moves = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 500), st.sampled_from([1, 1, 1, 2, 5]), st.integers(1, 20_000)),
    st.tuples(st.just("open"), st.integers(0, 30), st.just(1), st.integers(1, 300)),
    st.tuples(st.just("use"), st.integers(0, 50), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.booleans()),
    st.tuples(st.just("use"), st.integers(0, 50), st.sampled_from([0.01, 1.0]), st.just(True)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 7.0, 60.0])),
    st.tuples(st.just("train"), st.integers(1, 40)),  # many short answers: the usual output falls
)
Move = tuple[object, ...]


def play(traffic: Traffic, made: list[Move]) -> None:
    for what, *how in made:
        if what == "open":
            traffic.open(*how)  # type: ignore[arg-type]
        elif what == "use":
            traffic.generate(*how)  # type: ignore[arg-type]
        elif what == "wait":
            traffic.now_s += how[0]  # type: ignore[operator]
        else:
            for _ in range(how[0]):  # type: ignore[call-overload]
                traffic.open(0, 1, 1)
                traffic.generate(-1, 1.0, True)
                traffic.now_s += 0.5
    traffic.check_bound()
    traffic.end_all()


@given(st.integers(1, 5000), st.lists(moves, min_size=1, max_size=40))
@example(1000, [("train", 40), *[("open", 0, 1, 900)] * 20, *[("use", number, 1.0, True) for number in range(20)]])
@settings(max_examples=200, deadline=None)
def test_within_any_time_a_key_gets_at_most_the_bound(limit: int, made: list[Move]) -> None:
    play(Traffic(limit), made)


@pytest.mark.parametrize("seed", range(5))
def test_a_key_that_pretends_to_be_brief_and_then_opens_long_streams_gets_at_most_the_bound(seed: int) -> None:
    """The issue's case, for an hour: 1,000 tokens a minute, and a client that always wants 30,000 more."""
    chance = random.Random(seed)
    traffic = Traffic(1000)
    while traffic.now_s < 3600:
        play_brief = chance.random() < 0.3
        for _ in range(chance.randrange(1, 30)):
            traffic.open(0 if play_brief else 20, 1, 2 if play_brief else chance.choice([500, 2000, 30_000]))
        for number in range(len(traffic.calls)):
            traffic.generate(number, 1.0 if play_brief else chance.choice([0.1, 0.5, 1.0]), chance.random() < 0.5)
        traffic.now_s += chance.choice([0.5, 2.0, 20.0])
    traffic.check_bound()
    total = sum(tokens for _, tokens in traffic.used)
    assert total > 40_000, "it got what it may have"
    traffic.end_all()
