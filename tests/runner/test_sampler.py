"""The sampler on crafted logits, against transformers' own processors and against the arithmetic of the definitions.

Everything runs twice: as torch, and as the C kernels where they can be compiled. The end compares the two.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shoal import SamplingParams, kernels
from shoal.core.plan import Ints, RowStart
from shoal.core.ports import LateMasks
from shoal.kernels import Ops, torch_choose
from shoal.kernels.cpu import NativeOps
from shoal.kernels.draw_table import stretches
from shoal.kernels.noise import draw_keys, gumbel
from shoal.runner.logit_edits import TokenLists
from shoal.runner.results import FORBIDDEN, NOT_FINITE, failures
from shoal.runner.sampler import Sampler, logprobs_of
from tests.effort import covering
from tests.kernels.draw_rows import late as packed

VOCAB = 60


def start(row: int, params: SamplingParams, tokens: Sequence[int] = (0,), **more: Any) -> RowStart:
    values: dict[str, Any] = {
        "row": row,
        "generation": 0,
        "tokens": tuple(tokens),
        "prompt_len": len(tokens),
        "params": params.resolved({}),
        "seed": 0,
        "sample": 0,
        "stop_ids": frozenset(),
        "blocks": (),
        "needs_prompt_logprobs": False,
    }
    return RowStart(**{**values, **more})


WAYS: dict[str, Ops] = {name: ops for name, ops in kernels.available() if name != "ref"}
NATIVE = [name for name, ops in WAYS.items() if isinstance(ops, NativeOps)]
BOTH = ["cpu", *NATIVE[:1]]
ops_now = WAYS["cpu"]


@pytest.fixture(autouse=True, params=BOTH)
def way(request: pytest.FixtureRequest) -> str:
    """Which kernels the samplers of a test use."""
    global ops_now
    ops_now = WAYS[request.param]
    return str(request.param)


def sampler(vocab: int = VOCAB, rows: int = 64) -> Sampler:
    return Sampler(rows, vocab, "cpu", ops_now)


def draws(logits: Tensor, params: SamplingParams, count: int, seed: int = 0, **more: Any) -> list[int]:
    """One draw at each of `count` positions of one request."""
    made = sampler(len(logits))
    made.start(start(0, params, seed=seed, **more))
    found: list[int] = []
    for first in range(1, count + 1, 1000):
        positions = np.arange(first, min(first + 1000, count + 1))
        rows = np.zeros(len(positions), dtype=np.int64)
        tokens, _, _ = made.sample(logits.repeat(len(positions), 1), rows, positions)
        found += tokens.tolist()
    return found


def crafted(vocab: int = VOCAB, spread: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def theirs(logits: Tensor, params: SamplingParams) -> Tensor:
    """What transformers' warpers leave, in their order."""
    scores = logits.unsqueeze(0)
    ids = torch.zeros((1, 1), dtype=torch.long)
    if params.temperature is not None:
        scores = TemperatureLogitsWarper(float(params.temperature))(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p is not None and params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.7},
    {"top_k": 12, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.2},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.6},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps_in_the_same_shares(values: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **values})
    logits = crafted()
    want = theirs(logits, params).softmax(-1)
    count = 20_000
    found = torch.bincount(torch.tensor(draws(logits, params, count)), minlength=VOCAB).float()
    assert not found[want == 0].any(), "a token was drawn that transformers never draws"
    expected = want * count
    assert found[expected > 20].all(), "a token that transformers draws was never drawn"
    common = expected > 5
    chi = float(((found - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 10


def test_a_set_of_top_p_wider_than_the_first_look() -> None:
    vocab, top_p, count = 2500, 0.6, 8000
    logits = crafted(vocab, spread=0.01)
    kept = theirs(logits, SamplingParams(top_p=top_p)) > -torch.inf
    assert kept.sum() > 1200  # more than the sampler looks at first
    found = torch.tensor(draws(logits, SamplingParams(temperature=1.0, top_p=top_p), count)).bincount(minlength=vocab)
    border = (logits - logits[kept].min()).abs() < 1e-5  # the sum may round either way at the last token
    assert not (found[~kept & ~border] > 0).any()
    assert (found[kept] > 0).float().mean() > 0.98
    chi = float(((found[kept] - count / kept.sum()) ** 2 / (count / kept.sum())).sum())
    assert chi < 1.2 * int(kept.sum())


def test_wide_and_narrow_rows_side_by_side_draw_as_alone() -> None:
    vocab = 5000
    made = sampler(vocab)
    logits = torch.stack([crafted(vocab, spread, seed=i) for i, spread in enumerate([0.01, 5.0, 0.01, 3.0, 0.0])])
    several = [
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=0.99, top_k=3000),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, top_p=0.95, min_p=0.5),
    ]
    for row, params in enumerate(several):
        made.start(start(row, params, seed=row))
    positions = np.full(5, 9)
    together, _, _ = made.sample(logits, np.arange(5), positions)
    alone = [int(made.sample(logits[i : i + 1], np.array([i]), positions[:1])[0]) for i in range(5)]
    assert together.tolist() == alone


def test_top_k_keeps_those_as_likely_as_the_last_as_transformers_does() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0, 1.0, 1.0, 0.5])
    kept = transformers.TopKLogitsWarper(3)(torch.zeros(1, 1), logits.unsqueeze(0))[0]
    found = set(draws(logits, SamplingParams(temperature=1.0, top_k=3), 2000))
    assert found == set(torch.nonzero(kept.isfinite()).squeeze(1).tolist()) == {1, 2, 3, 4, 5}


