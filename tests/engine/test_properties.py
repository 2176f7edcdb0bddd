"""Random traffic through scheduler, KV manager and engine, every invariant checked after every move; and rules broken
on purpose, which must be noticed."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.events import PassEvents
from shoal.core.request import Reason
from shoal.sched.pass_builder import PassBuilder
from shoal.sched.rows import RowTable
from shoal.sched.scheduler import Scheduler
from shoal.sched.steady import Steady
from tests.effort import examples
from tests.engine.traffic import TIERS, Move, Run, busy, configs, moves, play
from tests.fakes import make_request, make_scheduler


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=60))
@examples(200, of=700)
def test_random_traffic_keeps_every_invariant(config: dict[str, int], depth: int, traffic: list[Move]) -> None:
    slow, failing = (
        len(traffic) % 4,
        (lambda number: number % 3 == 0) if len(traffic) % 5 == 0 else (lambda number: False),
    )
    run = Run(make_scheduler(**config), depth, slow_copies=slow, failing=failing)  # type: ignore[arg-type]
    play(run, traffic)
    run.verify()


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=50))
@examples(60, of=200)
def test_the_same_traffic_gives_the_same_plans_and_every_request_its_tokens_as_under_fcfs(
    config: dict[str, int], depth: int, traffic: list[Move]
) -> None:
    plain = {**config, "order": "fcfs", "when_short": "recompute", "lane_tokens": 0, "headroom": 0.0, "tiers": TIERS}
    runs = [Run(make_scheduler(**one), depth) for one in (config, config, plain)]  # type: ignore[arg-type]
    for run in runs:
        play(run, traffic)
    one, two, fcfs = runs
    assert one.plans == two.plans
    assert one.told == two.told
    for id, told in one.told.items():
        both = (told, fcfs.told[id])
        shorter = min(map(len, both))
        assert both[0][:shorter] == both[1][:shorter]
        if id not in one.cuts.keys() | fcfs.cuts.keys() and {one.ended[id], fcfs.ended[id]} <= {
            Reason.STOP,
            Reason.LENGTH,
        }:
            assert both[0] == both[1]


@given(configs, st.lists(moves, min_size=5, max_size=40))
@examples(100, of=400)
def test_depth_changes_no_tokens(config: dict[str, int], traffic: list[Move]) -> None:
    """Aborts, cuts and evictions fall at other moments; until then both were told the same."""
    runs = [Run(make_scheduler(**config), depth) for depth in (1, 2)]  # type: ignore[arg-type]
    for run in runs:
        play(run, traffic)
        run.verify()
    one, two = runs
    for id in one.told:
        shorter = min(len(one.told[id]), len(two.told[id]))
        assert one.told[id][:shorter] == two.told[id][:shorter]
        early = {one.ended[id], two.ended[id]} & {Reason.ABORT, Reason.ERROR, Reason.REJECTED}
        if not early and id not in one.cuts.keys() | two.cuts.keys():
            assert one.told[id] == two.told[id]


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=40))
@examples(50, of=150)
def test_a_steady_batch_is_planned_and_committed_like_any_other(
    config: dict[str, int], depth: int, traffic: list[Move]
) -> None:
    runs = [Run(make_scheduler(**config), depth) for _ in range(2)]  # type: ignore[arg-type]
    play(runs[0], traffic)
    with patch.object(Steady, "suits", return_value=False):
        play(runs[1], traffic)
    assert runs[0].plans == runs[1].plans
    assert runs[0].told == runs[1].told
    assert runs[0].ended == runs[1].ended


def test_a_batch_of_decodes_becomes_steady() -> None:
    """So that the test above is known to compare something."""
    run = Run(make_scheduler(blocks=200, max_num_batched_tokens=64), depth=2)
    for number in range(4):
        run.submit(make_request(f"r{number}", [number] * 5, 12 + 4 * number, seed=number))
    steady = 0
    while not run.scheduler.idle:
        while run.begin():
            steady += run.scheduler.tables.steady is not None
        run.finish()
    run.verify()
    assert steady > 12


def test_a_prompt_goes_on_beside_a_steady_batch_that_leaves_it_one_position() -> None:
    run = Run(make_scheduler(blocks=60, max_num_batched_tokens=3), depth=1)
    for number in range(2):
        run.submit(make_request(f"r{number}", [number], 40, seed=number))
    run.begin()
    run.finish()
    run.submit(make_request("prompt", [5] * 6, 1, seed=3))
    for _ in range(6):
        run.begin()
        run.finish()
    assert run.ended.keys() == {"prompt"}
    run.drain()
    run.verify()


# ---- a busy standard load, and the rules broken on purpose ----------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_busy_load_is_busy(depth: int) -> None:
    run = busy(depth=depth)
    assert run.preemptions > 20
    assert run.cached > 50


class RowsAtOnce(Scheduler):
    """Breaks the rule: a row is handed out again while a pass that names it is still in flight."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.tables.rows = EagerRows(self.limits.max_num_seqs)


class EagerRows(RowTable):
    def give_back(self, row: int, last_step: int) -> None:
        super().give_back(row, -1)


class PublishesEarly(Scheduler):
    """Breaks the rule: blocks are published when planned, before their tokens are known."""

    def plan(self, now_s: float):  # type: ignore[no-untyped-def]
        plan = super().plan(now_s)
        for request in self.running:
            padded = request.tokens + [0] * request.pending
            self.kv.publish(request.holding, padded, request.planned)
        return plan


class FreesBeforeUse(Scheduler):
    """Breaks the rule: the blocks of a running request go back to the pool although its next pass reads them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.freeze, self.planner.freeze = self.planner.freeze, self.freeze_too_late  # type: ignore[method-assign]

    def freeze_too_late(self, batch: PassBuilder, events: PassEvents):  # type: ignore[no-untyped-def]
        for request in list(batch.takes)[:1]:
            if request.planned > self.kv.block_size and self.kv.pool.references[request.holding.blocks[0]] == 1:
                spare = self.kv.pool.grab(1)
                if spare:
                    self.kv.pool.drop([request.holding.blocks[0]])
                    request.holding.blocks[0] = spare[0]
        return self.freeze(batch, events)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("broken", [RowsAtOnce, PublishesEarly, FreesBeforeUse])
def test_a_broken_rule_is_noticed(broken: type[Scheduler], depth: int) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        busy(kind=broken, depth=depth)
