"""KV blocks are copied to host memory and back unchanged, beside the passes."""

from threading import Event

import numpy as np
import pytest
import torch

from shoal.core.plan import BlockCopy, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.models.spec import spec_from_config
from shoal.runner.copier import Copier
from shoal.runner.kvstore import KVStore
from shoal.runner.runner import ForwardState, Runner
from shoal.runner.threaded import ThreadedExecutor
from tests.models.test_spec import config

NONE = np.empty(0, dtype=np.int64)


@pytest.fixture
def store() -> KVStore:
    made = KVStore(spec_from_config(config()), 6, 4, torch.float32, "cpu", host_blocks=5)
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(1)))
    return made


def test_blocks_come_back_as_they_were(store: KVStore) -> None:
    copier = Copier(store)
    before = store.data.clone()
    copier.submit(BlockCopy(0, (1, 4, 2), (3, 0, 4), "out"))
    done, failed = copier.take(all_of_them=True)
    assert [number for number, _ in done] == [0]
    assert done[0][1] > 0
    assert failed == ()
    assert torch.equal(store.data, before), "the device's blocks were touched"
    copier.submit(BlockCopy(1, (3, 0, 4), (5, 1, 0), "in"))
    assert [number for number, _ in copier.take(all_of_them=True)[0]] == [1]
    for was, now in ((1, 5), (4, 1), (2, 0)):
        assert torch.equal(store.data[:, :, now], before[:, :, was])
    assert torch.equal(store.data[:, :, 3], before[:, :, 3])
    copier.close()


def test_copies_are_reported_once_and_in_order(store: KVStore) -> None:
    copier = Copier(store)
    for number in range(20):
        copier.submit(BlockCopy(number, (number % 6,), (number % 5,), "out"))
    told = []
    while len(told) < 20:
        told += [number for number, _ in copier.take()[0]]
    assert told == list(range(20))
    assert copier.take(all_of_them=True) == ((), ())
    copier.close()


def test_a_failed_copy_is_reported_and_the_next_one_is_done(store: KVStore) -> None:
    copier = Copier(store)
    copier.submit(BlockCopy(0, (99,), (0,), "out"))
    copier.submit(BlockCopy(1, (0,), (0,), "out"))
    done, failed = copier.take(all_of_them=True)
    assert failed == (0,)
    assert [number for number, _ in done] == [1]
    copier.close()


def test_without_host_memory_nothing_can_be_copied() -> None:
    made = KVStore(spec_from_config(config()), 2, 4, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="no host memory"):
        made.copy(BlockCopy(0, (0,), (0,), "out"))


class SlowRunner(Runner):
    """Its passes compute nothing, and last until they may end."""

    def __init__(self, store: KVStore) -> None:  # of the runner that it stands for it has the copier only
        self.copier, self.may_end = Copier(store), Event()

    def forward(self, plan: StepPlan) -> None:
        assert self.may_end.wait(60)
        for order in plan.copies:
            self.copier.submit(order)

    def sample(self, plan: StepPlan, forward: ForwardState | None, masks: LateMasks | None) -> StepResult:
        done, failed = self.copier.take(all_of_them=True)
        return StepResult(plan.step, NONE, NONE, NONE, NONE, copies_done=done, copies_failed=failed)


def plan_with(step: int, *copies: BlockCopy) -> StepPlan:
    return StepPlan(step, (), NONE.reshape(0, 3), NONE, NONE, NONE, NONE, NONE, NONE, copies)


def test_blocks_leave_while_a_pass_is_computed_and_come_after_it(store: KVStore) -> None:
    assert store.host is not None
    runner = SlowRunner(store)
    executor = ThreadedExecutor(runner)
    before = store.data.clone()
    try:
        executor.forward(plan_with(0))
        executor.sample(None)
        executor.forward(plan_with(1, BlockCopy(0, (4,), (2,), "out"), BlockCopy(1, (3,), (5,), "in")))
        executor.sample(None)
        done, _ = runner.copier.take(all_of_them=True)
        assert [number for number, _ in done] == [0], "the block that leaves waits for the pass"
        assert torch.equal(store.host[:, :, 2], before[:, :, 4])
        assert torch.equal(store.data, before), "a block came while a pass may still write to its place"
        runner.may_end.set()
        assert executor.result().copies_done == ()
        assert [number for number, _ in executor.result().copies_done] == [1]
        assert torch.equal(store.data[:, :, 5], store.host[:, :, 3])
    finally:
        runner.may_end.set()
        executor.close()