def test_equal_scores_are_drawn_alike_beside_any_neighbour() -> None:
    """A neighbour with a larger top_k makes the sampler look at more tokens; it must not change which are kept."""
    made = sampler(500)
    logits = (torch.randn(500, generator=torch.Generator().manual_seed(1)) * 2).to(torch.bfloat16).float()
    made.start(start(0, SamplingParams(temperature=1.0, top_k=5, top_p=0.9)))
    made.start(start(1, SamplingParams(temperature=1.0, top_k=200)))
    for position in range(1, 300):
        at = np.array([position])
        alone, _, _ = made.sample(logits.unsqueeze(0), np.array([0]), at)
        beside, _, _ = made.sample(logits.repeat(2, 1), np.array([0, 1]), np.repeat(at, 2))
        assert alone[0] == beside[0]


def test_the_mass_of_a_top_k_set_is_that_of_all_tokens_in_it_beside_any_neighbour() -> None:
    """A hundred tokens tie for the second place: the first has a fortieth of the mass, so top_p leaves them all."""
    logits = torch.zeros(101)
    logits[50] = 1.0
    made = sampler(101)
    made.start(start(0, SamplingParams(temperature=1.0, top_k=2, top_p=0.5)))
    made.start(start(1, SamplingParams(temperature=1.0, top_k=100)))
    alone = [int(made.sample(logits.unsqueeze(0), np.array([0]), np.array([at]))[0]) for at in range(60)]
    beside = [int(made.sample(logits.repeat(2, 1), np.arange(2), np.full(2, at))[0][0]) for at in range(60)]
    assert alone == beside
    assert len(set(alone)) > 20


def test_greedy_is_the_argmax_whatever_else_is_set() -> None:
    logits = crafted()
    for values in ({}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}, {"seed": 7}):
        assert set(draws(logits, SamplingParams(temperature=0, **values), 50)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-38, 1e-40, 1e-60])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_temperature_close_to_nothing_is_greedy(temperature: float, more: dict[str, Any]) -> None:
    logits = crafted() + 3
    params = SamplingParams(temperature=temperature, **more)
    assert set(draws(logits, params, 50)) == {int(logits.argmax())}


@pytest.mark.parametrize("top_p", [1e-6, 1e-45, 1e-50])
def test_a_top_p_close_to_nothing_is_greedy(top_p: float) -> None:
    logits = crafted(300)
    assert set(draws(logits, SamplingParams(top_p=top_p, temperature=1.0), 50)) == {int(logits.argmax())}


def test_the_highest_temperature_is_nearly_even() -> None:
    found = torch.tensor(draws(crafted(), SamplingParams(temperature=100.0), 20_000)).bincount(minlength=VOCAB)
    assert int(found.min()) > 200


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = crafted()
    tokens = [3, 5, 5, 9, 40]
    made = sampler()
    for penalty in (0.5, 1.2, 3.0):
        made.start(start(0, SamplingParams(temperature=0, repetition_penalty=penalty), tokens, prompt_len=3))
        want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.unsqueeze(0).clone())
        got = torch_choose.edited(logits.unsqueeze(0), np.array([0]), np.array([5]), made.state)
        torch.testing.assert_close(got, want)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = crafted()
    prompt, output = [3, 5, 5], [5, 9, 9, 9, 40]
    params = SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=-0.3)
    made = sampler()
    made.start(start(0, params, prompt + output, prompt_len=3))
    want = logits.clone()
    for token, count in {5: 1, 9: 3, 40: 1}.items():
        want[token] -= 0.7 + -0.3 * count
    got = torch_choose.edited(logits.unsqueeze(0), np.array([0]), np.array([8]), made.state)
    torch.testing.assert_close(got[0], want)


