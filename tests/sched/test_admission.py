"""Who is taken in: full queues, deadlines, jobs taken whole or not at all, and requests that bring what they said."""

import argparse
import math

import pytest

from shoal.config.engine import EngineConfig, add_flags
from shoal.core.clock import VirtualClock
from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.request import Group, Reason, Request, State
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig, BadParameter, BadRequest, EngineError, PromptTooLong, QueueFull
from shoal.sched.admission import Pace
from shoal.sched.scheduler import Scheduler
from tests.fakes import FakeExecutor, FakeGrammar, make_request, make_scheduler, oracle


def started(**config: object) -> tuple[Scheduler, FakeExecutor]:
    scheduler = make_scheduler(**config)  # type: ignore[arg-type]
    return scheduler, FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)


def begin(scheduler: Scheduler, executor: FakeExecutor, now_s: float = 0.0) -> bool:
    plan = scheduler.plan(now_s)
    if plan is not None:
        executor.forward(plan)
        executor.sample(scheduler.masks())
    return plan is not None


def step(scheduler: Scheduler, executor: FakeExecutor, now_s: float = 0.0) -> PassEvents:
    assert begin(scheduler, executor, now_s)
    events = scheduler.commit(executor.result(), now_s)
    scheduler.check()
    return events


def ends(events: PassEvents) -> list[tuple[str, Reason]]:
    return [(end.id, end.reason) for end in events.finished]


# ---- the queue ------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    scheduler = make_scheduler(max_queue=2)
    for name in "ab":
        scheduler.submit(make_request(name, [1]), 0.0)
    with pytest.raises(QueueFull, match=r"2 requests wait already, and at most 2 may.*--max-queue") as refused:
        scheduler.submit(make_request("c", [1]), 0.0)
    assert refused.value.retry_after_s == 1.0, "nobody has ended yet, so nobody knows"
    assert list(scheduler.requests) == ["a", "b"]
    told = scheduler.take_events(0.0)
    assert told.arrived == ["a", "b"]
    assert [(one.id, one.kind, one.retry_after_s) for one in told.rejected] == [("c", "QueueFull", 1.0)]
    scheduler.check()


def test_who_runs_does_not_count_as_waiting() -> None:
    scheduler, executor = started(max_queue=1, max_num_seqs=1)
    scheduler.submit(make_request("a", [1]), 0.0)
    step(scheduler, executor)
    scheduler.submit(make_request("b", [1]), 0.0)
    with pytest.raises(QueueFull):
        scheduler.submit(make_request("c", [1]), 0.0)
    scheduler.finish("a", Reason.ABORT)
    step(scheduler, executor)
    scheduler.submit(make_request("c", [1]), 0.0)


def test_no_limit_is_no_limit() -> None:
    scheduler = make_scheduler(max_queue=0)
    for number in range(5000):
        scheduler.submit(make_request(str(number), [1]), 0.0)
    assert len(scheduler.waiting) == 5000


def test_who_lost_its_blocks_takes_no_newcomers_place_and_is_never_refused() -> None:
    scheduler, executor = started(
        blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0, max_num_seqs=2, max_queue=2
    )
    victim = make_request("victim", [2] * 7, max_tokens=8)
    scheduler.submit_all([make_request("old", [1] * 8, max_tokens=8), victim], 0.0)
    step(scheduler, executor)
    scheduler.submit(make_request("waits", [3]), 0.0)
    step(scheduler, executor)
    assert victim.state is State.WAITING
    assert len(scheduler.waiting) == 2
    scheduler.submit(make_request("one more", [3]), 0.0)
    with pytest.raises(QueueFull, match="2 requests wait"):
        scheduler.submit(make_request("too many", [3]), 0.0)
    while not scheduler.idle:
        step(scheduler, executor)
    assert victim.reason is Reason.LENGTH


