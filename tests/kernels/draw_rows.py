"""Rows that want draws of every kind."""

import random

from shoal.core.params import SamplingParams
from shoal.core.plan import RowStart
from shoal.runner.sampler import Sampler


def start_rows_of_all_kinds(sampler: Sampler, source: random.Random) -> None:
    for row in range(len(sampler.rows.seed)):
        params = SamplingParams(
            temperature=source.choice([0.0, 0.01, 0.3, 1.0, 2.0]),
            top_k=source.choice([None, 1, 5, 50, 2000, 10**6]),
            top_p=source.choice([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
            min_p=source.choice([0.0, 0.0, 0.05, 1.0]),
        )
        seed = source.randrange(2**63)
        sampler.start(RowStart(row, 0, (1, 2), 2, params, seed, source.randrange(4), frozenset(), (0,), False))
