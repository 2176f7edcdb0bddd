"""The whole engine with a draft model whose tokens stay on the device: every request gets the tokens it gets without.

As in test_verified.py, all is real but small. The draft model has the first layer of the model, or all of its layers:
then every draft is right. Where a grammar or penalties need draft tokens on the host, they come there.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import kernels
from shoal.core.drafts import NoDrafter
from shoal.core.plan import FROM_DEVICE, StepPlan, StepResult
from shoal.kernels.cpu import NativeOps
from shoal.runner.kvstore import KVStore
from shoal.runner.runner import Runner
from shoal.runner.threaded import ThreadedExecutor
from shoal.sched.modeldrafts import ModelDrafts
from shoal.sched.scheduler import Scheduler
from shoal.sched.steptime import StepModel
from shoal.spec.draft import DraftDrafter, DraftKV, spare_blocks
from tests.effort import examples
from tests.engine.test_verified import (
    PARAMS,
    Asked,
    Engine,
    Move,
    Told,
    answers_to,
    busy_load,
    compare,
    configs,
    model,
    moves,
    play,
)
from tests.fakes import VOCAB, FreeDrafts, make_scheduler

pytestmark = pytest.mark.skipif(
    not isinstance(kernels.pick("cpu"), NativeOps), reason="in plain torch a position rounds as its neighbours make it"
)
DRAFTS = 5
PLAIN = [kind for kind, one in enumerate(PARAMS) if not any(name.endswith("_penalty") for name in one)]


class Beside(ThreadedExecutor):
    """The draft model's executor; remembers its plans, and how many were in flight at once."""

    def __init__(self, runner: Runner, worker: ThreadPoolExecutor) -> None:
        super().__init__(runner, worker=worker, shared=True)
        self.plans: list[StepPlan] = []
        self.most = self.waiting = 0

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        super().forward(plan)

    def result(self) -> StepResult:
        self.waiting -= 1
        return super().result()


class AskingScheduler(Scheduler):
    """Asks a draft model, whose executor comes later."""

    def __init__(self, *args: Any) -> None:
        limits, kv, policies, rules = args
        spare = spare_blocks(DRAFTS, kv.block_size)
        longest = limits.max_model_len + spare * kv.block_size
        sizes = DraftKV(kv.pool.total, kv.block_size, spare, longest, 24)
        self.drafter = DraftDrafter(None, sizes, on_device=True)  # type: ignore[arg-type]
        drafts = FreeDrafts(NoDrafter(), StepModel(), VOCAB, DRAFTS, ModelDrafts(self.drafter))
        super().__init__(limits, kv, replace(policies, drafts=drafts), rules)


class WithDraftModel(Engine):
    """An engine with a draft model on the thread of its passes."""

    def __init__(self, scheduler: AskingScheduler, depth: int, layers: int) -> None:
        super().__init__(scheduler, depth, DRAFTS)
        rows, sizes = scheduler.tables.rows.count, scheduler.drafter.kv
        draft = model().shortened(layers)
        store = KVStore(draft.spec, sizes.blocks + rows * sizes.spare, sizes.block_size, torch.float32, "cpu")
        runner = Runner(draft, store, rows, sizes.longest, "cpu", drafts_for=self.runner.tables)
        self.beside = Beside(runner, self.loop.executor._worker)  # type: ignore[attr-defined]
        scheduler.drafter._executor = self.beside
        self.stayed = 0  # passes that verified drafts which were on the device

    def step(self) -> None:
        super().step()
        assert not self.scheduler.drafter._failed, "see the log"  # type: ignore[attr-defined]

    def _begin(self, ids: Sequence[str], suspects: bool) -> None:
        super()._begin(ids, suspects)
        newest = self.scheduler.flights[-1]
        late = [draft.on_device for draft in newest.drafts.values()]
        self.stayed += any(late)
        assert all(late) or not any(late), "some tokens of a call came to the host, and some did not"
        for request, draft in newest.drafts.items():
            assert not draft.on_device or request.grammar is None