def test_pace_is_two_a_second() -> None:
    pace = Pace()
    for tick in range(20):
        pace.note(1, tick / 2)
    assert pace.wait_s(10, 9.5) == pytest.approx(5.0)
    assert pace.wait_s(1, 9.5) == 1.0, "at least a second"
    assert pace.wait_s(10_000, 9.5) == 60.0, "at most a minute"
    assert pace.wait_s(10, 19.0) == pytest.approx(10.0), "nobody has ended since: it is half as fast"


def test_what_ended_long_ago_says_nothing() -> None:
    pace = Pace()
    assert pace.wait_s(50, 0.0) == 1.0
    pace.note(1, 0.0)
    assert pace.wait_s(50, 10.0) == 1.0, "one end is no pace"
    pace.note(1, 20.0)
    assert pace.wait_s(2, 20.0) == pytest.approx(40.0)
    assert pace.wait_s(2, 1000.0) == 1.0


def test_the_queue_tells_by_how_fast_it_moves() -> None:
    scheduler, executor = started(max_num_seqs=1, max_queue=3)
    for number in range(3):
        scheduler.submit(make_request(str(number), [1], max_tokens=1), 0.0)
    for number in range(3, 9):
        step(scheduler, executor, now_s=4.0 * number)  # one ends every four seconds
        scheduler.submit(make_request(str(number), [1], max_tokens=1), 4.0 * number)
    with pytest.raises(QueueFull) as refused:
        scheduler.submit_all([make_request(f"n{one}", [1]) for one in range(2)], 32.0)
    assert refused.value.retry_after_s == pytest.approx(8.0), "two must start first"


# ---- all or none ----------------------------------------------------------------------------------------------------


def job(name: str, n: int, prompt: list[int], **more: object) -> list[Request]:
    group = Group(name)
    return [make_request(f"{name}.{one}", prompt, sample=one, group=group, **more) for one in range(n)]  # type: ignore[arg-type]


def test_a_job_that_does_not_fit_the_queue_whole_is_refused_whole() -> None:
    scheduler = make_scheduler(max_queue=4)
    scheduler.submit_all(job("first", 2, [1]), 0.0)
    refused = job("second", 3, [1])
    with pytest.raises(QueueFull):
        scheduler.submit_all(refused, 0.0)
    assert len(scheduler.waiting) == 2
    assert {request.order for request in refused} == {-1}
    assert [one.id for one in scheduler.take_events(0.0).rejected] == ["second.0", "second.1", "second.2"]
    scheduler.submit_all(job("third", 2, [1]), 0.0)
    scheduler.check()


def test_a_job_larger_than_the_queue_can_ever_be_is_a_bad_request() -> None:
    scheduler = make_scheduler(max_queue=2)
    with pytest.raises(BadParameter, match="n is 3, but only 2 requests may wait; lower n or raise --max-queue"):
        scheduler.submit_all(job("a", 3, [1]), 0.0)
    assert scheduler.idle


def test_one_bad_member_refuses_all_and_nothing_has_moved() -> None:
    scheduler = make_scheduler(max_model_len=20)
    good = Request("good", [1], SamplingParams(), tenant="a", timeout_s=5.0)
    with pytest.raises(PromptTooLong):
        scheduler.submit_all([good, make_request("bad", [1] * 30)], 0.0)
    assert scheduler.idle
    assert (good.max_tokens, good.order, good.deadline_s) == (0, -1, math.inf)
    assert scheduler.tables.deadlines.next_s() is None
    scheduler.check()
    scheduler.submit(good, 1.0)
    assert (good.max_tokens, good.order, good.deadline_s) == (19, 0, 6.0)


def test_an_id_twice_in_a_job_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(EngineError, match="'a' is in use"):
        scheduler.submit_all([make_request("a", [1]), make_request("a", [1])], 0.0)
    scheduler.submit(make_request("a", [1]), 0.0)
    with pytest.raises(EngineError, match="'a' is in use"):
        scheduler.submit_all([make_request("b", [1]), make_request("a", [1])], 0.0)
    assert list(scheduler.requests) == ["a"]
    scheduler.submit_all([], 0.0)


