"""The axes one by one: groups, rectangles, prompts and reservations, with numbers worked out by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from shoal.core.events import PassEvents
from shoal.core.plan import StepResult
from shoal.core.request import Group, Request
from shoal.sched.memory import Predict
from shoal.sched.scheduler import Scheduler
from tests.fakes import FakeExecutor, make_request, make_scheduler


class Blank(FakeExecutor):
    """Says 0 and keeps nothing: for runs whose tokens do not matter."""

    def result(self) -> StepResult:
        plan = self.queue.popleft()
        chosen = plan.draws > 0
        padded = (len(plan.rows) + plan.dead) * plan.width - len(plan.tokens) if plan.width else 0
        tokens = np.zeros(int(chosen.sum()), dtype=np.int64)
        return StepResult(
            plan.step, plan.rows[chosen], plan.generations[chosen], np.ones_like(tokens), tokens, padded=padded
        )


class Drive:
    """One scheduler with its fake device and a clock of its own."""

    def __init__(self, depth: int = 1, **config: object) -> None:
        roomy: dict[str, object] = {
            "blocks": 2000,
            "max_model_len": 9000,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4000,
        }
        self.scheduler: Scheduler = make_scheduler(**{**roomy, **config})  # type: ignore[arg-type]
        self.executor = FakeExecutor(self.scheduler.kv.pool.total, self.scheduler.kv.block_size)
        self.depth = depth
        self.now_s = 0.0
        self.checks = True

    def submit(self, prompt: int, output: int, name: str = "") -> Request:
        number = len(self.scheduler.requests)
        request = make_request(name or f"r{number}", [1 + number % 40] * prompt, output, seed=number)
        self.scheduler.submit(request, self.now_s)
        return request

    def turn(self) -> PassEvents | None:
        while len(self.scheduler.flights) < self.depth:
            plan = self.scheduler.plan(self.now_s)
            if plan is None:
                break
            self.executor.forward(plan)
        if not self.scheduler.flights:
            return None
        events = self.scheduler.commit(self.executor.result(), self.now_s)
        if self.checks:
            self.scheduler.check()
        return events

    def run(self) -> list[PassEvents]:
        found = []
        while not self.scheduler.idle:
            events = self.turn()
            assert events is not None
            found.append(events)
        return found


def totals(passes: Sequence[PassEvents]) -> tuple[int, int]:
    return sum(one.computed_tokens for one in passes), sum(one.padded_tokens for one in passes)


@pytest.mark.parametrize("depth", [1, 2])
def test_four_answers_of_400_50_200_and_30_use_680_of_1600_slots(depth: int) -> None:
    drive = Drive(depth, batching="static", group_size=4, layout="padded", prefill="inline", memory="reserve")
    for output in (400, 50, 200, 30):
        drive.submit(1, output)
    useful, padded = totals(drive.run())
    assert (useful, useful + padded) == (680, 1600)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_rectangle_that_shrinks_pads_nothing_when_all_decode(depth: int) -> None:
    drive = Drive(depth, batching="static", group_size=4, layout="shrink", prefill="inline", memory="reserve")
    for output in (400, 50, 200, 30):
        drive.submit(1, output)
    assert totals(drive.run()) == (680, 0)


def test_prompts_are_padded_to_the_longest() -> None:
    drive = Drive(batching="static", group_size=3, layout="padded", prefill="inline", memory="reserve")
    for prompt in (10, 100, 35):
        drive.submit(prompt, 1)
    assert totals(drive.run()) == (145, 155)


@pytest.mark.parametrize("layout", ["padded", "shrink"])
def test_a_prompt_of_100_that_joins_a_rectangle_of_8_costs_693_positions_of_padding(layout: str) -> None:
    """One of eight rows ends, a prompt of n = 100 takes its place: (n - 1)(B - 1) = 99 x 7."""
    drive = Drive(layout=layout, prefill="inline", max_num_seqs=8)
    drive.submit(1, 3)
    for _ in range(7):
        drive.submit(1, 50)
    drive.submit(100, 5, "joins")
    for _ in range(10):
        events = drive.turn()
        assert events is not None
        if any(one.id == "joins" for one in events.admitted):
            assert events.padded_tokens == 99 * 7 == 693
            return
        assert events.padded_tokens == 0
    raise AssertionError("the prompt never joined")


def test_ragged_pads_nothing_in_the_same_case() -> None:
    drive = Drive(layout="ragged", prefill="inline", max_num_seqs=8)
    for number in range(9):
        drive.submit(100 if number == 8 else 1, 3 if number == 0 else 50)
    assert totals(drive.run())[1] == 0


def test_32_requests_of_mean_800_and_longest_8000_are_90_percent_padding() -> None:
    outputs = [8000] + [566] * 8 + [568] * 23  # together 32 x 800 = 25,592 + 8
    outputs[-1] += 32 * 800 - sum(outputs)
    drive = Drive(batching="static", group_size=32, layout="padded", prefill="inline", memory="reserve", blocks=9000)
    drive.executor = Blank(1, drive.scheduler.kv.block_size)
    drive.checks = False
    for output in outputs:
        drive.submit(1, output)
    useful, padded = totals(drive.run())
    assert (useful, useful + padded) == (32 * 800, 32 * 8000)
    assert padded / (useful + padded) == 0.9


@pytest.mark.parametrize("batching", ["static", "dynamic"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_is_answered_when_its_last_member_ends(batching: str, depth: int) -> None:
    drive = Drive(depth, batching=batching, group_size=3, window_s=0.0, layout="padded", memory="reserve")
    for output in (2, 9, 4):
        drive.submit(3, output)
    passes = drive.run()
    assert [len(one.tokens) for one in passes[:8]] == [0] * 8
    told = passes[8]
    assert len(told.tokens) == 2 + 9 + 4
    assert {end.id for end in told.finished} == {"r0", "r1", "r2"}
    for id in ("r0", "r1", "r2"):
        indexes = [index for owner, index in zip(told.owners, told.indexes, strict=True) if owner == id]
        assert indexes == list(range(len(indexes)))


def test_a_static_group_waits_for_its_last_member_and_no_request_joins_later() -> None:
    drive = Drive(batching="static", group_size=2)
    drive.scheduler.more_coming = True
    drive.submit(3, 5)
    assert drive.turn() is None
    drive.submit(3, 5)
    late = drive.submit(3, 5)
    first = drive.turn()
    assert first is not None
    assert len(first.admitted) == 2
    for _ in range(4):
        events = drive.turn()
        assert events is not None
        assert not events.admitted
    assert drive.turn() is None, "one is not a group while more are coming"
    drive.scheduler.more_coming = False
    events = drive.turn()
    assert events is not None
    assert [one.id for one in events.admitted] == [late.id]


def test_a_dynamic_window_closes_by_time_or_by_size_whichever_comes_first() -> None:
    by_time = Drive(batching="dynamic", group_size=3, window_s=5.0)
    by_time.scheduler.more_coming = True
    by_time.now_s = 10.0
    by_time.submit(3, 2)
    by_time.now_s = 12.0
    by_time.submit(3, 2)
    assert by_time.turn() is None
    assert by_time.scheduler.wake_s(12.0) == 15.0, "five seconds after the first, not the second"
    by_time.now_s = 15.0
    events = by_time.turn()
    assert events is not None
    assert len(events.admitted) == 2
    by_size = Drive(batching="dynamic", group_size=3, window_s=5.0)
    for _ in range(4):
        by_size.submit(3, 2)
    events = by_size.turn()
    assert events is not None
    assert len(events.admitted) == 3


def test_a_member_that_lost_its_blocks_rejoins_its_group_past_a_newcomer() -> None:
    """Found by random traffic: the newcomer waits for the next group, the member for its blocks, and both for ever."""
    scheduler = make_scheduler(blocks=9, block_size=1, max_num_seqs=3, batching="static", group_size=3, watermark=0.0)
    executor = FakeExecutor(9, 1)
    group = Group("g")
    for sample in range(2):
        scheduler.submit(make_request(f"s{sample}", [0] * 7, 2, sample=sample, group=group), 0.0)
    scheduler.submit(make_request("member", [0], 2), 0.0)
    while not scheduler.idle:
        plan = scheduler.plan(0.0)
        assert plan is not None, "a newcomer and a member wait for each other"
        executor.forward(plan)
        scheduler.commit(executor.result(), 0.0)
        scheduler.check()


def test_a_group_is_taken_whole_whatever_the_budget() -> None:
    drive = Drive(batching="static", group_size=4, layout="padded", prefill="inline", max_num_batched_tokens=20)
    for _ in range(4):
        drive.submit(50, 2)
    events = drive.turn()
    assert events is not None
    assert events.computed_tokens == 200


def test_inline_takes_a_prompt_whole_beside_the_decodes() -> None:
    drive = Drive(prefill="inline", max_num_batched_tokens=30)
    drive.submit(5, 20)
    drive.turn()
    drive.submit(100, 5)
    drive.submit(10, 5)
    assert drive.turn().scheduled_counts == [1, 100]  # type: ignore[union-attr]
    assert drive.turn().scheduled_counts == [1, 1, 10]  # type: ignore[union-attr]


def test_exclusive_pauses_the_decodes() -> None:
    drive = Drive(prefill="exclusive", max_num_batched_tokens=200)
    drive.submit(5, 20)
    drive.turn()
    drive.submit(100, 5)
    assert drive.turn().scheduled_counts == [100]  # type: ignore[union-attr]
    assert drive.turn().scheduled_counts == [1, 1]  # type: ignore[union-attr]


def test_exclusive_in_chunks_still_pauses_them() -> None:
    drive = Drive(prefill="exclusive", chunk_tokens=40)
    drive.submit(5, 20)
    drive.turn()
    drive.submit(100, 5)
    counts = [drive.turn().scheduled_counts for _ in range(4)]  # type: ignore[union-attr]
    assert counts == [[40], [40], [20], [1, 1]]


def test_reserve_sets_everything_aside_and_never_preempts() -> None:
    drive = Drive(memory="reserve", blocks=10, block_size=4, max_num_batched_tokens=100)
    first, second = drive.submit(8, 17), drive.submit(8, 17)
    drive.turn()
    assert len(first.holding.blocks) == 6, "8 + 17 - 1 positions"
    assert second.holding is None, "the second does not fit beside it"
    assert sum(len(one.preempted) for one in drive.run()) == 0


def test_predict_starts_with_the_longest_and_learns() -> None:
    memory = Predict(quantile=0.5)
    request = make_request("a", [1] * 10, 100)
    assert memory.tokens_to_hold(request) == 10 + 100 - 1
    for number in range(20):
        ended = make_request(f"e{number}", [1] * 12, 100)
        ended.tokens += [0] * (10 + number)
        memory.learn(ended)
    assert memory.tokens_to_hold(request) == 10 + 19 - 1
    assert memory.tokens_to_hold(make_request("other length", [1] * 100, 100)) == 199
    assert memory.tokens_to_hold(make_request("other tenant", [1] * 10, 100, tenant="b")) == 109
    said = make_request("resumed", [1] * 10, 100)
    said.tokens += [0] * 40
    assert memory.tokens_to_hold(said) == 50, "what it has said already must fit"
