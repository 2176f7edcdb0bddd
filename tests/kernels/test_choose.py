"""Choosing a token: every implementation against the definition in ref.py.

tests/runner/test_sampler.py compares the sampler's distribution with transformers' own processors; tests/gpu repeats
this file's comparison on a GPU.
"""

import random

import numpy as np
import pytest
import torch

from shoal import kernels
from shoal.core.plan import Ints
from shoal.kernels import Ops
from shoal.kernels.ref import RefOps
from shoal.runner.sampler import Sampler
from tests.kernels.draw_rows import greedy_rows, late, start_rows_of_all_kinds, start_with_edits

OTHERS = [pytest.param(ops, id=name) for name, ops in kernels.available() if name != "ref"]
ALL = [pytest.param(ops, id=name) for name, ops in kernels.available()]
REF = RefOps()


@pytest.mark.parametrize("ops", OTHERS)
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
@pytest.mark.parametrize(("lines", "vocab"), [(1, 7), (60, 4096), (120, 1501)])
def test_draws_are_those_of_the_definition(ops: Ops, spread: float, lines: int, vocab: int) -> None:
    source = random.Random(vocab + int(100 * spread))
    torch.manual_seed(vocab)
    scores = (spread * torch.randn(lines, vocab)).to(torch.bfloat16).float()  # with ties
    scores[0, 3] = float("-inf")
    sampler = Sampler(lines, vocab, "cpu", ops)
    start_rows_of_all_kinds(sampler, source)
    rows, positions = np.arange(lines), np.array([source.randrange(10**5) for _ in range(lines)])
    found, best = ops.choose(scores, rows, positions, sampler.state, None)
    wanted, wanted_best = REF.choose(scores, rows, positions, sampler.state, None)
    assert found.tolist() == wanted.tolist()
    assert torch.equal(best, wanted_best)
    assert found.dtype == wanted.dtype == torch.int64
    assert best.dtype == wanted_best.dtype == torch.float32


@pytest.mark.parametrize("ops", OTHERS)
def test_edits_and_masks_are_those_of_the_definition(ops: Ops) -> None:
    """Everything at once, over many passes in which rows end and others take their place; to the last bit."""
    numbers, vocab, rows = np.random.default_rng(3), 517, 12
    made = [Sampler(rows, vocab, "cpu", one) for one in (ops, REF)]

    def begin(row: int, at: int) -> None:
        start = start_with_edits(row, vocab, at, numbers)
        for one in made:
            one.start(start)

    for row in range(rows):
        begin(row, 30)
    for at in range(30, 60):
        begin(int(numbers.integers(rows)), at)
        present = numbers.permutation(rows)[:9]
        logits = torch.from_numpy(numbers.normal(size=(9, vocab)).astype(np.float32)) * 2
        before = logits.clone()
        masked = sorted(numbers.permutation(9)[:3].tolist())
        allowed = {line: numbers.integers(vocab, size=60).tolist() for line in masked}
        masks = late(allowed, vocab) if at % 2 else None
        got, want = (one.ops.choose(logits, present, np.full(9, at), one.state, masks) for one in made)
        assert torch.equal(got[1], want[1]), "the best scores differ"
        assert torch.equal(got[0], want[0])
        assert torch.equal(logits, before)
    assert torch.equal(made[0].edits.counts, made[1].edits.counts)
    assert torch.equal(made[0].edits.seen, made[1].edits.seen)
    assert int(made[0].edits.counts.sum()) > 50


