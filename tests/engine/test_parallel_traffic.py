"""Random traffic over two ranks: every request gets the tokens that it gets with room for all, to the last bit.

The engine of test_verified.py with the model split in two: real parts of the model, plans over the wire and gloo
between a thread for each rank. Two numbers have one sum in any order, so batches change nothing here, either. And the
answers must be those of one process, up to rounding: greedy ones are compared with it.
"""

import queue
import threading
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import kernels
from shoal.errors import EngineLost
from shoal.kernels.cpu import NativeOps
from shoal.models import Model, make_model, spec_from_config
from shoal.models.shard import SplitShard
from shoal.runner.group import DistributedGroup
from shoal.runner.kvstore import KVStore
from shoal.runner.loader import dummy_weights
from shoal.runner.parallel import FollowingExecutor, FollowingRunner, ParallelExecutor
from shoal.runner.rank_wire import unpack
from shoal.runner.ranks import Ranks
from shoal.runner.runner import Runner
from shoal.runner.threaded import ThreadedExecutor
from shoal.sched.scheduler import Scheduler
from tests.engine import test_verified as whole
from tests.engine.test_verified import Asked, Engine, Move, ScriptedDrafter, answers_to, compare, engine, play
from tests.fakes import VOCAB
from tests.runner.verifying import CONFIG

pytestmark = pytest.mark.skipif(
    not isinstance(kernels.pick("cpu"), NativeOps), reason="in plain torch a position rounds as its neighbours make it"
)


@cache
def halves() -> list[Model]:
    """The model of test_verified.py in two parts, connected."""
    spec, folder = spec_from_config({**CONFIG, "vocab_size": VOCAB}), Path(mkdtemp())
    groups = [DistributedGroup(rank, 2, folder, "cpu") for rank in range(2)]
    joining = [threading.Thread(target=group.join) for group in groups]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    found, ops = [], kernels.pick("cpu")
    for rank, group in enumerate(groups):
        shard = SplitShard(rank, 2, group)
        params = dummy_weights(spec, torch.float32, "cpu", shard=shard)
        params.convert(ops.prepare)
        found.append(make_model(shard.local(spec), params, ops, shard))
    return found


class OtherRank(Ranks):
    """Rank 1, in a thread."""

    def __init__(self, runner: FollowingRunner) -> None:
        self.size, self.lost, self.failure = 2, None, ""
        self._plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._follower = FollowingExecutor(runner)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while (data := self._plans.get()) is not None:
            self._follower.run(unpack(data))

    def send_pass(self, data: bytes) -> None:
        self._plans.put(data)

    def loss(self, cause: Exception | None) -> EngineLost:
        return EngineLost(f"rank 0 failed: {cause}")

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join(30)
        assert not self._thread.is_alive(), "rank 1 waits for rank 0"
        self._follower.close()


class SplitEngine(Engine):
    """The same over two ranks."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        super().__init__(scheduler, depth)
        self.loop.executor.close()
        kv, rows = scheduler.kv, scheduler.tables.rows.count
        host, longest = kv.host.total if kv.host is not None else 0, scheduler.limits.max_model_len
        stores = [KVStore(half.spec, kv.pool.total, kv.block_size, torch.float32, "cpu", host) for half in halves()]
        self.runner = Runner(halves()[0], stores[0], rows, longest, "cpu")
        other = OtherRank(FollowingRunner(halves()[1], stores[1], rows, longest, "cpu"))
        self.loop.executor = ParallelExecutor(ThreadedExecutor(self.runner), other, owned=True)


def asked_in(traffic: list[Move]) -> list[Asked]:
    return [Asked(number, *how) for number, (what, *how) in enumerate(traffic) if what == "arrive"]


def over_two_ranks() -> Any:
    return patch.object(whole, "Engine", SplitEngine)


@given(whole.configs, st.integers(1, 2), st.booleans(), st.lists(whole.moves, min_size=4, max_size=20))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic_over_two_ranks(config: dict[str, Any], depth: int, drafts: bool, traffic: list[Move]) -> None:
    with over_two_ranks():
        answers = answers_to(asked_in(traffic))
        drafter = ScriptedDrafter(answers, 0.2, len(traffic)) if drafts else None
        with engine(depth, drafter, **config) as made:
            assert isinstance(made, SplitEngine)
            play(made, traffic)
            compare(made.told, answers)


@pytest.mark.parametrize("when_short", ["recompute", "swap"])
def test_a_busy_engine_over_two_ranks(when_short: str) -> None:
    """Preempted, swapped, from the prefix cache, with drafts: it all happens, and no token is lost or changed."""
    traffic = whole.busy_load(30)
    in_one = answers_to(asked_in(traffic))
    config = {"blocks": 18, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40, "host_blocks": 30}
    with over_two_ranks():
        answers = answers_to(asked_in(traffic))
        with engine(2, ScriptedDrafter(answers, 0.2, 1), **config, when_short=when_short) as made:
            play(made, traffic)
            compare(made.told, answers)
    assert made.preemptions > 1
    assert made.cached > 100
    assert made.drafted > 50
    assert made.blocks_in > 0
    same = sum(one.tokens == answers[id].tokens for id, one in in_one.items())
    assert same > 0.9 * len(in_one), "rounding changes a token now and then, not the model"
