"""ref's draws from a draw table against the sampler, whose distribution is compared with transformers' processors.

tests/gpu compares the kernel with both.
"""

import random

import numpy as np
import pytest
import torch

from shoal.kernels import ref
from shoal.kernels.cpu import CpuOps
from shoal.kernels.draw_table import COLUMNS, fill
from shoal.runner.sampler import Sampler
from tests.kernels.draw_rows import start_rows_of_all_kinds


@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
@pytest.mark.parametrize(("lines", "vocab"), [(1, 7), (60, 4096), (200, 1500)])
def test_draws_from_a_table_are_the_samplers(spread: float, lines: int, vocab: int) -> None:
    source = random.Random(vocab + int(100 * spread))
    torch.manual_seed(vocab)
    scores = (spread * torch.randn(lines + 3, vocab)).to(torch.bfloat16)
    scores[0, 3] = float("-inf")
    sampler = Sampler(lines, vocab, "cpu", CpuOps())
    start_rows_of_all_kinds(sampler, source)
    rows, positions = np.arange(lines), np.array([source.randrange(10**5) for _ in range(lines)])
    wanted, best, _ = sampler.sample(scores[:lines].float(), rows, positions)
    table = np.zeros((COLUMNS, lines + 3), dtype=np.int32)
    fill(table, sampler.state, rows, positions)
    tokens, last = torch.full((lines + 3,), -1, dtype=torch.int32), torch.full((lines,), -1)
    found = torch.zeros(lines + 3)
    ref.draw(scores, torch.from_numpy(table), last, tokens, found)
    assert tokens[:lines].tolist() == wanted.tolist() == last.tolist()
    assert torch.equal(found[:lines], best)


def test_lines_without_meaning_have_no_finite_best_and_padding_writes_no_row() -> None:
    scores = torch.randn(4, 50)
    scores[1, 7] = float("nan")
    scores[2] = float("-inf")
    scores[3, [9, 30]] = 40.0
    rows = torch.tensor([1, 0, -1, 2], dtype=torch.int32)
    last, tokens, best = torch.full((3,), -5), torch.full((4,), -1, dtype=torch.int32), torch.zeros(4)
    ref.likeliest(scores, rows, last, tokens, best)
    assert best.isfinite().tolist() == [True, False, False, True]
    assert [int(tokens[0]), int(tokens[3])] == [int(scores[0].argmax()), 9]
    assert last.tolist() == [int(tokens[1]), int(tokens[0]), 9]
    assert all(0 <= token < 50 for token in tokens.tolist())