# ---- deadlines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, math.nan, math.inf, -math.inf, 1e9, 10**400, True, "5", [1]])
def test_a_timeout_that_means_nothing_is_refused(timeout_s: object) -> None:
    scheduler = make_scheduler()
    with pytest.raises(BadParameter, match="timeout must be"):
        scheduler.submit(make_request("a", [1], timeout_s=timeout_s), 0.0)
    assert scheduler.idle


def test_a_request_that_waits_past_its_timeout_is_refused_with_how_long_it_waited() -> None:
    scheduler, executor = started(max_num_seqs=1)
    scheduler.submit(make_request("runs", [1]), 10.0)
    scheduler.submit(make_request("late", [1], timeout_s=2.0), 10.0)
    scheduler.submit(make_request("patient", [1], timeout_s=9.0), 10.0)
    assert step(scheduler, executor, 11.999).rejected == []
    told = step(scheduler, executor, 12.0)
    assert ends(told) == [("late", Reason.REJECTED)]
    (refused,) = told.rejected
    assert (refused.id, refused.kind) == ("late", "DeadlinePassed")
    assert refused.message.startswith("no token after 2.0 s, and its timeout is 2 s; raise timeout")
    assert told.finished[0].error == refused.message
    assert set(scheduler.requests) == {"runs", "patient"}


def test_who_computes_its_prompt_past_its_timeout_is_refused_and_its_blocks_are_free() -> None:
    scheduler, executor = started(max_num_batched_tokens=4)
    scheduler.submit(make_request("a", [1] * 20, timeout_s=2.0), 0.0)
    step(scheduler, executor, 1.0)
    assert scheduler.kv.pool.held > 0
    assert not begin(scheduler, executor, 2.0)
    assert scheduler.idle
    assert scheduler.kv.pool.held == 0
    told = scheduler.take_events(2.0)
    assert ends(told) == [("a", Reason.REJECTED)]
    assert [one.kind for one in told.rejected] == ["DeadlinePassed"]
    scheduler.check()


def test_a_first_token_that_is_still_on_the_way_comes_too_late() -> None:
    scheduler, executor = started()
    scheduler.submit(make_request("a", [1], timeout_s=2.0), 0.0)
    scheduler.submit(make_request("b", [2], max_tokens=3), 0.0)
    assert begin(scheduler, executor, 1.0)
    assert begin(scheduler, executor, 2.0), "b goes on"
    told = scheduler.commit(executor.result(), 2.5)
    assert told.owners == ["b"]
    assert ends(told) == [("a", Reason.REJECTED)]
    assert scheduler.commit(executor.result(), 3.0).owners == ["b"]
    scheduler.check()


def test_output_before_a_timeout_is_kept() -> None:
    scheduler, executor = started()
    scheduler.submit(make_request("a", [1, 2], max_tokens=50, timeout_s=2.0), 0.0)
    said = [step(scheduler, executor, 0.5 * number).tokens for number in range(3)]
    assert not begin(scheduler, executor, 2.0)
    told = scheduler.take_events(2.0)
    assert ends(told) == [("a", Reason.TIMEOUT)]
    assert told.rejected == []
    assert told.finished[0].outputs == 3
    assert [token for tokens in said for token in tokens] == oracle([1, 2], 3, frozenset(), 0, 0)
    assert scheduler.kv.pool.held == 0


def test_who_lost_its_blocks_still_has_its_deadline() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0)
    scheduler.submit(make_request("old", [1] * 8, max_tokens=8), 0.0)
    victim = make_request("victim", [2] * 7, max_tokens=8, timeout_s=5.0)
    scheduler.submit(victim, 0.0)
    step(scheduler, executor, 1.0)
    step(scheduler, executor, 2.0)
    assert victim.state is State.WAITING
    assert ends(step(scheduler, executor, 5.0)) == [("victim", Reason.TIMEOUT)]
    assert victim.outputs == 1


