"""Choosing tokens in torch, for a whole batch at once: what runs on CPUs without the C library, and on GPUs for rows
that need more than a draw from the model's own scores.

The meaning is that of `choose` in ref.py. The implementations differ in the last bit of a logarithm and of a sum of
many shares: so they may choose differently where two sums of score and noise are that close, or where a token is that
close to the border of top_p. Of a million draws that were compared none did. Knows no plans and no blocks.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Flags, Ints
from shoal.core.ports import LateMasks
from shoal.kernels.draw_table import SamplingState, stretches
from shoal.kernels.noise import draw_keys, gumbel
from shoal.kernels.transfer import to_device

FIRST_LOOK = 1024  # so many of the likeliest tokens usually hold the mass that top_p asks for


def choose(
    logits: Tensor,
    rows: Ints,
    positions: Ints,
    state: SamplingState,
    masks: LateMasks | None,
    expected: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """As Ops.choose."""
    scores = logits = logits.float()
    if has_edits(state, rows, positions).any():
        scores = edited(logits, rows, positions, state, masks, expected)
    if masks is not None:
        scores = logits.clone() if scores is logits else scores
        _mask(scores, masks)
    best, tokens = scores.max(dim=-1)
    drawn = np.flatnonzero(state.temperature[rows] > 0)
    if drawn.size:
        where = to_device(drawn, scores.device)
        whole = len(drawn) == len(rows)
        # relative to the best, so that no temperature, however small, makes a score infinite
        above = (scores if whole else scores[where]) - best[where].unsqueeze(1)
        tokens[where] = _draw(above, rows[drawn], positions[drawn], state)
    _count(state, rows, tokens, expected)
    return tokens, best


# ---- logit edits ----------------------------------------------------------------------------------------------------


def has_edits(state: SamplingState, rows: Ints, positions: Ints) -> Flags:
    """Which of the rows edit their scores at these positions, grammars apart."""
    if not len(state.ends_ids) and not len(state.bias_ids) and not len(state.counts):
        return np.zeros(len(rows), dtype=np.bool_)  # no row ever did
    early = (state.ends_count[rows] > 0) & (positions < state.first_free_end[rows])
    found: Flags = early | (state.bias_count[rows] > 0) | (state.penalty_slot[rows] >= 0)
    return found


def edited(
    logits: Tensor,
    rows: Ints,
    positions: Ints,
    state: SamplingState,
    masks: LateMasks | None = None,
    expected: Ints | None = None,
) -> Tensor:
    """A copy of the logits with penalties, biases and forbidden ends. Masked lines forbid no ends: the grammar does."""
    scores = logits.clone()
    penalised = np.flatnonzero(state.penalty_slot[rows] >= 0)
    if penalised.size:
        _penalise(scores, penalised, rows[penalised], state, expected)
    biases = state.bias_count[rows]
    if biases.any():
        lines, at = stretches(state.bias_first[rows], biases)
        where = (to_device(lines, scores.device), to_device(state.bias_ids[at], scores.device))
        scores.index_put_(where, to_device(state.bias_amounts[at], scores.device), accumulate=True)
    early = positions < state.first_free_end[rows]
    if masks is not None:
        early[masks.lines] = False
    ends = state.ends_count[rows] * early
    if ends.any():
        lines, at = stretches(state.ends_first[rows], ends)
        where = (to_device(lines, scores.device), to_device(state.ends_ids[at], scores.device))
        scores[where] = -torch.inf
    return scores


def _penalise(scores: Tensor, lines: Ints, rows: Ints, state: SamplingState, expected: Ints | None) -> None:
    """Lower the scores of tokens that came before, drafts before a line included."""
    device = scores.device
    where, slots = to_device(lines, device), to_device(state.penalty_slot[rows], device)
    strengths = np.stack([one[rows] for one in (state.repetition, state.frequency, state.presence)])
    repetition, frequency, presence = to_device(strengths, device).unsqueeze(2)
    values, counts, seen = scores[where], state.counts[slots], state.seen[slots]
    if expected is not None:
        owners, tokens = _drafts_before(lines, expected)
        at = (to_device(owners, device), to_device(tokens, device))
        counts.index_put_(at, counts.new_ones(()), accumulate=True)
        seen[at] = True
    lowered = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, lowered, values)
    scores[where] = values - frequency * counts - presence * (counts > 0)


def _drafts_before(lines: Ints, expected: Ints) -> tuple[Ints, Ints]:
    """(index into lines, token) of every draft token before one of these lines in its row.

    >>> [part.tolist() for part in _drafts_before(np.array([1, 3]), np.array([-1, 7, 8, -1]))]
    [[1, 1], [7, 8]]
    """
    first = _first_lines(expected)[lines]
    owners, at = stretches(first, lines - first)
    return owners, expected[at]


def _first_lines(expected: Ints) -> Ints:
    """The first line of each line's row.

    >>> _first_lines(np.array([-1, 7, 8, -1])).tolist()
    [0, 1, 1, 1]
    """
    begins = np.concatenate(([True], expected[:-1] < 0))
    first: Ints = np.maximum.accumulate(np.where(begins, np.arange(len(expected)), 0))
    return first


def _count(state: SamplingState, rows: Ints, tokens: Tensor, expected: Ints | None) -> None:
    """Add the chosen tokens to what the rows' penalties count, up to each row's first that is not its draft."""
    slots = state.penalty_slot[rows]
    lines = np.flatnonzero(slots >= 0)
    if not lines.size:
        return
    where, at = to_device(lines, tokens.device), to_device(slots[lines], tokens.device)
    if expected is None or (expected < 0).all():
        state.seen[at, tokens[where]] = True
        state.counts[at, tokens[where]] += 1
        return
    # what is accepted is known on the device only: nothing here waits for it
    drafts, first = to_device(expected, tokens.device), to_device(_first_lines(expected), tokens.device)
    wrong = (tokens != drafts) & (drafts >= 0)
    before = wrong.cumsum(0) - wrong.long()
    kept = (before == before[first])[where]
    state.counts.index_put_((at, tokens[where]), kept.to(state.counts.dtype), accumulate=True)
    state.seen[at, torch.where(kept, tokens[where], tokens[first[where]])] = True  # a row's first token is always kept


def _mask(scores: Tensor, masks: LateMasks) -> None:
    """Keep only the tokens that grammars allow, in the lines that have one."""
    eights = (~masks.allowed).view(np.uint8)
    forbidden = np.zeros(scores.shape, dtype=np.bool_)
    forbidden[masks.lines] = np.unpackbits(eights, axis=1, count=scores.shape[1], bitorder="little")
    scores.masked_fill_(to_device(forbidden, scores.device), -torch.inf)  # one call costs more than a line of scores


# ---- draws ----------------------------------------------------------------------------------------------------------


def _draw(above: Tensor, rows: Ints, positions: Ints, state: SamplingState) -> Tensor:
    """One draw per line, after temperature and the filters."""
    device = above.device
    scaled = above / to_device(state.temperature[rows], device).unsqueeze(1)
    keys = to_device(draw_keys(state.seed[rows], state.sample[rows], positions), device)
    ranked = (state.top_k[rows] > 0) | (state.top_p[rows] < 1)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    for chosen, pick in ((~ranked, _from_all), (ranked, _from_likeliest)):
        if chosen.all():
            return pick(scaled, keys, rows, state)
        if chosen.any():
            where = to_device(np.flatnonzero(chosen), device)
            tokens[where] = pick(scaled[where], keys[where], rows[chosen], state)
    return tokens


@lru_cache(maxsize=8)
def _all_ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device)


def _from_all(scaled: Tensor, keys: Tensor, rows: Ints, state: SamplingState) -> Tensor:
    noisy = scaled + gumbel(keys, _all_ids(scaled.shape[1], scaled.device))
    min_p = state.min_p[rows]
    if min_p.any():
        least = torch.log(to_device(min_p, scaled.device)).unsqueeze(1)  # the best is 0
        noisy = noisy.masked_fill(scaled < least, -torch.inf)
    return noisy.argmax(dim=-1)


def _from_likeliest(scaled: Tensor, keys: Tensor, rows: Ints, state: SamplingState) -> Tensor:
    """Filters by rank look at the likeliest tokens only, and at all of them where those do not suffice."""
    vocab = scaled.shape[1]
    top_k = state.top_k[rows]
    most = int(top_k.max()) + 1 if (top_k > 0).all() else max(FIRST_LOOK, int(top_k.max()) + 1)
    most = min(most, vocab)
    tokens, enough = _from_top(scaled, keys, rows, state, most)
    if most < vocab and not bool(enough.all()):
        short = torch.nonzero(~enough).squeeze(1)
        again, _ = _from_top(scaled[short], keys[short], rows[short.cpu().numpy()], state, vocab)
        tokens[short] = again
    return tokens


def _from_top(scaled: Tensor, keys: Tensor, rows: Ints, state: SamplingState, most: int) -> tuple[Tensor, Tensor]:
    """Draw among the `most` likeliest; also for which lines that was enough to see the whole set.

    A set is bounded by a score, not by a rank: tokens as likely as the last one in it are in it too. Else equal
    scores would be kept or lost by the order in which a sort happens to leave them.
    """
    device = scaled.device
    values, ids = scaled.topk(most, dim=-1)
    top_k, top_p = to_device(state.top_k[rows], device).unsqueeze(1), to_device(state.top_p[rows], device).unsqueeze(1)
    last = values.gather(1, (top_k - 1).clamp(0, most - 1))
    least = torch.where(top_k > 0, last, -torch.inf)  # the smallest score that stays
    inside = values.masked_fill(values < least, -torch.inf)
    # the mass is that of the top_k set where there is one, else of the whole vocabulary
    mass = torch.where(top_k > 0, inside.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
    share = torch.exp(inside - mass)
    reached = share.cumsum(dim=-1)
    within = ((reached - share < top_p) & (share > 0)).sum(dim=-1, keepdim=True).clamp(min=1)
    least = torch.maximum(least, torch.where(top_p < 1, values.gather(1, within - 1), -torch.inf))
    least = torch.maximum(least, torch.log(to_device(state.min_p[rows], device)).unsqueeze(1))  # the best is 0
    keep = (values >= least) | (values == values[:, :1])
    noisy = (values + gumbel(keys, ids.to(torch.int32))).masked_fill(~keep, -torch.inf)
    tokens = ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
    lowest = values[:, -1:]
    # the top_k set must be seen whole, also where top_p leaves less of it: its mass counts
    whole = lowest < torch.where(top_k > 0, last, least)
    enough = (whole | (lowest == -torch.inf)).squeeze(1)  # beyond a forbidden token all are forbidden
    return tokens, enough
