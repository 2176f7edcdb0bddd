"""What the scheduler decides, one decision at a time."""

import numpy as np
import pytest

from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Group, IllegalMove, Reason, State
from shoal.errors import BadParameter, EmptyPrompt, EngineError, PromptTooLong
from shoal.sched.pass_builder import PassBuilder
from shoal.sched.scheduler import Scheduler
from tests.fakes import FakeExecutor, make_request, make_scheduler


def step(scheduler: Scheduler, executor: FakeExecutor) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    executor.forward(plan)
    scheduler.commit(executor.result(), 0.0)
    scheduler.check()
    return plan


def started(**config: int) -> tuple[Scheduler, FakeExecutor]:
    scheduler = make_scheduler(**config)  # type: ignore[arg-type]
    return scheduler, FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)


def test_decodes_go_first_then_prompt_chunks() -> None:
    scheduler, executor = started(max_num_batched_tokens=8)
    scheduler.submit(make_request("a", [1] * 3), 0.0)
    step(scheduler, executor)
    scheduler.submit(make_request("b", [2] * 20), 0.0)
    plan = step(scheduler, executor)
    assert plan.counts.tolist() == [1, 7]
    assert plan.draws.tolist() == [1, 0]
    assert step(scheduler, executor).counts.tolist() == [1, 7]
    plan = step(scheduler, executor)
    assert plan.counts.tolist() == [1, 6]
    assert plan.draws.tolist() == [1, 1]


def test_decodes_go_first_also_when_a_prompt_came_first() -> None:
    scheduler, executor = started(max_num_batched_tokens=6, chunk_tokens=4)
    scheduler.submit(make_request("long", [1] * 20), 0.0)
    scheduler.submit(make_request("short", [2]), 0.0)
    assert step(scheduler, executor).counts.tolist() == [4, 1]
    assert step(scheduler, executor).counts.tolist() == [1, 4]


def test_a_prompt_as_large_as_the_cache_starts_when_nothing_runs() -> None:
    scheduler, executor = started(blocks=10, block_size=4, watermark=0.2, max_num_batched_tokens=100)  # type: ignore[arg-type]
    scheduler.submit(make_request("huge", [1] * 40, max_tokens=1), 0.0)
    assert step(scheduler, executor).counts.tolist() == [40]


def test_no_request_starts_in_the_pass_that_took_blocks_from_another() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0)
    for name, prompt in (("old", [1] * 8), ("victim", [2] * 8), ("small", [3])):
        scheduler.submit(make_request(name, prompt, max_tokens=6), 0.0)
    step(scheduler, executor)
    plan = step(scheduler, executor)
    assert plan.rows.size == 1
    assert [r.id for r in scheduler.waiting] == ["victim", "small"]


def test_a_victims_share_of_the_budget_goes_to_others() -> None:
    """The victim stood in the batch already; what it would have computed is free again."""
    scheduler, executor = started(blocks=6, block_size=4, max_num_batched_tokens=9, watermark=0, chunk_tokens=8)
    scheduler.submit(make_request("old", [1] * 24, max_tokens=1), 0.0)
    step(scheduler, executor)
    batch = PassBuilder(9)
    request = next(iter(scheduler.running))
    batch.add(request, 5, prompt=True)
    batch.remove(request)
    assert (batch.left, batch.takes) == (9, {})


def test_a_new_leader_takes_over() -> None:
    scheduler, executor = started(block_size=4, max_num_batched_tokens=5)
    group = Group("g")
    for number in range(3):
        scheduler.submit(make_request(f"s{number}", [5] * 13, sample=number, group=group), 0.0)
    step(scheduler, executor)
    scheduler.finish("s0", Reason.ABORT)
    assert step(scheduler, executor).rows.size == 1
    assert group.leader is not None
    assert group.leader.id == "s1"
    assert step(scheduler, executor).rows.size == 1, "the third still waits for the second's blocks"


def test_first_come_first_served_and_no_request_overtakes() -> None:
    scheduler, executor = started(blocks=6, block_size=4, max_num_batched_tokens=100)
    scheduler.submit(make_request("a", [1] * 16, max_tokens=4), 0.0)
    scheduler.submit(make_request("too large for now", [2] * 12, max_tokens=4), 0.0)
    scheduler.submit(make_request("would fit", [3], max_tokens=4), 0.0)
    step(scheduler, executor)
    assert [r.id for r in scheduler.running] == ["a"]


