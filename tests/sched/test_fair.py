"""Fair between tenants: the least served first, nothing banked, nothing wasted, and the gap within its bound."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sched import fair as module
from shoal.sched.fair import Fair
from tests.effort import examples
from tests.fakes import FakeExecutor, make_request, make_scheduler


class Shop:
    """An engine with the fair order, one pass at a time."""

    def __init__(self, slots: int = 1, budget: int = 64, blocks: int = 64) -> None:
        self.scheduler = make_scheduler(
            order="fair", max_num_seqs=slots, max_num_batched_tokens=budget, blocks=blocks, keep=False
        )
        self.executor = FakeExecutor(self.scheduler.kv.pool.total, self.scheduler.kv.block_size)
        self.count = 0
        self.started: list[str] = []

    @property
    def fair(self) -> Fair:
        assert isinstance(self.scheduler.policies.order, Fair)
        return self.scheduler.policies.order

    def ask(self, tenant: str, times: int = 1, prompt: int = 1, output: int = 1) -> None:
        for _ in range(times):
            request = make_request(f"{tenant}{self.count}", [1] * prompt, max_tokens=output, tenant=tenant)
            self.scheduler.submit(request, now_s=float(self.count))
            self.count += 1

    def serve(self) -> list[str]:
        """Whose requests start in the next pass."""
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return []
        self.executor.forward(plan)
        self.executor.sample(None)
        events = self.scheduler.commit(self.executor.result(), 0.0)
        self.scheduler.check()
        started = [one.id[0] for one in events.admitted]
        self.started += started
        return started


def test_a_tenant_that_floods_does_not_delay_another() -> None:
    shop = Shop()
    shop.ask("a", times=50)
    shop.serve()
    shop.ask("b")
    assert "b" in shop.serve() + shop.serve(), "at most one of the others goes before it"


def test_equal_tenants_take_turns() -> None:
    shop = Shop()
    shop.ask("a", times=10)
    shop.ask("b", times=10)
    for _ in range(10):
        shop.serve()
    assert abs(shop.started.count("a") - shop.started.count("b")) <= 1


def test_several_are_taken_in_one_pass_fairly() -> None:
    shop = Shop(slots=6)
    shop.ask("a", times=10, output=3)
    shop.ask("b", times=10, output=3)
    assert sorted(shop.serve()) == ["a", "a", "a", "b", "b", "b"]


def test_output_costs_more_than_prompt() -> None:
    shop = Shop()
    shop.ask("a", times=10, prompt=1, output=7)  # 1 + 2 · 7 = 15 each
    shop.ask("b", times=20, prompt=1, output=1)  # 1 + 2 · 1 = 3 each
    for _ in range(60):
        shop.serve()
    assert 3 <= shop.started.count("b") / shop.started.count("a") <= 6


def test_time_spent_idle_is_not_banked() -> None:
    shop = Shop()
    shop.ask("b")
    shop.serve()
    shop.ask("a", times=40)
    for _ in range(20):
        shop.serve()
    shop.ask("b", times=40)
    shop.started.clear()
    for _ in range(10):
        shop.serve()
    assert shop.started.count("b") <= 6, "it took what it had not used while it was away"


def test_leaving_does_not_forgive_what_was_served() -> None:
    shop = Shop()
    shop.ask("b", times=30)
    shop.ask("a", times=1, output=20)
    for _ in range(21):
        shop.serve()  # a has been served 20 tokens at once, and is gone now
    shop.ask("a", times=10)
    shop.started.clear()
    for _ in range(6):
        shop.serve()
    assert shop.started.count("a") <= 1


def test_nothing_is_wasted_for_fairness() -> None:
    shop = Shop(slots=4)
    shop.ask("a", times=8, output=2)
    assert len(shop.serve()) == 4, "all slots go to the only tenant there is"


def test_counters_of_tenants_that_left_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ABSENT", 10)
    shop = Shop()
    shop.ask("z", times=1000)
    for number in range(100):
        request = make_request(f"x{number}", [1], max_tokens=1, tenant=f"tenant {number}")
        shop.scheduler.submit(request, 0.0)
        shop.scheduler.abort(request.id)
    assert len(shop.fair.served) <= 12
    assert set(shop.fair.present) == {"z"}


@examples(15, of=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.sampled_from([8, 30, 64]),
    st.sampled_from([12, 64]),
)
def test_the_gap_between_backlogged_tenants_stays_within_its_bound(
    seed: int, slots: int, budget: int, blocks: int
) -> None:
    """What is charged at once for a prompt, and what all slots may still say when they belong to one tenant."""
    rng = random.Random(seed)
    shop = Shop(slots, budget, blocks)
    longest_prompt, longest_output = 12, 9
    bound = Fair.PROMPT_PRICE * longest_prompt + Fair.OUTPUT_PRICE * slots * longest_output
    for tenant in "abc":
        shop.ask(tenant, prompt=rng.randint(1, longest_prompt), output=rng.randint(1, longest_output))
    for _ in range(150):
        for tenant in "abc":  # somebody of each always waits
            while sum(request.tenant == tenant for request in shop.scheduler.waiting) < 2:
                shop.ask(tenant, prompt=rng.randint(1, longest_prompt), output=rng.randint(1, longest_output))
        shop.serve()
        charged = [shop.fair.charged(tenant) for tenant in "abc"]
        assert max(charged) - min(charged) <= bound
        owed = sum(shop.fair.owed.values())
        left = sum(max(0, r.prompt_len - r.planned) for r in shop.scheduler.running)
        assert owed <= left or any(r.preemptions for r in shop.scheduler.requests.values())
        assert owed == left or any(r.preemptions or r.planned == r.prompt_len - 1 for r in shop.scheduler.running)


# ---- several engines ------------------------------------------------------------------------------------------------


def test_what_other_engines_computed_counts() -> None:
    shop = Shop()
    shop.ask("a", times=3)
    shop.ask("b", times=3)
    shop.fair.served_elsewhere({"a": 100.0})
    assert [shop.serve() for _ in range(6)] == [["b"], ["b"], ["b"], ["a"], ["a"], ["a"]]


def test_a_tenant_that_is_busy_elsewhere_is_present_here() -> None:
    """One that comes now begins where that one is: idle time is not saved up, on whichever engine."""
    shop = Shop()
    shop.fair.served_elsewhere({"a": 0.0})
    shop.fair.served_elsewhere({"a": 50.0})
    shop.ask("b")
    assert shop.fair.served["b"] == 50.0
    shop.ask("a")
    assert shop.fair.served["a"] == 50.0, "it was never away"
    shop.fair.served_elsewhere({})
    shop.ask("c")
    assert shop.fair.served["c"] == 50.0


def test_the_service_that_others_are_told_is_what_was_charged() -> None:
    shop = Shop(slots=4)
    assert shop.fair.take_service() == {}
    shop.ask("a", times=2, prompt=3, output=2)
    shop.ask("b", prompt=5)
    told: dict[str, float] = {}
    while not shop.scheduler.idle:
        shop.serve()
        for tenant, amount in shop.fair.take_service().items():
            told[tenant] = told.get(tenant, 0.0) + amount
    assert told == {"a": 2 * (3 + 2 * 2.0), "b": 5 + 2.0}
    assert shop.fair.take_service() == {}, "no tenant is here, and all was told"
