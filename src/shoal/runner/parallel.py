"""Tensor parallelism: one plan, many ranks. Rank 0 hands each plan to the others, and all compute it in step.

    rank 0   plan ─┬─► forward ─── sums over ranks in every layer ──► head ─► gather ─► sample ─► result
    rank n         └─► forward ───           … the same …        ──► head ─► its part

Owns what ranks do differently: rank 0 sends plans and alone samples; the others follow. A pass that fails on one rank
leaves the ranks out of step, so it ends the engine (EngineLost). Knows rows and plans; processes are in ranks.py.
"""

from collections.abc import Sequence
from typing import Any

import torch

from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.core.request import Logprobs
from shoal.errors import EngineLost
from shoal.runner.rank_wire import pack
from shoal.runner.ranks import NoRanks, Ranks
from shoal.runner.runner import ForwardState, Runner, scored_states


class ParallelExecutor:
    """Rank 0: its own executor, and the plans for the other ranks.

    `owned`: close() ends the ranks. Otherwise they stay for the next engine over the same weights.
    """

    def __init__(self, inner: Executor, ranks: Ranks, owned: bool) -> None:
        self.inner = inner
        self.ranks = ranks
        self.owned = owned

    @property
    def runner(self) -> Any:
        """Of rank 0."""
        return self.inner.runner  # type: ignore[attr-defined]

    def forward(self, plan: StepPlan) -> None:
        self.ranks.send_pass(pack(plan))
        self._guarded(self.inner.forward, plan)

    def sample(self, masks: LateMasks | None) -> None:
        self._guarded(self.inner.sample, masks)

    def result(self) -> StepResult:
        found: StepResult = self._guarded(self.inner.result)
        return found

    def _guarded(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except EngineLost:
            raise
        except Exception as error:
            raise self.ranks.loss(error) from error

    def close(self) -> None:
        if self.ranks.lost is None:
            self.inner.close()
            if not self.owned:
                self.ranks.ask("close")
        if self.owned:
            self.ranks.close()


def over_ranks(inner: Executor, ranks: Ranks | NoRanks, owned: bool) -> Executor:
    """The executor of an engine: `inner` itself where there is one rank."""
    return ParallelExecutor(inner, ranks, owned) if isinstance(ranks, Ranks) else inner


class FollowingRunner(Runner):
    """The runner of ranks 1 and up: computes what rank 0 does, and gives it its part of the scores.

    Blocks are copied in the order of the plans, not beside the passes: the scheduler learns from rank 0 when a copy is
    done, and every plan that counts on it comes later.
    """

    @torch.inference_mode()
    def update(self, plan: StepPlan) -> None:
        for order in plan.copies:
            self.kv.copy(order)
        super().update(plan._replace(copies=()))

    @torch.inference_mode()
    def follow(self, plan: StepPlan, forward: ForwardState | None) -> None:
        """What rank 0 does in sample(), as far as it concerns the others."""
        if forward is None:
            return
        hidden, inputs = forward
        if inputs.draws.lines:
            self.model.logits(scored_states(hidden, inputs.scored))
        self.prompt_logprobs(plan, hidden, inputs.batch.starts)

    def prompt_values(self, states: torch.Tensor, targets: Sequence[int], top: int) -> list[Logprobs]:
        self.model.logits(states)
        return []


class FollowingExecutor:
    """The executor of ranks 1 and up on a CPU: a pass is over when run() returns."""

    def __init__(self, runner: FollowingRunner) -> None:
        self.runner = runner

    def run(self, plan: StepPlan) -> None:
        self.runner.follow(plan, self.runner.forward(plan))

    def close(self) -> None:
        self.runner.copier.close()
