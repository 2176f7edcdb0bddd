"""Which rows of a plan draw how often, which of them ask for more than a draw, which tokens are accepted, and the
StepResult that comes of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.params import SamplingParams
from shoal.core.plan import SCRIPTED_END, Ints, RowStart, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.kernels.cpu import CpuOps
from shoal.runner.draws import NO_DRAFT, draws_of
from shoal.runner.results import FORBIDDEN, NO_TOKENS, NOT_FINITE, DrawnTokens, step_result
from shoal.runner.sampler import Sampler
from shoal.runner.verify import CoinToss, EqualTokens, accepted_tokens

STATE = Sampler(10, 50, "cpu", CpuOps()).state


def plan_of(starts: list[int], counts: list[int], draws: list[int]) -> StepPlan:
    rows = np.arange(len(starts)) + 3
    numbers = [np.array(one, dtype=np.int64) for one in (starts, counts, draws)]
    grown = np.empty((0, 3), dtype=np.int64)
    return StepPlan(7, (), grown, rows, rows + 100, *numbers, np.zeros(sum(counts), dtype=np.int64))


def test_rows_that_draw() -> None:
    draws = draws_of(plan_of([10, 0, 5], [1, 4, 3], [1, 0, 1]))
    assert draws.rows.tolist() == [3, 5]
    assert draws.generations.tolist() == [103, 105]
    assert draws.counts.tolist() == [1, 1]
    assert draws.line_rows.tolist() == [3, 5]
    assert draws.positions.tolist() == [11, 8]
    assert draws.scored.tolist() == [0, 7]
    assert draws.expected.tolist() == [NO_DRAFT, NO_DRAFT]
    assert not draws.has_drafts


def test_rows_that_verify_drafts_have_a_line_for_each_draw() -> None:
    """Row 3 verifies two drafts, row 5 none, row 6 one; row 4 computes its prompt; row 7 ends its own."""
    plan = plan_of([10, 0, 5, 9, 0], [3, 4, 1, 2, 2], [3, 0, 1, 2, 1])
    draws = draws_of(plan._replace(tokens=np.arange(100, 112)))
    assert draws.rows.tolist() == [3, 5, 6, 7]
    assert draws.counts.tolist() == [3, 1, 2, 1]
    assert draws.line_rows.tolist() == [3, 3, 3, 5, 6, 6, 7]
    assert draws.positions.tolist() == [11, 12, 13, 6, 10, 11, 2]
    assert draws.scored.tolist() == [0, 1, 2, 7, 8, 9, 11]
    assert draws.expected.tolist() == [101, 102, NO_DRAFT, NO_DRAFT, 109, NO_DRAFT, NO_DRAFT]
    assert draws.has_drafts


def result_of(plan: StepPlan, drawn: DrawnTokens, ends_at: Ints, masks: LateMasks | None, **more: Any) -> StepResult:
    draws = draws_of(plan)
    accepted = accepted_tokens(draws, drawn.tokens, drawn.best, EqualTokens(), STATE)
    return step_result(plan, draws, drawn, accepted, ends_at, masks, more.pop("copies", ((), ())), **more)


def test_a_result_holds_tokens_scripted_ends_failures_and_copies() -> None:
    plan = plan_of([10, 0, 5, 9], [1, 4, 3, 1], [1, 0, 1, 1])
    ends_at = np.zeros(10, dtype=np.int64)
    ends_at[5] = 8
    masks = LateMasks(np.array([2]), np.zeros((1, 2), dtype=np.uint32))
    drawn = DrawnTokens(np.array([40, 41, 0]), np.array([1, 2, -np.inf], np.float32), [])
    result = result_of(plan, drawn, ends_at, masks, copies=(((1, 0.5),), (2,)), padded=6, busy_s=0.25)
    assert result.step == 7
    assert result.rows.tolist() == [3, 5, 6]
    assert result.generations.tolist() == [103, 105, 106]
    assert result.accepted.tolist() == [1, 1, 1]
    assert result.tokens.tolist() == [40, SCRIPTED_END, 0]
    assert result.failures == ((2, FORBIDDEN),)
    assert (result.copies_done, result.copies_failed) == (((1, 0.5),), (2,))
    assert (result.padded, result.busy_s) == (6, 0.25)
    assert result_of(plan, drawn, ends_at, None).failures == ((2, NOT_FINITE),)


def test_a_result_without_draws() -> None:
    plan = plan_of([0], [4], [0])
    result = result_of(plan, NO_TOKENS, np.zeros(10, dtype=np.int64), None)
    assert len(result.rows) == len(result.accepted) == len(result.tokens) == 0
    assert result.failures == ()


# ---- drafts ---------------------------------------------------------------------------------------------------------

# row 3 verifies three drafts, row 4 none, row 5 two, row 6 one
VERIFYING = plan_of([10, 7, 5, 9], [4, 1, 3, 2], [4, 1, 3, 2])._replace(
    tokens=np.array([1, 11, 12, 13, 2, 3, 21, 22, 4, 31])
)


def drawn_tokens(*tokens: int, broken: Sequence[int] = ()) -> DrawnTokens:
    """Tokens of all lines, each with logprobs; the scores of some lines are not finite."""
    best = np.ones(len(tokens), dtype=np.float32)
    best[list(broken)] = np.nan
    return DrawnTokens(
        np.array(tokens), best, [(line, Logprobs(token, 0.0, 1, (), ())) for line, token in enumerate(tokens)]
    )


@pytest.mark.parametrize(
    ("tokens", "accepted", "yielded"),
    [
        # all drafts right; all wrong; right after a wrong one, which does not help; the draft's last token drawn early
        ((11, 12, 13, 14, 50, 21, 22, 23, 31, 32), [4, 1, 3, 2], [11, 12, 13, 14, 50, 21, 22, 23, 31, 32]),
        ((90, 91, 92, 93, 50, 94, 95, 96, 97, 98), [1, 1, 1, 1], [90, 50, 94, 97]),
        ((11, 90, 13, 14, 50, 90, 22, 23, 31, 90), [2, 1, 1, 2], [11, 90, 50, 90, 31, 90]),
        ((13, 12, 13, 14, 50, 21, 21, 21, 90, 31), [1, 1, 2, 1], [13, 50, 21, 21, 90]),
    ],
)  # fmt: skip
def test_drafts_are_accepted_up_to_the_first_draw_that_differs(
    tokens: tuple[int, ...], accepted: list[int], yielded: list[int]
) -> None:
    result = result_of(VERIFYING, drawn_tokens(*tokens), np.zeros(10, dtype=np.int64), None)
    assert result.rows.tolist() == [3, 4, 5, 6]
    assert result.accepted.tolist() == accepted
    assert result.tokens.tolist() == yielded
    assert [(index, one.token) for index, one in result.logprobs] == list(enumerate(yielded))
    assert result.failures == ()


def test_a_scripted_end_is_at_its_position_among_drafts() -> None:
    ends_at = np.zeros(10, dtype=np.int64)
    ends_at[[3, 5, 6]] = 12, 7, 11  # the draws of row 6 that are accepted end at position 10
    tokens = (11, 12, 13, 14, 50, 21, 22, 23, 90, 32)
    result = result_of(VERIFYING, drawn_tokens(*tokens), ends_at, None)
    assert result.tokens.tolist() == [11, SCRIPTED_END, 13, 14, 50, 21, SCRIPTED_END, 23, 90]


def test_a_row_fails_only_where_its_first_line_does() -> None:
    """Else it yields the tokens before the broken line, which is the first of the next pass."""
    tokens = (11, 12, 13, 14, 50, 21, 22, 23, 31, 32)
    drawn = drawn_tokens(*tokens, broken=(2, 5, 7, 9))
    masks = LateMasks(np.array([2, 5]), np.zeros((2, 2), dtype=np.uint32))
    result = result_of(VERIFYING, drawn, np.zeros(10, dtype=np.int64), masks)
    assert result.accepted.tolist() == [2, 1, 1, 1]
    assert result.tokens.tolist() == [11, 12, 50, 21, 31]
    assert result.failures == ((2, FORBIDDEN),)
    assert result_of(VERIFYING, drawn, np.zeros(10, dtype=np.int64), None).failures == ((2, NOT_FINITE),)


@given(st.data())
def test_any_pass_yields_what_its_definition_says(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    total = sum(counts)
    plan = plan_of([5] * len(counts), counts, counts)._replace(tokens=np.array(data.draw(lists_of(total))))
    tokens = data.draw(lists_of(total))
    finite = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=total, max_size=total))
    best = np.where(finite, 1.0, -np.inf).astype(np.float32)
    found = accepted_tokens(draws_of(plan), np.array(tokens), best, EqualTokens(), STATE)
    want, lines, first = [], [], 0
    for count in counts:
        mine = [first]
        while (
            mine[-1] + 1 < first + count
            and tokens[mine[-1]] == plan.tokens[mine[-1] + 1]
            and all(finite[first : mine[-1] + 2])
        ):
            mine.append(mine[-1] + 1)
        want.append(len(mine))
        lines += mine
        first += count
    assert found.counts.tolist() == want
    assert found.lines.tolist() == lines
    assert found.tokens.tolist() == [tokens[line] for line in lines]


def lists_of(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 1), min_size=count, max_size=count)


# ---- synthetic acceptance -------------------------------------------------------------------------------------------


def test_a_coin_decides_whatever_was_drawn_and_the_draft_is_the_token() -> None:
    draws, best = draws_of(VERIFYING), np.ones(10, dtype=np.float32)
    tokens = np.arange(50, 60)
    never, always = (accepted_tokens(draws, tokens, best, CoinToss(chance), STATE) for chance in (0.0, 1.0))
    assert never.counts.tolist() == [1, 1, 1, 1]
    assert never.tokens.tolist() == [50, 54, 55, 58]
    assert always.counts.tolist() == [4, 1, 3, 2]
    assert always.tokens.tolist() == [11, 12, 13, 53, 54, 21, 22, 57, 31, 59]


def test_coins_depend_on_seed_sample_and_position_alone() -> None:
    """A row's coins are the same in whatever pass and beside whatever rows its positions are drawn."""
    sampler = Sampler(10, 50, "cpu", CpuOps())
    for row in (3, 4, 5, 6, 7):
        sampler.start(
            RowStart(row, 0, (1,), 1, SamplingParams(), 77 + (row == 7), int(row == 6), frozenset(), (), False)
        )
    rule = CoinToss(0.5)

    def coins_of(row: int, first: int, count: int) -> list[bool]:
        plan = plan_of([first - 1], [count + 1], [count + 1])._replace(rows=np.array([row]))
        draws = draws_of(plan)
        return rule.confirmed(draws, np.zeros(count + 1, dtype=np.int64), sampler.state).tolist()[:-1]

    alone = [coins_of(3, at, 1)[0] for at in range(20, 120)]
    assert coins_of(4, 20, 100) == alone
    for other in (6, 7):
        assert coins_of(other, 20, 100) != alone
    assert 30 < sum(alone) < 70


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
