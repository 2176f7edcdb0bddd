"""Requests without a data file: lengths drawn from a distribution fitted to a real trace.

Source of the tables: the Azure LLM inference trace of 2023 (AzurePublicDataset, CC-BY), conversation and code. A table
holds the lengths at fixed quantiles, denser in the tail; between them the inverse distribution is interpolated
linearly, which puts the means within 5% of the trace's. Prompt and output are drawn independently: in the trace their
logarithms correlate by 0.09 (conversation) and 0.00 (code).
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.names import pick
from shoal.workload.traces import TraceRequest

QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999, 1.0)


@dataclass(frozen=True)
class LengthTable:
    """Prompt and output lengths at QUANTILES."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    source: str


TABLES = {
    "azure-conv": LengthTable(
        (2, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4092, 4142, 4831, 6179, 14050),
        (7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 522, 601, 643, 954, 1000),
        "quantiles of 19,366 chat requests, Azure LLM inference trace 2023 (conversation), CC-BY",
    ),
    "azure-code": LengthTable(
        (3, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7435, 7436, 7436, 7437, 7437),
        (6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 145, 251, 359, 825, 1899),
        "quantiles of 8,819 code-completion requests, Azure LLM inference trace 2023 (code), CC-BY",
    ),
}


def at_quantile(table: Sequence[int], u: float) -> int:
    """The length below which a share u of the trace lies.

    >>> at_quantile(TABLES["azure-conv"].prompt, 0.5)
    1020
    """
    upper = min(bisect_right(QUANTILES, u), len(QUANTILES) - 1)
    low, high = QUANTILES[upper - 1], QUANTILES[upper]
    share = (u - low) / (high - low)
    return max(1, round(table[upper - 1] + share * (table[upper] - table[upper - 1])))


def draw_lengths(name: str, count: int, seed: int = 0) -> list[TraceRequest]:
    """`count` requests with lengths like the trace's, all arriving at 0."""
    table, source = pick(TABLES, name, "length table"), random.Random(seed)
    return [
        TraceRequest(0.0, at_quantile(table.prompt, source.random()), at_quantile(table.output, source.random()))
        for _ in range(count)
    ]
