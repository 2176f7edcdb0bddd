"""Verifying draft tokens: how many tokens each row of a pass yields.

A row's lines are drawn all at once. A draft token is accepted if the draw at its position confirms it; the draw that
first does not confirm its draft is the row's last token, and what was drawn after it has no meaning.

    draft        cat   sat   on    –          rows with one draw expect nothing, and yield it
    drawn        cat   sat   by   his
    confirmed    yes   yes   no               accepted: cat, sat, by

A line whose scores are not finite yields nothing. If it is a row's first, the row has failed; else the row yields what
comes before, and fails in the next pass, in which this line is the first: as it would without drafts.

Both executors, on CPUs and on GPUs, use this on host arrays. A row with drafts in flight is not planned again before
they are committed, so the device itself need not know what was accepted.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shoal.core.plan import Flags, Ints
from shoal.kernels.draw_table import SamplingState
from shoal.kernels.noise import coins, draw_keys
from shoal.runner.draws import NO_DRAFT, PassDraws


class AcceptedTokens(NamedTuple):
    """What the rows of a pass yield; a row that has failed: one token without meaning."""

    counts: Ints  # tokens of each row
    lines: Ints  # the lines that they come from, ascending
    tokens: Ints


class DraftRule(Protocol):
    """Which lines confirm their draft token."""

    def confirmed(self, draws: PassDraws, tokens: Ints, state: SamplingState) -> Flags:
        """One entry per line, given the tokens drawn; false where no draft is expected."""

    def foresee(self, draws: PassDraws, state: SamplingState) -> None:
        """Called while these draws are computed, of which one will confirm some: find out what can be known before."""


class EqualTokens:
    """A draft is confirmed by a draw that equals it. So drafts change no token, only how many come in one pass."""

    def confirmed(self, draws: PassDraws, tokens: Ints, state: SamplingState) -> Flags:
        same: Flags = tokens == draws.expected
        return same

    def foresee(self, draws: PassDraws, state: SamplingState) -> None:
        pass


class CoinToss:
    """A draft is confirmed with a fixed probability, whatever was drawn: for benchmarks, whose text has no meaning.

    The coin depends on seed, sample and position alone, as a draw does. A confirmed draft is the row's token as it is,
    so that tokens and KV agree, as they must for the prefix cache and for a request that is computed again. Penalties
    count the draws, not the coin.
    """

    def __init__(self, probability: float) -> None:
        self.probability = probability
        self._tossed: tuple[Ints, Flags] | None = None  # before they are needed; and the positions that they are for

    def confirmed(self, draws: PassDraws, tokens: Ints, state: SamplingState) -> Flags:
        if self._tossed is None or self._tossed[0] is not draws.positions:
            self.foresee(draws, state)
        assert self._tossed is not None
        return self._tossed[1]

    def foresee(self, draws: PassDraws, state: SamplingState) -> None:
        """No real drafter tosses coins while the device waits, so this does not, either."""
        rows = draws.line_rows
        keys = draw_keys(state.seed[rows], state.sample[rows], draws.positions)
        self._tossed = draws.positions, coins(keys, self.probability) & (draws.expected != NO_DRAFT)


def accepted_tokens(
    draws: PassDraws, tokens: Ints, best: npt.NDArray[np.float32], rule: DraftRule, state: SamplingState
) -> AcceptedTokens:
    """What each row yields of the tokens drawn in its lines; best: the best score of each line."""
    if not draws.has_drafts:
        return AcceptedTokens(draws.counts, np.arange(draws.lines), tokens)
    confirmed, finite = rule.confirmed(draws, tokens, state), np.isfinite(best)
    first, all_finite = draws.row_lines, finite.all()
    last = ~confirmed if all_finite else ~(confirmed & finite)  # nothing after this line is accepted
    before: Ints = np.cumsum(last) - last
    kept = before == before[first]
    if not all_finite:
        kept &= finite | (first == np.arange(draws.lines))
    lines = np.flatnonzero(kept)
    drafted = np.where(confirmed, draws.expected, tokens)
    return AcceptedTokens(np.add.reduceat(kept, draws.first_lines, dtype=np.int64), lines, drafted[lines])