def test_no_more_run_than_there_are_slots() -> None:
    scheduler, executor = started(max_num_seqs=2)
    for number in range(5):
        scheduler.submit(make_request(str(number), [1]), 0.0)
    assert step(scheduler, executor).rows.size == 2


def test_the_newest_is_preempted_and_keeps_its_place_in_the_queue() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0)
    old, new = make_request("old", [1] * 8, max_tokens=8), make_request("new", [2] * 7, max_tokens=8)
    scheduler.submit(old, 0.0)
    scheduler.submit(new, 0.0)
    scheduler.submit(make_request("newer still", [3], max_tokens=2), 0.0)
    step(scheduler, executor)
    assert {r.id for r in scheduler.running} == {"old", "new"}
    step(scheduler, executor)
    assert new.state is State.WAITING
    assert new.preemptions == 1
    assert new.outputs == 1, "what it has said is kept"
    assert [r.id for r in scheduler.waiting] == ["new", "newer still"]


def test_a_late_token_of_a_preempted_request_is_kept() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0)
    scheduler.submit(make_request("old", [1] * 8, max_tokens=8), 0.0)
    new = make_request("new", [2] * 7, max_tokens=8)
    scheduler.submit(new, 0.0)
    first = scheduler.plan(0.0)
    assert first is not None
    executor.forward(first)
    second = scheduler.plan(0.0)  # "old" needs a third block while the first pass is still under way
    assert second is not None
    executor.forward(second)
    assert new.state is State.WAITING
    assert new.pending == 1
    events = scheduler.commit(executor.result(), 0.0)
    assert "new" in events.owners
    assert new.outputs == 1
    scheduler.check()


def test_the_token_after_an_end_is_dropped() -> None:
    """Two passes in flight: the end is found when the first comes back, the second has computed one row in vain."""
    scheduler, executor = started()
    scheduler.submit(make_request("a", [1, 2], max_tokens=50, stop_ids=frozenset(range(50))), 0.0)
    for _ in range(2):
        plan = scheduler.plan(0.0)
        assert plan is not None
        executor.forward(plan)
    ended = scheduler.commit(executor.result(), 0.0)
    assert [end.reason for end in ended.finished] == [Reason.STOP]
    late = scheduler.commit(executor.result(), 0.0)
    assert late.tokens == []
    assert scheduler.idle
    scheduler.check()