def test_the_longest_wait_is_for_requests_that_never_started() -> None:
    scheduler, executor = started(max_num_seqs=1, max_wait_s=3.0)
    scheduler.submit(make_request("runs", [1], max_tokens=50), 0.0)
    step(scheduler, executor, 1.0)
    scheduler.submit(make_request("waits", [1]), 1.0)
    assert step(scheduler, executor, 3.999).finished == []
    told = step(scheduler, executor, 4.0)
    assert ends(told) == [("waits", Reason.REJECTED)]
    assert told.rejected[0].message.startswith("not started after 3.0 s, and the longest wait is 3 s; try again")
    assert "raise --max-wait" in told.rejected[0].message
    assert 1 <= (told.rejected[0].retry_after_s or 0) <= 60
    assert list(scheduler.requests) == ["runs"]


def test_who_started_in_time_and_lost_its_blocks_may_wait_on() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0, max_wait_s=3.0)
    scheduler.submit(make_request("old", [1] * 8, max_tokens=8), 0.0)
    victim = make_request("victim", [2] * 7, max_tokens=8, timeout_s=100.0)
    scheduler.submit(victim, 0.0)
    step(scheduler, executor, 1.0)
    step(scheduler, executor, 2.0)
    assert victim.state is State.WAITING
    while not scheduler.idle:
        step(scheduler, executor, 50.0)
    assert victim.reason is Reason.LENGTH


def test_a_request_that_started_in_time_and_was_preempted_before_its_first_token_may_wait_on() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=10, watermark=0, max_wait_s=3.0)
    scheduler.submit(make_request("old", [1] * 8, max_tokens=8), 0.0)
    victim = make_request("victim", [2] * 8, max_tokens=8, timeout_s=100.0)
    scheduler.submit(victim, 0.0)
    step(scheduler, executor, 1.0)
    step(scheduler, executor, 2.0)
    assert (victim.state, victim.outputs) == (State.WAITING, 0)
    while not scheduler.idle:
        step(scheduler, executor, 50.0)
    assert victim.reason is Reason.LENGTH


def test_a_timeout_holds_beside_the_longest_wait() -> None:
    scheduler, executor = started(max_wait_s=3.0)
    scheduler.submit(make_request("a", [1], max_tokens=50, timeout_s=5.0), 0.0)
    step(scheduler, executor, 1.0)
    step(scheduler, executor, 4.0)
    assert not begin(scheduler, executor, 5.0)
    assert ends(scheduler.take_events(5.0)) == [("a", Reason.TIMEOUT)]


def test_a_late_member_of_a_group_is_reported_with_its_group() -> None:
    scheduler, executor = started(batching="static", group_size=2)
    scheduler.submit(make_request("late", [1], max_tokens=50, timeout_s=2.0), 0.0)
    scheduler.submit(make_request("long", [1], max_tokens=5), 0.0)
    for number in range(4):
        assert step(scheduler, executor, float(number)).finished == [], "a group is answered when it ends"
    told = step(scheduler, executor, 4.0)
    assert ends(told) == [("late", Reason.TIMEOUT), ("long", Reason.LENGTH)]
    assert told.owners.count("late") == 2


def test_no_request_is_late_twice_and_the_ended_are_never_late() -> None:
    scheduler, executor = started(max_wait_s=1.0)
    for name in "abc":
        scheduler.submit(make_request(name, [1], timeout_s=1.0), 0.0)
    scheduler.finish("a", Reason.ABORT)
    scheduler.expire(1.0)
    scheduler.expire(1.0)
    assert not begin(scheduler, executor, 2.0)
    told = scheduler.take_events(2.0)
    assert ends(told) == [("a", Reason.ABORT), ("b", Reason.REJECTED), ("c", Reason.REJECTED)]