def test_drawn_tokens_are_counted() -> None:
    """A greedy row whose best tokens are nearly equal walks through them as the frequency penalty pushes it on."""
    logits = torch.full((VOCAB,), -50.0)
    logits[10:14] = torch.tensor([1.0, 0.9, 0.8, 0.7])
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    made = sampler()
    made.start(start(4, params, [1, 2]))
    output = [int(made.sample(logits.unsqueeze(0), np.array([4]), np.array([p]))[0]) for p in range(2, 10)]
    assert output == [10, 11, 12, 13, 10, 11, 12, 13]
    made.start(start(4, params, [1, 2, *output[:6]], prompt_len=2))  # as after a preemption
    assert [int(made.sample(logits.unsqueeze(0), np.array([4]), np.array([p]))[0]) for p in (8, 9)] == output[6:]
    made.start(start(4, params, [1, 2]))  # another request in the same row
    assert int(made.sample(logits.unsqueeze(0), np.array([4]), np.array([2]))[0]) == 10
    made.start(start(4, SamplingParams(temperature=0), [1, 2]))  # … and one without penalties
    assert [int(made.sample(logits.unsqueeze(0), np.array([4]), np.array([p]))[0]) for p in (2, 3)] == [10, 10]


def test_many_rows_with_penalties_keep_their_counts_apart() -> None:
    made = sampler(rows=20)
    logits = torch.zeros((20, VOCAB))
    for row in range(20):
        made.start(start(row, SamplingParams(temperature=0, frequency_penalty=1.0), range(row + 1), prompt_len=0))
    got = torch_choose.edited(logits, np.arange(20), np.full(20, 30), made.state)
    want = -(torch.arange(VOCAB) <= torch.arange(20).unsqueeze(1)).float()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logit_bias_forces_and_forbids(temperature: float) -> None:
    logits = crafted()
    best = int(logits.argmax())
    forced = SamplingParams(temperature=temperature, logit_bias={33: 100})
    assert set(draws(logits, forced, 300)) == {33}
    forbidden = SamplingParams(temperature=temperature, logit_bias={best: -100})
    assert best not in draws(logits, forbidden, 300)


def test_the_given_logits_are_not_changed() -> None:
    logits = crafted().unsqueeze(0)
    before = logits.clone()
    made = sampler()
    made.start(start(0, SamplingParams(temperature=1.0, logit_bias={1: 5}, min_p=0.1, top_p=0.5, presence_penalty=1)))
    made.sample(logits, np.array([0]), np.array([1]))
    assert torch.equal(logits, before)


def test_ends_are_forbidden_until_min_tokens() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[[7, 8]] = 100.0
    logits[9] = 50.0
    params = SamplingParams(temperature=0, min_tokens=3)
    made = sampler()
    made.start(start(0, params, [1, 2], stop_ids=frozenset({7, 8})))
    output = [int(made.sample(logits.unsqueeze(0), np.array([0]), np.array([p]))[0]) for p in range(2, 6)]
    assert output[:3] == [9, 9, 9]
    assert output[3] in (7, 8)


def test_draws_fit_the_softmax_over_seeds_samples_and_positions() -> None:
    logits = crafted(8, 1.0)
    want = logits.softmax(-1)
    count = 8000
    for what in ("seed", "sample", "position"):
        made = sampler(8, rows=count)
        for row in range(count):
            values = {"seed": 3, "sample": 0, **({} if what == "position" else {what: row})}
            made.start(start(row, SamplingParams(temperature=1.0), **values))
        positions = np.arange(count) if what == "position" else np.full(count, 5)
        tokens, _, _ = made.sample(logits.repeat(count, 1), np.arange(count), positions)
        found = tokens.bincount(minlength=8).float()
        chi = float(((found - want * count) ** 2 / (want * count)).sum())
        assert chi < 30, f"over {what}: chi-square {chi:.1f} with 7 degrees of freedom"