def test_nothing_is_planned_past_max_tokens() -> None:
    scheduler, executor = started()
    scheduler.submit(make_request("a", [1, 2], max_tokens=1), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    executor.forward(plan)
    assert scheduler.plan(0.0) is None
    assert scheduler.commit(executor.result(), 0.0).finished[0].reason is Reason.LENGTH


def test_siblings_wait_for_the_leader_then_share_its_blocks() -> None:
    scheduler, executor = started(block_size=4, max_num_batched_tokens=100)
    group = Group("g")
    samples = [make_request(f"s{n}", [5] * 13, sample=n, group=group) for n in range(3)]
    for sample in samples:
        scheduler.submit(sample, 0.0)
    assert step(scheduler, executor).counts.tolist() == [13]
    plan = step(scheduler, executor)
    assert plan.counts.tolist() == [1, 1, 1], "12 of the 13 prompt tokens are shared"
    assert {tuple(s.holding.blocks[:3]) for s in samples} == {tuple(samples[0].holding.blocks[:3])}


def test_a_leader_that_goes_away_holds_no_member_up() -> None:
    scheduler, executor = started(block_size=4, max_num_batched_tokens=5)
    group = Group("g")
    for number in range(2):
        scheduler.submit(make_request(f"s{number}", [5] * 13, sample=number, group=group), 0.0)
    step(scheduler, executor)
    scheduler.finish("s0", Reason.ABORT)
    assert step(scheduler, executor).rows.size == 1


def test_an_aborted_request_gives_everything_back() -> None:
    scheduler, executor = started()
    scheduler.submit(make_request("a", [1] * 9), 0.0)
    step(scheduler, executor)
    assert scheduler.kv.pool.held > 0
    assert scheduler.finish("a", Reason.ABORT)
    assert not scheduler.finish("a", Reason.ABORT), "a second time there is nothing to end"
    assert scheduler.kv.pool.held == 0
    assert scheduler.take_events(0.0).finished[0].reason is Reason.ABORT
    scheduler.check()


def test_a_failed_row_ends_its_request_alone() -> None:
    scheduler, executor = started()
    for name in ("good", "bad"):
        scheduler.submit(make_request(name, [1]), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    executor.forward(plan)
    result = executor.result()
    broken = StepResult(
        result.step, result.rows, result.generations, result.accepted, result.tokens, failures=((1, "not finite"),)
    )
    events = scheduler.commit(broken, 0.0)
    assert [(end.id, end.reason, end.error) for end in events.finished] == [("bad", Reason.ERROR, "not finite")]
    assert not events.finished[0].kind, "the engine is to blame"
    assert events.owners == ["good"]


def test_only_a_request_that_breaks_a_pass_alone_ends() -> None:
    scheduler, executor = started(max_num_seqs=1)
    for name in ("in it", "waiting"):
        scheduler.submit(make_request(name, [1]), 0.0)
    scheduler.plan(0.0)
    events = scheduler.fail("the device is gone", 0.0)
    assert not events.finished, "once may be chance"
    scheduler.plan(0.0)
    events = scheduler.fail("the device is gone", 0.0)
    assert [(end.id, end.error) for end in events.finished] == [("in it", "the device is gone")]
    assert step(scheduler, executor).rows.size == 1


def test_an_answer_for_another_pass_is_noticed() -> None:
    scheduler, _ = started()
    scheduler.submit(make_request("a", [1]), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    wrong = StepResult(plan.step, plan.rows, plan.generations + 1, np.array([1]), np.array([1]))
    with pytest.raises(EngineError, match="other rows"):
        scheduler.commit(wrong, 0.0)


def test_no_request_hits_what_a_failed_one_computed() -> None:
    scheduler, executor = started(block_size=4, max_num_batched_tokens=8)
    scheduler.submit(make_request("bad", [7] * 13), 0.0)
    step(scheduler, executor)
    plan = scheduler.plan(0.0)
    assert plan is not None
    executor.forward(plan)
    result = executor.result()
    broken = StepResult(
        result.step, result.rows, result.generations, result.accepted, result.tokens, failures=((0, "not finite"),)
    )
    scheduler.commit(broken, 0.0)
    assert len(scheduler.kv.index) == 0
    scheduler.check()


def test_recomputed_tokens_are_counted() -> None:
    scheduler, executor = started(blocks=4, block_size=4, max_num_batched_tokens=100, watermark=0, keep=False)
    scheduler.submit(make_request("old", [1] * 8, max_tokens=8), 0.0)
    scheduler.submit(make_request("new", [2] * 7, max_tokens=8), 0.0)
    again = 0
    while not scheduler.idle:
        plan = scheduler.plan(0.0)
        assert plan is not None
        executor.forward(plan)
        again += scheduler.commit(executor.result(), 0.0).recomputed_tokens
    assert again == 7


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "says"),
    [
        ([], 4, EmptyPrompt, "no tokens"),
        ([1] * 30, 4, PromptTooLong, "30 tokens; the limit is 20"),
        ([1] * 15, 6, PromptTooLong, "lower max_tokens to 5"),
        ([50], 4, BadParameter, "token id 50"),
        ([-1], 4, BadParameter, "token id -1"),
    ],
)
def test_what_can_never_work_is_refused(prompt: list[int], max_tokens: int, error: type[Exception], says: str) -> None:
    scheduler = make_scheduler(max_model_len=20)
    with pytest.raises(error, match=says):
        scheduler.submit(make_request("a", prompt, max_tokens), 0.0)
    assert scheduler.idle


def test_a_request_larger_than_the_kv_cache_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(blocks=3, block_size=4, max_model_len=200)
    with pytest.raises(PromptTooLong, match=r"8 tokens, with its output 14; the whole KV cache holds 12"):
        scheduler.submit(make_request("a", [1] * 8, 6), 0.0)
    scheduler.submit(make_request("b", [1] * 8, 5), 0.0)  # its last token is never stored


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", [1]), 0.0)
    with pytest.raises(EngineError, match="in use"):
        scheduler.submit(make_request("a", [1]), 0.0)


def test_illegal_moves_are_refused() -> None:
    request = make_request("a", [1])
    request.move(State.FINISHED)
    with pytest.raises(IllegalMove, match="from finished to running"):
        request.move(State.RUNNING)