def test_deadlines_of_the_ended_are_not_kept() -> None:
    """A long timeout must not keep every request of its last hour in memory."""
    scheduler = make_scheduler()
    scheduler.submit(make_request("stays", [1], timeout_s=1e6), 0.0)
    for number in range(3000):
        scheduler.submit(make_request(str(number), [1], timeout_s=1e6), 0.0)
        scheduler.finish(str(number), Reason.ABORT)
        scheduler.tables.deadlines.check(scheduler.requests.values())
    assert scheduler.wake_s(0.0) == 1e6
    scheduler.finish("stays", Reason.ABORT)
    assert scheduler.wake_s(0.0) is None


def test_requests_that_started_in_time_leave_no_heap_behind() -> None:
    scheduler, executor = started(max_wait_s=10.0, max_num_seqs=100, blocks=200, max_num_batched_tokens=1000)
    for number in range(100):
        scheduler.submit(make_request(f"runs {number}", [1], max_tokens=50), 0.0)
    step(scheduler, executor, 0.0)
    for number in range(260):
        scheduler.submit(make_request(f"gone {number}", [1]), 5.0)
        scheduler.finish(f"gone {number}", Reason.ABORT)
        scheduler.check()
    assert step(scheduler, executor, 11.0).rejected == []
    assert scheduler.wake_s(11.0) is None, "all have started"


# ---- a loop that sleeps ---------------------------------------------------------------------------------------------


def sleeper(**config: object) -> EngineLoop:
    """Its requests wait for a group that does not fill."""
    scheduler, executor = started(batching="static", group_size=4, **config)
    scheduler.more_coming = True
    return EngineLoop(scheduler, executor, VirtualClock(), check=True)


def test_a_sleeping_loop_wakes_for_a_deadline() -> None:
    loop = sleeper(max_wait_s=7.0)
    loop.submit(make_request("soon", [1], timeout_s=3.0))
    loop.submit(make_request("later", [1]))
    found: list[tuple[float, str]] = []
    for _ in range(4):
        found += [(loop.clock.now_s(), end.id) for end in loop.step().finished]
    assert found == [(3.0, "soon"), (7.0, "later")]
    assert loop.idle


def test_a_sleeping_loop_does_not_wait_beyond_its_limit() -> None:
    loop = sleeper()
    loop.submit(make_request("a", [1], timeout_s=3.0))
    loop.step(until_s=2.0)
    assert loop.clock.now_s() == 2.0
    loop.step(until_s=50.0)
    assert loop.clock.now_s() == 3.0
    assert ends(loop.step(until_s=50.0)) == [("a", Reason.REJECTED)]
    assert loop.clock.now_s() == 3.0, "what has happened is told before it sleeps again"


def test_a_group_whose_last_members_were_late_is_reported_at_once() -> None:
    scheduler, executor = started(batching="static", group_size=2)
    scheduler.more_coming = True
    clock = VirtualClock()
    loop = EngineLoop(scheduler, executor, clock, depth=1, check=True)
    for name in "ab":
        loop.submit(make_request(name, [1], max_tokens=50, timeout_s=2.0))
    loop.submit(make_request("waits for a second", [1], timeout_s=100.0))
    assert loop.step().finished == []
    clock.advance(5.0)
    assert ends(loop.step()) == [("a", Reason.TIMEOUT), ("b", Reason.TIMEOUT)]
    assert clock.now_s() == 5.0


# ---- requests that were accepted before -----------------------------------------------------------------------------


def test_who_resumes_is_refused_by_no_limit() -> None:
    scheduler = make_scheduler(max_queue=1)
    for name in "abc":
        scheduler.submit(make_request(name, [1] * 9, tenant="t", output=[3]), 0.0, resumed=True)
    assert len(scheduler.waiting) == 3
    scheduler.check()