def drafted_lines(rows: Ints, numbers: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """For each of these rows up to five drafts of few different tokens: (row, lines of it before, draft) of lines."""
    counts = numbers.integers(1, 7, size=len(rows))
    last = np.cumsum(counts) - 1
    expected = numbers.integers(4, size=int(counts.sum()))
    expected[last] = -1
    return np.repeat(rows, counts), np.arange(len(expected)) - np.repeat(last + 1 - counts, counts), expected


def flat_scores(lines: int, vocab: int, numbers: np.random.Generator) -> torch.Tensor:
    """Scores in which four tokens stand out, so that drafts among these are often right."""
    scores = torch.from_numpy(numbers.normal(size=(lines, vocab)).astype(np.float32))
    scores[:, :4] += 6
    return scores


@pytest.mark.parametrize("ops", OTHERS)
def test_penalties_count_along_drafts_as_in_the_definition(ops: Ops) -> None:
    """With edits, masks and filters, over many passes; the best scores to the last bit, and the counts."""
    numbers, vocab, rows = np.random.default_rng(4), 517, 12
    made = [Sampler(rows, vocab, "cpu", one) for one in (ops, REF)]
    for row in range(rows):
        start = start_with_edits(row, vocab, 30, numbers)
        for one in made:
            one.start(start)
    right = 0
    for at in range(30, 60):
        line_rows, ahead, expected = drafted_lines(numbers.permutation(rows)[:9], numbers)
        lines = len(line_rows)
        logits = flat_scores(lines, vocab, numbers)
        masked = sorted(numbers.permutation(lines)[:3].tolist())
        masks = late({line: numbers.integers(vocab, size=60).tolist() for line in masked}, vocab) if at % 2 else None
        got, want = (one.ops.choose(logits, line_rows, at + ahead, one.state, masks, expected) for one in made)
        assert torch.equal(got[1], want[1]), "the best scores differ"
        assert torch.equal(got[0], want[0])
        assert torch.equal(made[0].edits.counts, made[1].edits.counts)
        assert torch.equal(made[0].edits.seen, made[1].edits.seen)
        right += int((got[0].numpy() == expected).sum())
    assert right > 50


@pytest.mark.parametrize("ops", ALL)
def test_verified_drafts_leave_the_tokens_and_counts_of_single_draws(ops: Ops) -> None:
    """The definition itself: accepted tokens, best scores and counts are those of one draw after the other."""
    numbers, vocab, rows = np.random.default_rng(6), 300, 8
    drafted, plain = (Sampler(rows, vocab, "cpu", ops) for _ in range(2))
    for row in range(rows):
        start = start_with_edits(row, vocab, 30, numbers)
        drafted.start(start)
        plain.start(start)
    positions, verified = np.full(rows, 30), 0
    for _ in range(30):
        line_rows, ahead, expected = drafted_lines(np.arange(rows), numbers)
        logits = flat_scores(len(line_rows), vocab, numbers)
        tokens, best = ops.choose(logits, line_rows, positions[line_rows] + ahead, drafted.state, None, expected)
        for row in range(rows):
            for line in np.flatnonzero(line_rows == row).tolist():
                alone = ops.choose(logits[[line]], np.array([row]), positions[[row]], plain.state, None)
                assert (int(alone[0]), float(alone[1])) == (int(tokens[line]), float(best[line]))
                positions[row] += 1
                if int(tokens[line]) != expected[line]:
                    break
                verified += 1
        assert torch.equal(drafted.edits.counts, plain.edits.counts)
        assert torch.equal(drafted.edits.seen, plain.edits.seen)
    assert verified > 60


@pytest.mark.parametrize("ops", ALL)
def test_the_likeliest_token(ops: Ops) -> None:
    """The first of equals; a line without meaning has a best score that is not finite."""
    scores = torch.randn(6, 1003)
    scores[1, 1002] = 9.0
    scores[2, 17] = scores[2, 40] = 9.0
    scores[3, 500] = float("nan")
    scores[4] = -torch.inf
    scores[5, 8] = torch.inf
    tokens, best = ops.choose(scores, np.arange(6), np.full(6, 3), greedy_rows(6, 1003), None)
    assert torch.equal(tokens[:3], scores[:3].argmax(-1))
    assert int(tokens[2]) == 17
    assert torch.equal(best[:3], scores[:3].amax(-1))
    assert best.isfinite().tolist() == [True] * 3 + [False] * 3
    assert best[4] == -torch.inf
    assert best[3].isnan() or best[3] == torch.inf
    assert all(0 <= token < 1003 for token in tokens.tolist())