@contextmanager
def asking(depth: int, layers: int, **config: Any) -> Iterator[WithDraftModel]:
    scheduler = make_scheduler(kind=AskingScheduler, **config)
    assert isinstance(scheduler, AskingScheduler)
    made = WithDraftModel(scheduler, depth, layers)
    try:
        yield made
    finally:
        made.loop.close()


def answers_of(traffic: Sequence[Move]) -> dict[str, Told]:
    return answers_to(Asked(number, *how) for number, (what, *how) in enumerate(traffic) if what == "arrive")


@given(configs, st.integers(1, 2), st.integers(1, 2), st.booleans(), st.lists(moves, min_size=4, max_size=30))
@examples(8, of=25)
def test_random_traffic_gets_the_same_tokens_with_drafts_on_the_device(
    config: dict[str, Any], depth: int, layers: int, plain: bool, traffic: list[Move]
) -> None:
    """plain: no request needs its drafts on the host."""
    traffic = [without_needs(move) for move in traffic] if plain else traffic
    answers = answers_of(traffic)
    with asking(depth, layers, **config) as made:
        play(made, traffic)
        compare(made.told, answers)


def without_needs(move: Move) -> Move:
    """The same request with parameters that need no draft tokens on the host; scripted ends stay."""
    if move[0] != "arrive":
        return move
    kind = move[5]
    scripted = 2 * len(PARAMS) if kind // len(PARAMS) == 2 else 0
    return (*move[:5], PLAIN[kind % len(PLAIN)] + scripted, *move[6:])


@pytest.mark.parametrize(
    ("depth", "plain", "when_short"), [(1, True, "swap"), (2, True, "recompute"), (2, False, "swap")]
)
def test_a_busy_engine_keeps_drafts_on_the_device(depth: int, plain: bool, when_short: str) -> None:
    traffic = busy_load(40)
    traffic = [without_needs(move) for move in traffic] if plain else traffic
    answers = answers_of(traffic)
    config = {"blocks": 18, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40, "host_blocks": 30}
    with asking(depth, 1, **config, when_short=when_short) as made:
        play(made, traffic)
        compare(made.told, answers)
    assert made.drafted > 150
    assert made.preemptions > 2
    assert made.cached > 300
    assert made.blocks_in > 5
    assert made.stayed > 10
    assert made.beside.most > 2, "its passes are not queued one after the other"
    ids = {token for plan in made.beside.plans for token in plan.tokens.tolist() if token < 0}
    assert ids == {FROM_DEVICE}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_model_that_is_the_model_is_always_right(depth: int) -> None:
    """All its drafts are accepted, up to an end token in the middle of one."""
    asked = [Asked(number, (number, 1, 2, 3), 41, frozenset(), 1, PLAIN[number % 4]) for number in range(4)]
    answers = answers_to(asked)
    with asking(depth, model().spec.layers, blocks=200, max_num_batched_tokens=64) as made:
        for one in asked:
            made.submit(one)
        made.drain()
        compare(made.told, answers)
    policy = made.scheduler.policies.drafts
    assert isinstance(policy, FreeDrafts)
    share = policy.models._all  # type: ignore[attr-defined]
    assert share.right == share.tried > 100
    assert made.passes < 20  # 41 and more without


def test_what_comes_after_an_end_token_in_a_draft_is_dropped() -> None:
    """The draft model goes on after it, since the host does not see it."""
    asked = [Asked(number, (number, 1, 2, 3), 60, frozenset(range(0, VOCAB, 9)), 1, 0) for number in range(12)]
    answers = answers_to(asked)
    assert sum(1 < len(one.tokens) < 60 for one in answers.values()) > 4
    with asking(1, model().spec.layers, blocks=400, max_num_seqs=12, max_num_batched_tokens=96) as made:
        for one in asked:
            made.submit(one)
        made.drain()
        compare(made.told, answers)
    assert {id: one.reason for id, one in made.told.items()} == {id: one.reason for id, one in answers.items()}
    inside = [(len(one.tokens) - 1) % 5 > 0 for one in made.told.values()]  # one token, then five in each pass
    assert sum(inside) > 4
    assert made.stayed > 1