def test_who_resumes_takes_no_newcomers_place() -> None:
    """Before the restart they ran, or waited within the limit; who came during it must not pay for that."""
    scheduler = make_scheduler(max_queue=1)
    for name in "abc":
        scheduler.submit(make_request(name, [1]), 0.0, resumed=True)
    scheduler.submit(make_request("new", [1]), 0.0)
    with pytest.raises(QueueFull, match="1 requests wait"):
        scheduler.submit(make_request("newer", [1]), 0.0)
    scheduler.check()
    for name in "abc":
        scheduler.abort(name)
    scheduler.check()
    assert scheduler.waiting.newcomers == 1


def test_a_wait_at_the_front_counts_for_timeouts_and_for_the_longest_wait() -> None:
    scheduler, _ = started(max_wait_s=5.0)
    scheduler.submit(make_request("impatient", [1], timeout_s=4.0, waited_s=3.0), 10.0)
    scheduler.submit(make_request("waited", [1], waited_s=3.0), 10.0)
    scheduler.submit(make_request("resumed", [1], waited_s=3.0), 10.0, resumed=True)
    scheduler.submit(make_request("new", [1]), 10.0)
    assert scheduler.take_events(10.0).arrived_s == [7.0, 7.0, 7.0, 10.0]
    expired = []
    for now_s in (10.9, 11.0, 11.9, 12.0, 14.9, 15.0):
        scheduler.expire(now_s)
        scheduler.check()
        expired.append([(one.id, one.message.partition(",")[0]) for one in scheduler.take_events(now_s).rejected])
    assert expired == [
        [],
        [("impatient", "no token after 4.0 s")],
        [],
        [("waited", "not started after 5.0 s")],
        [],
        [("resumed", "not started after 8.0 s"), ("new", "not started after 5.0 s")],
    ]


def test_who_resumes_with_output_is_not_bound_by_the_longest_wait() -> None:
    scheduler, _ = started(max_wait_s=1.0)
    scheduler.submit(make_request("has begun", [1], output=[3]), 0.0, resumed=True)
    scheduler.submit(make_request("had not", [1]), 0.0, resumed=True)
    scheduler.expire(1.0)
    assert list(scheduler.requests) == ["has begun"]


def test_who_resumes_and_is_late_keeps_what_it_brought() -> None:
    scheduler, _ = started()
    scheduler.submit(make_request("a", [1], output=[3, 4], timeout_s=1.0), 0.0, resumed=True)
    scheduler.expire(1.0)
    (end,) = scheduler.take_events(1.0).finished
    assert (end.reason, end.outputs) == (Reason.TIMEOUT, 2)


@pytest.mark.parametrize("memory", ["ondemand", "reserve", "predict"])
@pytest.mark.parametrize("cut", range(8))
def test_wherever_a_run_is_cut_the_rest_is_the_same(cut: int, memory: str) -> None:
    """Its fifth token would stop it if it were not for min_tokens, its eighth does."""
    prompt, stop, params = [3, 1, 2] * 4, frozenset(range(0, 50, 4)), SamplingParams(max_tokens=9, min_tokens=6)
    want = oracle(prompt, 9, stop, 14, 1, min_tokens=6)
    assert [place for place, token in enumerate(want) if token in stop] == [4, 7]
    scheduler, executor = started(memory=memory, block_size=2)
    request = make_request("a", prompt, params=params, seed=14, sample=1, stop_ids=stop, output=want[:cut])
    scheduler.submit(request, 0.0, resumed=True)
    told, indexes = [], []
    while not scheduler.idle:
        events = step(scheduler, executor)
        told += events.tokens
        indexes += events.indexes
    assert want[:cut] + told == want
    assert indexes == list(range(cut, len(want)))


