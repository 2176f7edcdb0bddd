"""Which rows of a plan draw, which of them ask for more than a draw, and the StepResult that comes of it."""

import numpy as np
import pytest

from shoal.core.params import SamplingParams
from shoal.core.plan import SCRIPTED_END, RowStart, StepPlan
from shoal.core.ports import LateMasks
from shoal.kernels.cpu import CpuOps
from shoal.runner.draws import draws_of
from shoal.runner.results import FORBIDDEN, NO_TOKENS, NOT_FINITE, DrawnTokens, step_result
from shoal.runner.sampler import Sampler


def plan_of(starts: list[int], counts: list[int], draws: list[int]) -> StepPlan:
    rows = np.arange(len(starts)) + 3
    numbers = [np.array(one, dtype=np.int64) for one in (starts, counts, draws)]
    grown = np.empty((0, 3), dtype=np.int64)
    return StepPlan(7, (), grown, rows, rows + 100, *numbers, np.zeros(sum(counts), dtype=np.int64))


def test_rows_that_draw() -> None:
    draws = draws_of(plan_of([10, 0, 5], [1, 4, 3], [1, 0, 1]))
    assert draws.rows.tolist() == [3, 5]
    assert draws.generations.tolist() == [103, 105]
    assert draws.positions.tolist() == [11, 8]
    assert draws.last.tolist() == [0, 7]


def test_draft_tokens_are_refused_not_ignored() -> None:
    with pytest.raises(AssertionError, match="draft"):
        draws_of(plan_of([10], [3], [3]))


def test_a_result_holds_tokens_scripted_ends_failures_and_copies() -> None:
    plan = plan_of([10, 0, 5, 9], [1, 4, 3, 1], [1, 0, 1, 1])
    ends_at = np.zeros(10, dtype=np.int64)
    ends_at[5] = 8
    masks = LateMasks(np.array([6]), np.zeros((1, 2), dtype=np.uint32))
    drawn = DrawnTokens(np.ones(3, dtype=np.int64), np.array([40, 41, 0]), np.array([1, 2, -np.inf], np.float32), [])
    result = step_result(plan, draws_of(plan), drawn, ends_at, masks, (((1, 0.5),), (2,)), padded=6, busy_s=0.25)
    assert result.step == 7
    assert result.rows.tolist() == [3, 5, 6]
    assert result.generations.tolist() == [103, 105, 106]
    assert result.accepted.tolist() == [1, 1, 1]
    assert result.tokens.tolist() == [40, SCRIPTED_END, 0]
    assert result.failures == ((2, FORBIDDEN),)
    assert (result.copies_done, result.copies_failed) == (((1, 0.5),), (2,))
    assert (result.padded, result.busy_s) == (6, 0.25)
    assert step_result(plan, draws_of(plan), drawn, ends_at, None, ((), ())).failures == ((2, NOT_FINITE),)


def test_a_result_without_draws() -> None:
    plan = plan_of([0], [4], [0])
    result = step_result(plan, draws_of(plan), NO_TOKENS, np.zeros(10, dtype=np.int64), None, ((), ()))
    assert len(result.rows) == len(result.accepted) == len(result.tokens) == 0
    assert result.failures == ()


def test_rows_that_ask_for_more_than_a_draw() -> None:
    """Forbidden ends count up to min_tokens only; biases, penalties and logprobs always; a mask in its pass."""
    sampler = Sampler(6, 50, "cpu", CpuOps())
    several = [
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(min_tokens=2),
        SamplingParams(logprobs=0),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(temperature=0.0),
    ]
    for row, params in enumerate(several):
        sampler.start(RowStart(row, 0, (1, 2), 2, params, 0, 0, frozenset({9}), (), False))
    rows = np.arange(6)
    for position in (2, 3):
        assert sampler.asking(rows, rows * 0 + position, None).tolist() == [False, True, True, True, True, False]
    for position in (4, 5):
        assert sampler.asking(rows, rows * 0 + position, None).tolist() == [False, False, True, True, True, False]
    masks = LateMasks(np.array([0]), np.zeros((1, 2), dtype=np.uint32))
    assert sampler.asking(rows, rows * 0 + 6, masks).tolist() == [True, False, True, True, True, False]
    sampler.start(RowStart(1, 1, (1, 2, 3), 2, several[1], 0, 0, frozenset({9}), (), False))  # after a preemption
    assert sampler.asking(rows[:2], np.array([7, 3]), None).tolist() == [False, True]
