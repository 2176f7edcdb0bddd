"""The draws of a pass: which rows draw a token, where they are in the plan, and which positions the tokens will have.

The only reader of StepPlan.draws. Knows plans, not scores.
"""

from typing import NamedTuple

import numpy as np

from shoal.core.plan import Ints, StepPlan


class PassDraws(NamedTuple):
    """One entry per row that draws, in the plan's order."""

    rows: Ints
    generations: Ints
    positions: Ints  # of the tokens that are drawn: each row's first position beyond the pass
    last: Ints  # index of the row's last token among the plan's tokens; its hidden state is scored


def draws_of(plan: StepPlan) -> PassDraws:
    """The draws that a plan asks for; every row draws at most one token."""
    assert not (plan.draws > 1).any(), "this runner verifies no draft tokens"
    drawing = plan.draws > 0
    rows, positions = plan.rows[drawing], (plan.starts + plan.counts)[drawing]
    return PassDraws(rows, plan.generations[drawing], positions, np.cumsum(plan.counts)[drawing] - 1)
