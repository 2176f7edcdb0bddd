"""The draws of a pass: which rows draw how many tokens; and of each draw, which is a line of scores, the hidden state
that is scored, the position of its token, and the draft token that it must equal.

    plan    row 5: position 11, draws 1        row 2: positions 20 … 22, the last two of them drafts, draws 3
    line    0                                  1                2                3
            position 12, expects nothing       21, first draft  22, second draft 23, expects nothing

Most of this follows from the rows and their counts alone, which are the same in many passes: the latest are remembered,
because the device waits while the host works this out. The only reader of StepPlan.draws. Knows plans, not scores.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shoal.core.plan import DRAFTED, Ints, StepPlan

NO_DRAFT = -1  # a row's last draw confirms no draft token
REMEMBERED = 64  # layouts


class PassDraws(NamedTuple):
    """Rows that draw, in the plan's order; and their draws, which are called lines: row after row, each in order."""

    # one entry per row that draws
    rows: Ints
    generations: Ints
    counts: Ints  # how many lines it has
    first_lines: Ints  # the first of them
    # one entry per line
    line_rows: Ints
    row_lines: Ints  # the first line of its row
    positions: Ints  # of the token that is drawn
    scored: Ints  # index among the plan's tokens: the hidden state of this one is scored
    # the draft token at that position, which the draw must equal; NO_DRAFT in each row's last line; DRAFTED and less:
    # it is on the device
    expected: Ints

    @property
    def lines(self) -> int:
        return len(self.line_rows)

    @property
    def has_drafts(self) -> bool:
        """Whether some row draws more than once."""
        return len(self.line_rows) > len(self.rows)

    @property
    def are_late(self) -> bool:
        """Whether some draft tokens are on the device."""
        return self.has_drafts and bool((self.expected <= DRAFTED).any())

    def settled(self, drafted: Ints) -> "PassDraws":
        """The same with the draft tokens that are on the device; drafted: [number, row]."""
        late, expected = np.flatnonzero(self.expected <= DRAFTED), self.expected.copy()
        expected[late] = drafted[DRAFTED - expected[late], self.line_rows[late]]
        return self._replace(expected=expected)


class DrawLayout(NamedTuple):
    """What follows from the rows, counts and draws of a plan."""

    drawing: Ints  # indexes of the rows that draw
    rows: Ints
    counts: Ints
    first_lines: Ints
    # one entry per line
    owners: Ints  # index of its row among the plan's
    line_rows: Ints
    row_lines: Ints
    reach: Ints  # the position of its token, counted from the first that the row computes
    scored: Ints
    follows: Ints  # index among the plan's tokens: the draft token that it must equal; any, if there is none
    last_lines: Ints  # of each row that draws: they expect nothing


def draws_of(plan: StepPlan) -> PassDraws:
    """The draws that a plan asks for."""
    layout = _layout(plan.rows.tobytes(), plan.counts.tobytes(), plan.draws.tobytes())
    expected = plan.tokens[layout.follows]
    expected[layout.last_lines] = NO_DRAFT
    return PassDraws(
        layout.rows,
        plan.generations[layout.drawing],
        layout.counts,
        layout.first_lines,
        layout.line_rows,
        layout.row_lines,
        plan.starts[layout.owners] + layout.reach,
        layout.scored,
        expected,
    )


@lru_cache(REMEMBERED)
def _layout(row_bytes: bytes, count_bytes: bytes, draw_bytes: bytes) -> DrawLayout:
    """From the bytes of the plan's arrays."""
    all_rows, positions, draws = (np.frombuffer(one, dtype=np.int64) for one in (row_bytes, count_bytes, draw_bytes))
    drawing = np.flatnonzero(draws)
    rows, counts = all_rows[drawing], draws[drawing]
    ends = np.cumsum(counts)
    lines = int(counts.sum())
    owners = np.repeat(drawing, counts)
    after = np.repeat(ends, counts) - 1 - np.arange(lines)  # how many lines of the same row follow
    scored = np.cumsum(positions)[owners] - 1 - after
    return DrawLayout(
        drawing,
        rows,
        counts,
        ends - counts,
        owners,
        all_rows[owners],
        np.repeat(ends - counts, counts),
        positions[owners] - after,
        scored,
        scored + (after > 0),
        ends - 1,
    )
