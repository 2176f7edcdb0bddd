"""Tensor parallelism on NVIDIA GPUs: the executors of rank 0 and of the others, over NCCL.

The layers' graphs contain the sums over ranks, so all ranks must run and record the same shapes in the same order: they
do, because shapes follow from the plan alone. The head is not a graph: all lines are scored and gathered once, whatever
their rows ask for, since only rank 0 knows that. After it, rank 0's last tokens go to all ranks, on the device.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from shoal.core.params import SamplingParams
from shoal.core.plan import Flags, Ints, StepPlan
from shoal.core.ports import LateMasks
from shoal.models import Model
from shoal.runner.cuda import ALL, FILTERED, GREEDY, STAGED, CudaExecutor, _made_up, _now
from shoal.runner.kvstore import KVStore
from shoal.runner.parallel import FollowingRunner
from shoal.runner.rank_wire import pack, unpack
from shoal.runner.runner import Runner
from shoal.runner.sampler import Sampler

AHEAD = STAGED - 2  # passes that a rank queues at most, so that none is written over before it was copied


class GatheringSampler(Sampler):
    """Samples all lines from the scores that it is given: they are gathered once, for all of them."""

    def asking(self, rows: Ints, positions: Ints, masks: LateMasks | None) -> Flags:
        super().asking(rows, positions, masks)
        return np.ones(len(rows), dtype=np.bool_)


class ParallelCudaExecutor(CudaExecutor):
    """Rank 0."""

    def __init__(self, runner: Runner, most_tokens: int, most_drafts: int = 0) -> None:
        rows, spec = runner.tables.blocks.shape[0], runner.model.spec
        runner.sampler = GatheringSampler(rows, spec.vocab_size, runner.kv.data.device, runner.model.ops)
        super().__init__(runner, most_tokens, most_drafts)

    def sample(self, masks: LateMasks | None) -> None:
        forward = self._forward
        super().sample(masks)
        if forward is not None and forward.draws.lines:
            with self._here():
                self.model.shard.agreed(self.runner.tables.last_token)


class CudaFollower(CudaExecutor):
    """Ranks 1 and up: run() queues a pass on the stream."""

    runner: FollowingRunner

    def __init__(self, runner: FollowingRunner, most_tokens: int, most_drafts: int = 0) -> None:
        super().__init__(runner, most_tokens, most_drafts)
        self._queued: deque[torch.cuda.Event] = deque()

    def run(self, plan: StepPlan) -> None:
        if len(self._queued) == AHEAD:  # it is over: rank 0 has planned on its result
            self._queued.popleft().synchronize()
        self.forward(plan)
        forward, self._forward = self._forward, None
        assert forward is not None
        with self._here():
            if forward.computed is not None:
                self.runner.follow(plan, forward.computed)
            elif forward.draws.lines:
                self.model.logits(self._scored[: forward.draws.lines])
            if forward.hidden is not None:
                starts = np.cumsum(plan.counts) - plan.counts
                self.runner.prompt_logprobs(plan, forward.hidden, starts.tolist())
            if forward.draws.lines:
                self.model.shard.agreed(self.runner.tables.last_token)
            self._queued.append(_now())


def rehearse_together(
    model: Model, dtype: torch.dtype, block_size: int, tokens: int, lines: int, most_drafts: int = 0
) -> None:
    """As cuda.rehearse, on every rank at the same time: one pass after the other, because ranks must agree on which."""
    store = KVStore(model.spec, 1, block_size, dtype, "cuda")
    model.reserve_positions(tokens)
    works: list[tuple[int, int, Sequence[SamplingParams]]] = [(1, tokens, [ALL]), (lines, 1, [FILTERED, ALL])]
    works += [(min(count, lines), 1, [GREEDY]) for count in (1, 4, 16)]
    for rows, count, params in works:
        plan, sizes = _made_up(rows, count, params, block_size, 1), (rows * count, most_drafts)
        if model.shard.rank == 0:
            executor = ParallelCudaExecutor(Runner(model, store, rows, count, "cuda"), *sizes)
            executor.forward(plan)
            executor.sample(None)
            executor.result()
            executor.close()
        else:
            follower = CudaFollower(FollowingRunner(model, store, rows, count, "cuda"), *sizes)
            follower.run(unpack(pack(plan)))
            follower.close()