def test_two_draws_in_a_row_are_independent() -> None:
    found = torch.tensor(draws(torch.zeros(6), SamplingParams(temperature=1.0), 30_000))
    pairs = (found[:-1] * 6 + found[1:]).bincount(minlength=36).float()
    expected = len(found) / 36
    assert float(((pairs - expected) ** 2 / expected).sum()) < 80  # 35 degrees of freedom


def mixed(row: int) -> SamplingParams:
    return SamplingParams(
        temperature=[1.0, 0.7, 0.0, 1.3][row % 4],
        top_k=[0, 5, 0, 20, 0][row % 5],
        top_p=[1.0, 0.9, 0.5][row % 3],
        min_p=[0.0, 0.05][row % 2],
        presence_penalty=[0.0, 0.5][row // 3 % 2],
        logit_bias={row: 2.0} if row % 7 == 0 else None,
        logprobs=[None, 0, 3][row % 3],
    )


def test_a_draw_does_not_depend_on_neighbours_row_or_order() -> None:
    logits = torch.stack([crafted(seed=i) for i in range(21)])
    positions = np.arange(21) + 3

    def run(order: list[int], rows: list[int]) -> dict[int, int]:
        made = sampler()
        for one, row in zip(order, rows, strict=True):
            made.start(start(row, mixed(one), [1, one], seed=one, sample=one % 3))
        tokens, _, _ = made.sample(logits[order], np.array(rows), positions[order])
        return dict(zip(order, tokens.tolist(), strict=True))

    all_rows = list(range(21))
    want = run(all_rows, all_rows)
    assert run(all_rows[::-1], all_rows) == want
    assert run(all_rows, [63 - row for row in all_rows]) == want
    for one in all_rows:
        assert run([one], [5]) == {one: want[one]}


def test_seed_sample_and_position_each_change_the_draws() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams(temperature=1.0)
    base = draws(logits, params, 100)
    assert draws(logits, params, 100) == base
    assert len(set(base)) > 80
    for other in (draws(logits, params, 100, seed=1), draws(logits, params, 100, sample=1)):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 5


def test_the_largest_and_the_negative_seeds_work() -> None:
    logits = torch.zeros(1000)
    seeds = (0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 2)
    found = {tuple(draws(logits, SamplingParams(temperature=1.0), 5, seed=seed)) for seed in seeds}
    assert len(found) == len(seeds)


def test_logprobs_with_ranks_and_alternatives() -> None:
    logits = torch.stack([crafted(seed=i) for i in range(3)])
    tokens = torch.tensor([4, 5, int(logits[2].argmax())])
    for one, token, row in zip(logprobs_of(logits, tokens, 5), tokens.tolist(), logits.log_softmax(-1), strict=True):
        assert one.token == token
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert one.rank == 1 + int((row > row[token]).sum())
        assert list(one.top_tokens) == row.topk(5).indices.tolist()
        assert list(one.top_logprobs) == pytest.approx(row.topk(5).values.tolist(), abs=1e-6)


def test_more_logprobs_than_the_vocabulary_has() -> None:
    found = logprobs_of(crafted(10).unsqueeze(0), torch.tensor([3]), 20)
    assert len(found[0].top_tokens) == 10


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    made = sampler()
    for row, count in enumerate([None, 0, 2, 5]):
        made.start(start(row, SamplingParams(temperature=0, logprobs=count)))
    _, _, found = made.sample(crafted().repeat(4, 1), np.arange(4), np.full(4, 1))
    assert [(place, len(one.top_tokens)) for place, one in found] == [(1, 0), (2, 2), (3, 5)]


def test_nan_logits_in_one_row_do_not_change_the_others() -> None:
    logits = torch.stack([crafted(seed=i) for i in range(6)])
    made = sampler()
    several = [mixed(row) for row in range(6)]
    for row, params in enumerate(several):
        made.start(start(row, params, [1], seed=row))
    want, _, _ = made.sample(logits, np.arange(6), np.full(6, 1))
    for row, params in enumerate(several):
        made.start(start(row, params, [1], seed=row))
    broken = logits.clone()
    broken[3] = torch.nan
    got, _, _ = made.sample(broken, np.arange(6), np.full(6, 1))
    others = [0, 1, 2, 4, 5]
    assert got[others].tolist() == want[others].tolist()


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[3, 4]] = 0.0
    for values in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 30}):
        assert set(draws(logits, SamplingParams(temperature=1.0, **values), 200)) <= {3, 4}


