"""Who goes first, and who gives way."""

import pytest

from shoal.config.engine import EngineConfig
from shoal.core.request import State
from shoal.errors import BadConfig
from shoal.sched.scheduler import Scheduler
from tests.fakes import VOCAB, FakeExecutor, make_request, make_scheduler


def admitted(scheduler: Scheduler, executor: FakeExecutor, now_s: float) -> list[str]:
    """Who starts in the next pass, which is run to its end."""
    plan = scheduler.plan(now_s)
    assert plan is not None
    executor.forward(plan)
    executor.sample(None)
    return [one.id for one in scheduler.commit(executor.result(), now_s).admitted]


def one_at_a_time(age_s: float) -> tuple[Scheduler, FakeExecutor]:
    scheduler = make_scheduler(order="priority", age_s=age_s, max_num_seqs=1)
    return scheduler, FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)


def test_the_lowest_number_goes_first_and_ties_go_by_arrival() -> None:
    scheduler, executor = one_at_a_time(age_s=1e6)
    for number, priority in enumerate([5, 0, -3, 0, 5]):
        scheduler.submit(make_request(f"r{number}", [1], max_tokens=1, priority=priority), now_s=float(number))
    assert [admitted(scheduler, executor, 9.0) for _ in range(5)] == [["r2"], ["r1"], ["r3"], ["r0"], ["r4"]]


def test_waiting_makes_up_for_a_higher_number() -> None:
    scheduler, executor = one_at_a_time(age_s=10.0)
    scheduler.submit(make_request("patient", [1], max_tokens=1, priority=2), now_s=0.0)
    scheduler.submit(make_request("early", [1], max_tokens=1, priority=0), now_s=19.0)
    scheduler.submit(make_request("late", [1], max_tokens=1, priority=0), now_s=21.0)
    assert [admitted(scheduler, executor, 30.0) for _ in range(3)] == [["early"], ["patient"], ["late"]]


def test_a_stream_of_urgent_requests_starves_no_other() -> None:
    scheduler, executor = one_at_a_time(age_s=10.0)
    scheduler.submit(make_request("patient", [1], max_tokens=1, priority=3), now_s=0.0)
    started: list[str] = []
    for second in range(60):
        scheduler.submit(make_request(f"u{second}", [1], max_tokens=1, priority=0), now_s=float(second))
        started += admitted(scheduler, executor, float(second))
        if "patient" in started:
            break
    assert len(started) <= 32, "it waited longer than three steps of ten seconds"


def test_the_least_urgent_is_preempted() -> None:
    scheduler = make_scheduler(order="priority", blocks=6, block_size=2, watermark=0.0, max_num_batched_tokens=30)
    scheduler, executor = scheduler, FakeExecutor(6, 2)
    for id, priority in (("a", 0), ("b", 9), ("c", 0)):
        scheduler.submit(make_request(id, [1, 2, 3], max_tokens=5, priority=priority), now_s=0.0)
    lost = []
    while not scheduler.idle:
        plan = scheduler.plan(1.0)
        assert plan is not None
        executor.forward(plan)
        executor.sample(None)
        lost += [one.id for one in scheduler.commit(executor.result(), 1.0).preempted]
    assert lost
    assert lost[0] == "b", "the least urgent loses its blocks first, though it is not the newest"


def test_urgent_requests_do_not_preempt_running_ones() -> None:
    scheduler, executor = one_at_a_time(age_s=10.0)
    slow = make_request("slow", [1], max_tokens=4, priority=9)
    scheduler.submit(slow, now_s=0.0)
    admitted(scheduler, executor, 0.0)
    scheduler.submit(make_request("urgent", [1], max_tokens=1, priority=-9), now_s=1.0)
    assert admitted(scheduler, executor, 1.0) == []
    assert slow.state is State.RUNNING


def test_an_age_that_means_nothing_is_refused() -> None:
    for age in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadConfig, match="priority_age"):
            EngineConfig(order="priority", priority_age=age)


def short_first(age: float = 1.0) -> tuple[Scheduler, FakeExecutor]:
    scheduler = make_scheduler(order="sjf", age_s=age, max_num_seqs=1, max_num_batched_tokens=64)
    return scheduler, FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)


def test_the_shortest_work_goes_first() -> None:
    scheduler, executor = short_first()
    scheduler.submit(make_request("long prompt", [1] * 40, max_tokens=1), now_s=0.0)
    scheduler.submit(make_request("long answer", [1], max_tokens=30), now_s=0.0)
    scheduler.submit(make_request("short", [1], max_tokens=1), now_s=1.0)
    assert admitted(scheduler, executor, 2.0) == ["short"]
    assert admitted(scheduler, executor, 2.0) == ["long prompt"]
    assert admitted(scheduler, executor, 2.0) == ["long answer"]


def test_long_work_that_has_waited_goes_before_short_work() -> None:
    scheduler, executor = short_first(age=10.0)
    scheduler.submit(make_request("long", [1], max_tokens=30), now_s=0.0)
    scheduler.submit(make_request("short", [1], max_tokens=1), now_s=50.0)
    assert admitted(scheduler, executor, 60.0) == ["long"]


def test_what_answers_were_like_is_learned() -> None:
    """All may say 30 tokens; tenant "brief" never does."""
    scheduler, executor = short_first()
    anything = frozenset(range(VOCAB))  # ends it
    for number in range(20):
        scheduler.submit(make_request(f"b{number}", [1], max_tokens=30, tenant="brief", stop_ids=anything), now_s=0.0)
    for _ in range(20):
        admitted(scheduler, executor, 0.0)
    scheduler.submit(make_request("unknown", [1], max_tokens=30), now_s=0.0)
    scheduler.submit(make_request("known", [1], max_tokens=30, tenant="brief"), now_s=1.0)
    assert admitted(scheduler, executor, 2.0) == ["known"]
