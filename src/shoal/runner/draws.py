"""The draws of a pass: which rows draw how many tokens; and of each draw, which is a line of scores, the hidden state
that is scored, the position of its token, and the draft token that it must equal.

    plan    row 5: position 11, draws 1        row 2: positions 20 … 22, the last two of them drafts, draws 3
    line    0                                  1                2                3
            position 12, expects nothing       21, first draft  22, second draft 23, expects nothing

The only reader of StepPlan.draws. Knows plans, not scores.
"""

from typing import NamedTuple

import numpy as np

from shoal.core.plan import Ints, StepPlan

NO_DRAFT = -1  # a row's last draw confirms no draft token


class PassDraws(NamedTuple):
    """Rows that draw, in the plan's order; and their draws, which are called lines: row after row, each in order."""

    # one entry per row that draws
    rows: Ints
    generations: Ints
    counts: Ints  # how many lines it has
    # one entry per line
    line_rows: Ints
    positions: Ints  # of the token that is drawn
    scored: Ints  # index among the plan's tokens: the hidden state of this one is scored
    expected: Ints  # the draft token at that position, which the draw must equal; NO_DRAFT in each row's last line

    @property
    def lines(self) -> int:
        return len(self.line_rows)

    @property
    def first_lines(self) -> Ints:
        """The first line of each row."""
        first: Ints = np.cumsum(self.counts) - self.counts
        return first

    @property
    def has_drafts(self) -> bool:
        """Whether some row draws more than once."""
        return len(self.line_rows) > len(self.rows)


def draws_of(plan: StepPlan) -> PassDraws:
    """The draws that a plan asks for."""
    drawing = plan.draws > 0
    rows, generations, counts = plan.rows[drawing], plan.generations[drawing], plan.draws[drawing]
    ends, last = (plan.starts + plan.counts)[drawing], np.cumsum(plan.counts)[drawing] - 1
    lines = int(counts.sum())
    expected = np.full(lines, NO_DRAFT, dtype=np.int64)
    if lines == len(rows):
        return PassDraws(rows, generations, counts, rows, ends, last, expected)
    # how many lines of the same row follow
    after = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(lines)
    scored = np.repeat(last, counts) - after
    drafted = after > 0
    expected[drafted] = plan.tokens[scored[drafted] + 1]
    positions = np.repeat(ends, counts) - after
    return PassDraws(rows, generations, counts, np.repeat(rows, counts), positions, scored, expected)