# ---- grammars -------------------------------------------------------------------------------------------------------


def late(allowed: dict[int, Sequence[int]], vocab: int = VOCAB) -> LateMasks:
    """Line → the tokens that its grammar allows."""
    return packed(allowed, vocab)


@pytest.mark.parametrize("values", [*FILTERS, {"temperature": 0.0}], ids=str)
def test_only_allowed_tokens_are_drawn_and_in_the_shares_they_have_among_themselves(values: dict[str, Any]) -> None:
    params, count = SamplingParams(**{"temperature": 1.0, **values}), 500
    logits, allowed = crafted(), [0, 7, 31, 32, 40, 59]
    alone = torch.full((VOCAB,), -torch.inf)
    alone[allowed] = logits[allowed]
    made = sampler(rows=count)
    for row in range(count):
        made.start(start(row, params, seed=row))
    masks = late(dict.fromkeys(range(count), allowed))
    got, _, _ = made.sample(logits.repeat(count, 1), np.arange(count), np.full(count, 1), masks)
    want, _, _ = made.sample(alone.repeat(count, 1), np.arange(count), np.full(count, 1))
    assert set(got.tolist()) <= set(allowed)
    assert torch.equal(got, want)


def test_a_bias_brings_no_forbidden_token_back() -> None:
    made = sampler()
    for row, temperature in enumerate([0.0, 1.0]):
        made.start(start(row, SamplingParams(temperature=temperature, logit_bias={5: 100, 6: -100})))
    tokens, best, _ = made.sample(crafted().repeat(2, 1), np.arange(2), np.full(2, 1), late({0: [6], 1: [6]}))
    assert tokens.tolist() == [6, 6]
    assert best.isfinite().all()


def test_penalties_count_on_under_a_mask() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[10:14] = torch.tensor([1.0, 0.9, 0.8, 0.7])
    made = sampler()
    made.start(start(4, SamplingParams(temperature=0, frequency_penalty=2.0), [1, 2]))
    rows, masks = np.array([4]), late({0: [11, 13]})
    output = [int(made.sample(logits.unsqueeze(0), rows, np.array([at]), masks)[0]) for at in range(2, 6)]
    assert output == [11, 13, 11, 13]


def test_rows_without_a_grammar_draw_as_without_any_masks() -> None:
    logits = torch.stack([crafted(seed=i) for i in range(12)])
    rows, positions = np.arange(12)[::-1].copy(), np.full(12, 1)

    def run(masks: LateMasks | None) -> list[int]:
        made = sampler()
        for row in range(12):
            made.start(start(row, mixed(row), [1], seed=row))
        return made.sample(logits, rows, positions, masks)[0].tolist()

    plain, beside = run(None), run(late({2: [1], 7: [2, 3], 11: [50]}))
    assert [beside[line] for line in (2, 11)] == [1, 50]
    assert beside[7] in (2, 3)
    others = [line for line in range(12) if line not in (2, 7, 11)]
    assert [beside[place] for place in others] == [plain[place] for place in others]


def test_logprobs_are_the_models_own_under_a_mask() -> None:
    logits = crafted().unsqueeze(0)
    before, least = logits.clone(), int(logits.argmin())
    made = sampler()
    made.start(start(0, SamplingParams(temperature=0, logprobs=2)))
    tokens, _, found = made.sample(logits, np.array([0]), np.array([1]), late({0: [least]}))
    assert tokens.tolist() == [least]
    assert found[0][1].rank == VOCAB
    assert found[0][1].logprob == pytest.approx(float(before.log_softmax(-1)[0, least]), abs=1e-6)
    assert found[0][1].top_tokens == tuple(before[0].topk(2).indices.tolist())
    assert torch.equal(logits, before)


