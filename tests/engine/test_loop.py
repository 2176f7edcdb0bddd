"""The loop: passes in flight, failures of the executor, idleness."""

import pytest

from shoal.core.clock import VirtualClock
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Reason
from shoal.engine.engine import Engine
from shoal.engine.loop import EngineLoop
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
    return EngineLoop(Engine(scheduler), executor, VirtualClock(), depth=depth, check=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_passes_in_flight_as_allowed(depth: int) -> None:
    loop = make_loop(depth)
    loop.submit(make_request("a", [1], max_tokens=20))
    told: list[int] = []
    most = 0
    while not loop.idle:
        told += loop.turn().tokens
        most = max(most, loop.engine.in_flight + 1)
    assert most == depth
    assert told == oracle([1], 20, frozenset(), 0, 0)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_pass_fails_its_requests_and_no_others(depth: int, early: bool) -> None:
    loop = make_loop(depth, bad={3}, early=early)
    for number in range(7):
        loop.submit(make_request(str(number), [number + 1], max_tokens=6, seed=number))
    told: dict[str, list[int]] = {str(number): [] for number in range(7)}
    reasons: dict[str, Reason] = {}
    while not loop.idle:
        events = loop.turn()
        for owner, token in zip(events.owners, events.tokens, strict=True):
            told[owner].append(token)
        reasons |= {end.id: end.reason for end in events.finished}
    assert len(reasons) == 7
    assert {id for id, reason in reasons.items() if reason is Reason.ERROR} == {"0", "1", "2"}
    for number in range(3, 7):
        assert told[str(number)] == oracle([number + 1], 6, frozenset(), number, 0)
    assert loop.engine.scheduler.kv.pool.held == 0


def test_an_abort_while_nothing_computes_is_told() -> None:
    loop = make_loop(2)
    loop.submit(make_request("a", [1]))
    assert loop.abort("a")
    assert [end.reason for end in loop.turn().finished] == [Reason.ABORT]
    assert loop.idle
