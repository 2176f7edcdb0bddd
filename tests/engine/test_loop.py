"""The loop: passes in flight, failures of the executor, idleness."""

from collections.abc import Iterator

import pytest

from shoal.core.clock import VirtualClock
from shoal.core.events import Finished
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Reason
from shoal.engine.loop import QUIET_S, EngineLoop
from tests.fakes import FakeExecutor, make_request, make_scheduler, oracle


class Fragile(FakeExecutor):
    """Raises in the passes it is told to, before anything is computed."""

    def __init__(self, blocks: int, block_size: int, bad: set[int], early: bool) -> None:
        super().__init__(blocks, block_size)
        self.bad = bad
        self.early = early

    def forward(self, plan: StepPlan) -> None:
        if self.early and plan.step in self.bad:
            raise RuntimeError("no memory left")
        super().forward(plan)

    def result(self) -> StepResult:
        if not self.early and self.queue[0].step in self.bad:
            self.queue.popleft()
            raise RuntimeError("a bad pass")
        return super().result()


def make_loop(depth: int, bad: set[int] | None = None, early: bool = False) -> EngineLoop:
    scheduler = make_scheduler(max_num_seqs=3)
    executor = Fragile(scheduler.kv.pool.total, scheduler.kv.block_size, bad or set(), early)
    return EngineLoop(scheduler, executor, VirtualClock(), depth=depth, check=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_passes_in_flight_as_allowed(depth: int) -> None:
    loop = make_loop(depth)
    loop.submit(make_request("a", [1], max_tokens=20))
    told: list[int] = []
    most = 0
    while not loop.idle:
        told += loop.step().tokens
        most = max(most, loop.scheduler.in_flight + 1)
    assert most == depth
    assert told == oracle([1], 20, frozenset(), 0, 0)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_fault_that_does_not_come_back_ends_no_request(depth: int, early: bool) -> None:
    loop = make_loop(depth, bad={3}, early=early)
    for number in range(7):
        loop.submit(make_request(str(number), [number + 1], max_tokens=6, seed=number))
    told: dict[str, list[int]] = {str(number): [] for number in range(7)}
    reasons: dict[str, Reason] = {}
    while not loop.idle:
        events = loop.step()
        for owner, token in zip(events.owners, events.tokens, strict=True):
            told[owner].append(token)
        reasons |= {end.id: end.reason for end in events.finished}
    assert reasons == {str(number): Reason.LENGTH for number in range(7)}
    for number in range(7):
        assert told[str(number)] == oracle([number + 1], 6, frozenset(), number, 0)
    assert loop.scheduler.kv.pool.held == 0


class Poisoned(FakeExecutor):
    """Breaks whenever one of these requests is in a pass, or two of a pair together."""

    def __init__(self, blocks: int, block_size: int, poison: set[int], pair: set[int], early: bool) -> None:
        super().__init__(blocks, block_size)
        self.poison, self.pair, self.early = poison, pair, early
        self.passes = self.faults = 0

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        self.passes += 1
        if self.early and self._breaks(plan):
            self.queue.pop()
            self.faults += 1
            raise RuntimeError("poisoned")

    def result(self) -> StepResult:
        if self._breaks(self.queue[0]):
            self.queue.popleft()
            self.faults += 1
            raise RuntimeError("poisoned")
        return super().result()

    def _breaks(self, plan: StepPlan) -> bool:
        seeds = {self.rows[row].seed for row in plan.rows.tolist()}
        return bool(seeds & self.poison) or (bool(self.pair) and self.pair <= seeds)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("poison", [{0}, {17}, {31}, {3, 20}])
def test_a_poisoned_request_fails_alone(depth: int, early: bool, poison: set[int]) -> None:
    scheduler = make_scheduler(max_num_seqs=32, blocks=400, max_num_batched_tokens=200)
    executor = Poisoned(400, scheduler.kv.block_size, poison, set(), early)
    told, ends = run_to_end(EngineLoop(scheduler, executor, VirtualClock(), depth=depth, check=True), 32)
    failed = {number for number, end in ends.items() if end.reason is Reason.ERROR}
    assert failed == poison
    assert {ends[number].error for number in failed} == {"RuntimeError: poisoned"}
    for number in set(range(32)) - poison:
        assert told[number] == oracle([number + 1] * (1 + number % 9), 4 + number % 7, frozenset(), number, 0)
    # once for all requests, then each time the half with the poison in it
    assert executor.faults <= len(poison) * 14
    assert scheduler.kv.pool.held == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_two_that_only_break_together_both_live(depth: int) -> None:
    scheduler = make_scheduler(max_num_seqs=32, blocks=400, max_num_batched_tokens=200)
    executor = Poisoned(400, scheduler.kv.block_size, set(), {2, 29}, False)
    loop = EngineLoop(scheduler, executor, VirtualClock(), depth=depth, check=True)
    for number in range(32):
        loop.submit(make_request(str(number), [number + 1], max_tokens=3, seed=number))
    faults = 0
    for _ in range(60):
        faults += loop.step().faults
        if loop.idle:
            break
    assert 1 <= faults < 40


def run_to_end(loop: EngineLoop, count: int) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    for number in range(count):
        prompt = [number + 1] * (1 + number % 9)
        loop.submit(make_request(str(number), prompt, max_tokens=4 + number % 7, seed=number))
    told: dict[int, list[int]] = {number: [] for number in range(count)}
    ends: dict[int, Finished] = {}
    for _ in range(2000):
        if loop.idle:
            break
        events = loop.step()
        for owner, token in zip(events.owners, events.tokens, strict=True):
            told[int(owner)].append(token)
        ends |= {int(end.id): end for end in events.finished}
    assert len(ends) == count
    return told, ends


@pytest.mark.parametrize("depth", [1, 2])
def test_an_executor_that_always_breaks_ends_all_requests_and_does_not_spin(depth: int) -> None:
    scheduler = make_scheduler(max_num_seqs=32, blocks=400, max_num_batched_tokens=200)
    executor = Poisoned(400, scheduler.kv.block_size, set(range(99)), set(), False)
    _, ends = run_to_end(EngineLoop(scheduler, executor, VirtualClock(), depth=depth, check=True), 20)
    assert {end.reason for end in ends.values()} == {Reason.ERROR}
    assert executor.faults <= 4 * 20


def test_an_abort_while_nothing_computes_is_reported() -> None:
    loop = make_loop(2)
    loop.submit(make_request("a", [1]))
    assert loop.abort("a")
    assert [end.reason for end in loop.step().finished] == [Reason.ABORT]
    assert loop.idle


@pytest.mark.parametrize("depth", [1, 2])
def test_spare_work_is_done_while_nothing_waits(depth: int) -> None:
    loop = make_loop(depth)
    done: list[int] = []

    def work() -> Iterator[None]:
        for number in range(3):
            assert loop.scheduler.in_flight == 0
            assert loop.idle
            done.append(number)
            yield

    loop.spare = work()
    loop.step(until_s=0.0)
    assert done == [0]
    loop.submit(make_request("a", [1], max_tokens=5))
    told: list[int] = []
    while not loop.idle:
        told += loop.step().tokens
    assert told == oracle([1], 5, frozenset(), 0, 0)
    assert done == [0]  # no more while there was a request
    loop.step(until_s=loop.clock.now_s() + QUIET_S / 2)
    assert done == [0], "nor in the pause between two requests"
    for _ in range(5):
        loop.step(until_s=loop.clock.now_s() + 1)
    assert done == [0, 1, 2]
    assert loop.spare is None


def test_spare_work_that_fails_is_left_and_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(2)

    def work() -> Iterator[None]:
        raise RuntimeError("no memory left")
        yield

    loop.spare = work()
    loop.step(until_s=0.0)
    assert loop.spare is None
    assert "no memory left" in caplog.text
    loop.submit(make_request("a", [1], max_tokens=5))
    told: list[int] = []
    while not loop.idle:
        told += loop.step().tokens
    assert told == oracle([1], 5, frozenset(), 0, 0)


class Guessed(FakeExecutor):
    """Notes how many passes are in flight when a pass begins."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self.begun: list[int] = []

    def forward(self, plan: StepPlan) -> None:
        self.begun.append(plan.step)
        super().forward(plan)


def test_a_pass_with_drafts_begins_before_the_last_one_is_handed_out() -> None:
    """Nothing else is in flight, so the device would wait for whatever is done with the events."""
    scheduler = make_scheduler(max_num_seqs=3, speculate="ngram", drafts=4)
    executor = Guessed(scheduler.kv.pool.total, scheduler.kv.block_size)
    loop = EngineLoop(scheduler, executor, VirtualClock(), depth=2, check=True)
    loop.submit(make_request("a", [1, 2, 1, 2, 1], max_tokens=60))
    told: list[int] = []
    drafted = 0
    while not loop.idle:
        events = loop.step()
        told += events.tokens
        drafted += bool(events.proposed)
        if not loop.idle:
            assert executor.begun[-1] > events.step, "the next pass has begun"
    assert drafted > 0
    assert told == oracle([1, 2, 1, 2, 1], 60, frozenset(), 0, 0)


def test_a_fault_of_a_pass_begun_early_is_reported_after_the_pass_before_it() -> None:
    scheduler = make_scheduler(max_num_seqs=3, speculate="ngram", drafts=4)
    executor = Fragile(scheduler.kv.pool.total, scheduler.kv.block_size, {9}, early=True)
    loop = EngineLoop(scheduler, executor, VirtualClock(), depth=2, check=True)
    loop.submit(make_request("a", [1, 2, 1, 2, 1], max_tokens=60))
    told: list[int] = []
    faults: list[int] = []
    while not loop.idle:
        events = loop.step()
        told += events.tokens
        faults += [events.step] * events.faults
    assert len(faults) == 1
    assert told == oracle([1, 2, 1, 2, 1], 60, frozenset(), 0, 0)