def test_min_tokens_forbids_no_end_that_the_grammar_allows() -> None:
    params = SamplingParams(temperature=0, min_tokens=5)
    made = sampler()
    for row in range(2):
        made.start(start(row, params, [1, 2], stop_ids=frozenset({7})))
    logits = torch.zeros(VOCAB)
    logits[7] = 9.0
    tokens, best, _ = made.sample(logits.repeat(2, 1), np.arange(2), np.full(2, 2), late({1: [7]}))
    assert tokens[1] == 7
    assert tokens[0] != 7
    assert best.isfinite().all()


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_without_allowed_tokens_fails_unlike_damaged_weights(values: dict[str, Any]) -> None:
    made = sampler()
    for row in range(4):
        made.start(start(row, SamplingParams(**{"temperature": 1.0, **values}), seed=row))
    logits = torch.stack([crafted(seed=row) for row in range(4)])
    logits[3] = torch.nan
    rows, masks = np.arange(4), late({1: [], 2: [8]})
    tokens, best, _ = made.sample(logits, rows, np.full(4, 1), masks)
    assert failures(rows, best.numpy(), masks) == ((1, FORBIDDEN), (3, NOT_FINITE))
    assert tokens[2] == 8
    assert failures(rows[[0, 2]], best.numpy(), masks) == ()


@pytest.mark.parametrize("way", ["cpu"], indirect=True)
def test_few_allowed_tokens_need_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """top_k over a vocabulary of which a grammar leaves three tokens: the rest is forbidden, not unseen."""
    made = sampler(5000)
    made.start(start(0, SamplingParams(temperature=1.0, top_k=50)))
    looks: list[int] = []
    look = torch_choose._from_top

    def watch(scaled: Tensor, keys: Tensor, rows: Any, state: Any, most: int) -> tuple[Tensor, Tensor]:
        looks.append(most)
        return look(scaled, keys, rows, state, most)

    monkeypatch.setattr(torch_choose, "_from_top", watch)
    masks = late({0: [1, 2, 3]}, 5000)
    tokens, _, _ = made.sample(crafted(5000).unsqueeze(0), np.array([0]), np.array([1]), masks)
    assert tokens[0] in (1, 2, 3)
    assert looks == [51]


# ---- lists of edits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cpu"], indirect=True)
def test_lists_stay_whole_while_rows_start_and_end() -> None:
    numbers = np.random.default_rng(0)
    edits, want = TokenLists(9), {row: [] for row in range(9)}
    for _ in range(400):
        row = int(numbers.integers(9))
        want[row] = [(int(token), float(token % 7)) for token in numbers.integers(1000, size=numbers.integers(30))]
        edits.set(row, want[row])
        rows = numbers.permutation(9)[: numbers.integers(1, 10)]
        places, at = stretches(edits.first[rows], edits.count[rows])
        found = list(zip(places.tolist(), edits.ids[at].tolist(), edits.amounts[at].tolist(), strict=True))
        assert found == [(place, *one) for place, row in enumerate(rows.tolist()) for one in want[row]]
    assert len(edits.ids) < 2000, "unused lists are not dropped"


# ---- C and torch ----------------------------------------------------------------------------------------------------

DRAWN = [one for one in FILTERS if one.get("top_k") != 10_000] + [
    {"temperature": 0.8, "top_p": 0.95},
    {"top_p": 0.999},
    {"top_k": 700},
    {"top_k": 3000, "top_p": 0.99},
    {"temperature": 100.0, "top_p": 0.9},
    {"temperature": 1e-40, "top_k": 4},
]


def sums_of(logits: Tensor, params: SamplingParams, seeds: Ints, positions: Ints) -> Tensor:
    """Score and noise of every token in double precision, filters apart."""
    keys = torch.from_numpy(draw_keys(seeds, np.zeros_like(seeds), positions))
    above = logits.double() - logits.double().amax(-1, keepdim=True)
    noise = gumbel(keys, torch.arange(logits.shape[1], dtype=torch.int32)).double()
    return above / float(params.temperature or 1.0) + noise


@pytest.mark.parametrize(("way", "values", "spread"), covering(NATIVE, DRAWN, [0.0, 0.5, 3.0]), indirect=["way"])
def test_c_draws_what_torch_draws(values: dict[str, Any], spread: float, way: str) -> None:
    """Many lines of many shapes. They may differ only where two sums are as close as a logarithm's last bits."""
    params, count, vocab = SamplingParams(**{"temperature": 1.0, **values}), 300, 3001
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(5)) * spread
    logits[::3] = logits[::3].to(torch.bfloat16).float()  # ties
    logits[1::5, 100:] = -torch.inf
    positions, seeds = np.arange(count) * 7 + 1, np.arange(count) - 50
    found = []
    for ops in (WAYS[way], WAYS["cpu"]):
        made = Sampler(count, vocab, "cpu", ops)
        for row in range(count):
            made.start(start(row, params, seed=int(seeds[row])))
        found.append(made.sample(logits, np.arange(count), positions)[:2])
    (tokens, best), (wanted, wanted_best) = found
    assert torch.equal(best, wanted_best)
    for line in torch.nonzero(tokens != wanted).flatten().tolist():
        (sums,) = sums_of(logits[line : line + 1], params, seeds[line : line + 1], positions[line : line + 1])
        one, other = sums[tokens[line]], sums[wanted[line]]
        assert abs(float(one - other)) < 5e-6, f"line {line}: {tokens[line]} and {wanted[line]} are not that close"
    assert int((tokens != wanted).sum()) <= 1