def test_what_one_brought_is_cached_for_the_next() -> None:
    scheduler, executor = started(block_size=2, max_num_batched_tokens=100)
    want = oracle([1, 2, 3], 8, frozenset(), 0, 0)
    scheduler.submit(make_request("a", [1, 2, 3], output=want[:5]), 0.0, resumed=True)
    while not scheduler.idle:
        step(scheduler, executor)
    again = make_request("b", [1, 2, 3], output=want[:5])
    scheduler.submit(again, 0.0, resumed=True)
    events = step(scheduler, executor)
    assert events.admitted[0].cached_tokens == 6, "three of the four blocks; one position is left to compute"
    assert again.cached_tokens == 3, "of its prompt"


def test_prompt_logprobs_are_not_reported_twice() -> None:
    scheduler, executor = started()
    params = SamplingParams(max_tokens=5, prompt_logprobs=1)
    scheduler.submit(make_request("a", [1, 2, 3], params=params, output=[4]), 0.0, resumed=True)
    assert step(scheduler, executor).prompt_logprobs == {}
    scheduler.submit(make_request("b", [1, 2, 3], params=params), 0.0, resumed=True)
    assert list(step(scheduler, executor).prompt_logprobs) == ["b"]


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ([1, 2, 3, 4], "has 4 output tokens already and max_tokens is 4"),
        ([1, 2, 3, 4, 5], "has 5 output tokens already"),
        ([1, 2, 7], "last token 7 is a stop token"),
        ([1, 99], "token id 99"),
        ([-2], "token id -2"),
    ],
)
def test_a_request_that_has_ended_is_refused(output: list[int], says: str) -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1], 4, output=output, stop_ids=frozenset({7}))
    with pytest.raises(BadRequest, match=says):
        scheduler.submit(request, 0.0, resumed=True)
    assert scheduler.idle


def test_a_request_whose_grammar_has_ended_is_refused() -> None:
    scheduler = make_scheduler()
    grammar = FakeGrammar(seed=3, length=2)
    output = [grammar.allowed()[0]]
    assert grammar.accept(output[0])
    going_on = make_request("a", [1], output=output, grammar=grammar)
    scheduler.submit(going_on, 0.0, resumed=True)
    scheduler.finish("a", Reason.ABORT)
    output.append(grammar.allowed()[0])
    assert grammar.accept(output[1])
    with pytest.raises(BadRequest, match="allows no further token"):
        scheduler.submit(make_request("b", [1], output=output, grammar=grammar), 0.0, resumed=True)
    params = SamplingParams(max_tokens=9, min_tokens=5)
    ended = make_request(
        "c", [1], params=params, output=[7], stop_ids=frozenset({7}), grammar=FakeGrammar(seed=3, length=9)
    )
    with pytest.raises(BadRequest, match="stop token"):  # where a grammar may end, min_tokens does not hold it up
        scheduler.submit(ended, 0.0, resumed=True)


def test_a_stop_token_before_min_tokens_has_ended_nothing() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=4, min_tokens=2)
    scheduler.submit(make_request("a", [1], params=params, output=[7], stop_ids=frozenset({7})), 0.0, resumed=True)
    assert not scheduler.idle


# ---- options --------------------------------------------------------------------------------------------------------


def test_every_rule_has_its_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = "--max-queue 5 --max-wait 2.5"
    config = EngineConfig.from_args(parser.parse_args(flags.split()))
    assert (config.max_queue, config.max_wait) == (5, 2.5)
    assert EngineConfig().max_queue == 0, "a program that brings ten thousand prompts is not a stranger"


@pytest.mark.parametrize(
    "options",
    [
        {"max_queue": -1},
        {"max_wait": 0.0},
        {"max_wait": -1.0},
        {"max_wait": math.nan},
        {"max_wait": math.inf},
        {"max_queue": 1.5},
    ],
)
def test_a_rule_that_means_nothing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadConfig, match=next(iter(options))):
        EngineConfig.from_mapping(options)
