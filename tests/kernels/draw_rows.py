"""Rows with draws of every kind, and masks."""

import random
from collections.abc import Sequence

import numpy as np

from shoal.core.params import SamplingParams
from shoal.core.plan import RowStart
from shoal.core.ports import LateMasks
from shoal.kernels.draw_table import SamplingState
from shoal.kernels.ref import RefOps
from shoal.runner.sampler import Sampler


def start_rows_of_all_kinds(sampler: Sampler, source: random.Random) -> None:
    """Every mix of temperature and filters, without logit edits."""
    for row in range(len(sampler.rows.seed)):
        params = SamplingParams(
            temperature=source.choice([0.0, 0.01, 0.3, 1.0, 2.0]),
            top_k=source.choice([None, 1, 5, 50, 2000, 10**6]),
            top_p=source.choice([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
            min_p=source.choice([0.0, 0.0, 0.05, 1.0]),
        )
        seed = source.randrange(2**63)
        sampler.start(RowStart(row, 0, (1, 2), 2, params, seed, source.randrange(4), frozenset(), (0,), False))


def start_with_edits(row: int, vocab: int, at: int, numbers: np.random.Generator) -> RowStart:
    """A row whose next token has position `at`, with any mix of edits, temperature and filters."""
    chance = numbers.integers(2, size=8)
    bias = {int(token): float(numbers.normal()) for token in numbers.integers(vocab, size=5)}
    params = SamplingParams(
        temperature=float(chance[0]),
        top_p=[1.0, 0.9][chance[1]],
        repetition_penalty=[1.0, 1.3][chance[2]],
        frequency_penalty=[0.0, 0.37][chance[3]],
        presence_penalty=[0.0, -0.41][chance[4]],
        logit_bias=bias if chance[5] else None,
        min_tokens=int(numbers.integers(4)),
        top_k=[0, 20][chance[6]],
        min_p=[0.0, 0.05][chance[7]],
    )
    tokens = tuple(numbers.integers(vocab, size=at).tolist())
    ends = frozenset(numbers.integers(vocab, size=vocab // 3).tolist()) | {-2, vocab + 5}  # ids that no score has
    return RowStart(row, 0, tokens, max(1, at - 4), params, row, 0, ends, (), False)


def late(allowed: dict[int, Sequence[int]], vocab: int) -> LateMasks:
    """Line → the tokens that its grammar allows; in ascending order."""
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), dtype=np.uint8)
    for line, tokens in zip(bits, allowed.values(), strict=True):
        line[list(tokens)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return LateMasks(np.array(list(allowed), dtype=np.int64), words)


def greedy_rows(rows: int, vocab: int) -> SamplingState:
    """Rows at temperature 0 without edits."""
    return Sampler(rows, vocab, "cpu", RefOps()).state