@pytest.mark.parametrize("way", NATIVE, indirect=True)
def test_c_edits_scores_as_torch_does(way: str) -> None:
    """Everything at once, over many passes in which rows end and others take their place; to the last bit."""
    numbers, vocab, rows = np.random.default_rng(1), 517, 16
    made = [Sampler(rows, vocab, "cpu", ops) for ops in (WAYS[way], WAYS["cpu"])]

    def begin(row: int, at: int) -> None:
        chance = numbers.integers(2, size=6)
        params = SamplingParams(
            temperature=float(chance[0]),
            top_p=[1.0, 0.9][chance[1]],
            repetition_penalty=[1.0, 1.3][chance[2]],
            frequency_penalty=[0.0, 0.37][chance[3]],
            presence_penalty=[0.0, -0.41][chance[4]],
            logit_bias={int(t): float(numbers.normal()) for t in numbers.integers(vocab, size=5)}
            if chance[5]
            else None,
            min_tokens=int(numbers.integers(4)),
        )
        tokens = numbers.integers(vocab, size=at).tolist()
        ends = frozenset(numbers.integers(vocab, size=200).tolist()) | {-2, vocab + 5}  # ids that no score has
        for one in made:
            one.start(start(row, params, tokens, prompt_len=max(1, at - 4), seed=row, stop_ids=ends))

    for row in range(rows):
        begin(row, 30)
    for at in range(30, 70):
        begin(int(numbers.integers(rows)), at)
        present = numbers.permutation(rows)[:11]
        logits = torch.from_numpy(numbers.normal(size=(11, vocab)).astype(np.float32)) * 2
        masked = sorted(numbers.permutation(11)[:3].tolist())
        allowed = {line: numbers.integers(vocab, size=60).tolist() for line in masked}
        masks = late(allowed, vocab) if at % 2 else None
        got, want = (one.sample(logits, present, np.full(11, at), masks)[:2] for one in made)
        assert torch.equal(got[1], want[1]), "the best scores differ"
        assert torch.equal(got[0], want[0])
    assert torch.equal(made[0].edits.counts, made[1].edits.counts)
    assert torch.equal(made[0].edits.seen, made[1].edits.seen)
    assert int(made[0].edits.counts.sum()) > 100


@pytest.mark.parametrize("way", NATIVE, indirect=True)
def test_threads_and_neighbours_change_no_draw_in_c(way: str) -> None:
    vocab, count = 49_152, 7
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(2)) * 2
    made = sampler(vocab)
    for row in range(count):
        made.start(start(row, mixed(2 * row), seed=row))
    for row in np.flatnonzero(made.edits.penalty_slot[:count] >= 0):  # counts would go on from draw to draw
        made.start(start(int(row), SamplingParams(temperature=1.0, top_p=0.8), seed=int(row)))
    before, positions = torch.get_num_threads(), np.full(count, 3)
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(made.sample(logits, np.arange(count), positions)[0].tolist())
            found.append([int(made.sample(logits[i : i + 1], np.array([i]), positions[:1])[0]) for i in range(count)])
    finally:
        torch.set_num_threads(before)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("way", NATIVE, indirect=True)
@pytest.mark.parametrize("vocab", [1, 2, 5, 31, 63, 64, 65, 130])
def test_small_vocabularies_in_c(vocab: int, way: str) -> None:
    """Shorter than a vector, or a little longer than a stretch of them."""
    logits = crafted(vocab)
    for values in ({}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": vocab, "top_p": 0.5}, {"min_p": 0.3}):
        params = SamplingParams(temperature=1.0, **values)
        global ops_now
        ops_now = WAYS[way]
        in_c = draws(logits, params, 200)
        ops_now = WAYS["cpu"]
        assert in_c == draws(logits, params, 200)
