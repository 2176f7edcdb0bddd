"""Sampler: logits to tokens, for a whole batch at once.

Owns the sampling parameters of every row, as arrays. Logit edits (logit_edits.py) change the scores;
a grammar's mask forbids tokens, and nothing brings them back; then temperature, top_k, top_p and min_p; then one draw.
Logprobs are the model's own, before any of that. min_tokens forbids no end where a grammar decides, which may leave
nothing else. Knows no plans beyond a row's start, and no blocks.

On a CPU with the C kernels all of that is one call (`NativeOps.choose`); what stands here in torch is the definition,
and what other devices run. The two differ in the last bit of a logarithm, and of a sum of many shares: so they may
choose differently where two sums of score and noise are that close, or where a token stands that close to the border
of top_p. Of a million draws that were compared none did.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import kernels
from shoal.core.plan import Flags, Ints, RowStart
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.kernels import Ops
from shoal.kernels.cpu.native import NativeOps, SamplingState
from shoal.kernels.draw_table import KEY, MIN_P, ROW, SECOND_KEY, TEMPERATURE, TOP_K, TOP_P, Filters
from shoal.kernels.noise import gumbel
from shoal.runner.draws import draw_keys
from shoal.runner.inputs import put
from shoal.runner.logit_edits import LogitEdits

FIRST_LOOK = 1024  # so many of the likeliest tokens usually hold the mass that top_p asks for


class SamplerRows:
    """Parameters of every row, as arrays."""

    def __init__(self, rows: int) -> None:
        self.temperature = np.ones(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.sample = np.zeros(rows, dtype=np.int64)
        self.logprobs = np.full(rows, -1, dtype=np.int64)
        self.ends_at = np.zeros(rows, dtype=np.int64)  # replay: where the scripted end stands
        self.edits_scores = np.zeros(rows, dtype=np.bool_)  # has a bias, a penalty or a forbidden end

    def start(self, start: RowStart) -> None:
        row, params = start.row, start.params
        self.temperature[row] = params.temperature if params.temperature is not None else 1.0
        self.top_k[row] = params.top_k or 0
        self.top_p[row] = params.top_p if params.top_p is not None else 1.0
        self.min_p[row] = params.min_p or 0.0
        self.seed[row] = np.uint64(start.seed % 2**64).astype(np.int64)
        self.sample[row] = start.sample
        self.ends_at[row] = start.ends_at
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs


class Sampler:
    """Chooses one token for each line of logits."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str, ops: Ops | None = None) -> None:
        self.device = torch.device(device)
        self.ops = ops or kernels.pick(self.device.type)
        self.rows = SamplerRows(rows)
        self.edits = LogitEdits(rows, vocab_size, self.device)
        self.all_ids = torch.arange(vocab_size, dtype=torch.int32, device=self.device)
        self._native = self.ops if isinstance(self.ops, NativeOps) and self.device.type == "cpu" else None
        self._state: SamplingState | None = None  # the rows' arrays, as C reads them

    def start(self, start: RowStart) -> None:
        self.rows.start(start)
        self.rows.edits_scores[start.row] = self.edits.start(start)
        self._state = None  # its arrays may have grown, and then they are elsewhere

    def asking(self, rows: Ints, masks: LateMasks | None) -> Flags:
        """Which rows ask for more than a draw from the model's own scores."""
        state = self.rows
        more = state.edits_scores[rows] | (state.logprobs[rows] >= 0)
        return more if masks is None else more | np.isin(rows, masks.rows)

    def filters(self, rows: Ints) -> Filters | None:
        """What drawing these rows takes; None: they all take the likeliest token."""
        state = self.rows
        drawn = rows[state.temperature[rows] > 0]
        if not drawn.size:
            return None
        return Filters(bool((state.top_k[drawn] > 0).any()), bool((state.top_p[drawn] < 1).any()))

    def tell(self, wants: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", rows: Ints, positions: Ints) -> None:
        """Write down what a kernel needs to draw for these rows, one column each; nobody's columns have row -1."""
        count, state = len(rows), self.rows
        wants[ROW, :count], wants[ROW, count:] = rows, -1
        temperature = state.temperature[rows]
        if not temperature.any():
            return  # then nothing else is read
        wants[KEY : SECOND_KEY + 1, :count] = draw_keys(state.seed[rows], state.sample[rows], positions).T
        for column, values in ((TEMPERATURE, temperature), (MIN_P, state.min_p[rows]), (TOP_P, state.top_p[rows])):
            wants[column, :count] = values.view(np.int32)
        wants[TOP_K, :count] = state.top_k[rows]
        wants[TEMPERATURE, count:] = 0

    def sample(
        self, logits: Tensor, rows: Ints, positions: Ints, masks: LateMasks | None = None
    ) -> tuple[Tensor, Tensor, list[tuple[int, Logprobs]]]:
        """Tokens [n] for float32 logits [n, vocab]; the best score of each line; logprobs of the rows that want them.

        A best score that is not finite means that the line has no meaning, and neither has its token.
        """
        if self._native is not None:
            tokens, best = self._native.choose(logits, rows, positions, self._in_c(), masks)
            return tokens, best, self._logprobs(logits, rows, tokens)
        state = self.rows
        scores = logits
        masked = None if masks is None else np.isin(rows, masks.rows)
        if state.edits_scores[rows].any():
            scores = self._changed(logits, rows, positions, masked)
        if masks is not None and masked is not None:
            scores = logits.clone() if scores is logits else scores
            self._mask(scores, masked, masks)
        best, tokens = self.ops.best(scores)
        drawn = np.flatnonzero(state.temperature[rows] > 0)
        if drawn.size:
            where = self._put(drawn)
            whole = len(drawn) == len(rows)
            # relative to the best, so that no temperature, however small, makes a score infinite
            above = (scores if whole else scores[where]) - best[where].unsqueeze(1)
            tokens[where] = self._draw(above, rows[drawn], positions[drawn])
        self.edits.note(rows, tokens)
        return tokens, best, self._logprobs(logits, rows, tokens)

    def _in_c(self) -> SamplingState:
        if self._state is None:
            rows, changes = self.rows, self.edits
            self._state = SamplingState(
                temperature=rows.temperature,
                top_p=rows.top_p,
                min_p=rows.min_p,
                top_k=rows.top_k,
                seed=rows.seed,
                sample=rows.sample,
                first_free_end=changes.first_free_end,
                bias_first=changes.bias.first,
                bias_count=changes.bias.count,
                ends_first=changes.ends.first,
                ends_count=changes.ends.count,
                line=changes.line,
                repetition=changes.repetition,
                frequency=changes.frequency,
                presence=changes.presence,
                bias_ids=changes.bias.ids,
                ends_ids=changes.ends.ids,
                bias_amounts=changes.bias.amounts,
                seen=changes.seen.numpy(),
                said=changes.said.numpy(),
            )
        return self._state

    def _mask(self, scores: Tensor, masked: Flags, masks: LateMasks) -> None:
        """Leave only what grammars allow, in the masked lines: those of the masks' rows, in the same order."""
        eights = (~masks.allowed).view(np.uint8)
        forbidden = np.zeros(scores.shape, dtype=np.bool_)
        forbidden[masked] = np.unpackbits(eights, axis=1, count=scores.shape[1], bitorder="little")
        scores.masked_fill_(self._put(forbidden), -torch.inf)  # one call: each costs more than a line of scores

    def _changed(self, logits: Tensor, rows: Ints, positions: Ints, masked: Flags | None = None) -> Tensor:
        """A copy of the logits with biases, penalties and forbidden ends."""
        self.rows.edits_scores[rows] = self.edits.still(rows, positions)
        return self.edits.apply(logits, rows, positions, masked)

    def _draw(self, scores: Tensor, rows: Ints, positions: Ints) -> Tensor:
        """One draw per line, after temperature and the filters."""
        state = self.rows
        scaled = scores / self._put(state.temperature[rows]).unsqueeze(1)
        keys = self._put(draw_keys(state.seed[rows], state.sample[rows], positions))
        ranked = (state.top_k[rows] > 0) | (state.top_p[rows] < 1)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        for chosen, pick in ((~ranked, self._from_all), (ranked, self._from_likeliest)):
            if chosen.all():
                return pick(scaled, keys, rows)
            if chosen.any():
                where = self._put(np.flatnonzero(chosen))
                tokens[where] = pick(scaled[where], keys[where], rows[chosen])
        return tokens

    def _from_all(self, scaled: Tensor, keys: Tensor, rows: Ints) -> Tensor:
        noisy = scaled + gumbel(keys, self.all_ids)
        min_p = self.rows.min_p[rows]
        if min_p.any():
            least = torch.log(self._put(min_p)).unsqueeze(1)  # the best is 0
            noisy = noisy.masked_fill(scaled < least, -torch.inf)
        return noisy.argmax(dim=-1)

    def _from_likeliest(self, scaled: Tensor, keys: Tensor, rows: Ints) -> Tensor:
        """Filters by rank look at the likeliest tokens only, and at all of them where those do not suffice."""
        vocab = scaled.shape[1]
        top_k = self.rows.top_k[rows]
        most = int(top_k.max()) + 1 if (top_k > 0).all() else max(FIRST_LOOK, int(top_k.max()) + 1)
        most = min(most, vocab)
        tokens, enough = self._from_top(scaled, keys, rows, most)
        if most < vocab and not bool(enough.all()):
            short = torch.nonzero(~enough).squeeze(1)
            again, _ = self._from_top(scaled[short], keys[short], rows[short.cpu().numpy()], vocab)
            tokens[short] = again
        return tokens

    def _from_top(self, scaled: Tensor, keys: Tensor, rows: Ints, most: int) -> tuple[Tensor, Tensor]:
        """Draw among the `most` likeliest; also tells for which lines that was enough to see the whole set.

        A set is bounded by a score, not by a rank: tokens as likely as the last one in it are in it too. Else equal
        scores would be kept or lost by the order in which a sort happens to leave them.
        """
        state = self.rows
        values, ids = scaled.topk(most, dim=-1)
        top_k, top_p = self._put(state.top_k[rows]).unsqueeze(1), self._put(state.top_p[rows]).unsqueeze(1)
        last = values.gather(1, (top_k - 1).clamp(0, most - 1))
        least = torch.where(top_k > 0, last, -torch.inf)  # the smallest score that stays
        inside = values.masked_fill(values < least, -torch.inf)
        # the mass is that of the top_k set where there is one, else of the whole vocabulary
        mass = torch.where(top_k > 0, inside.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
        share = torch.exp(inside - mass)
        reached = share.cumsum(dim=-1)
        within = ((reached - share < top_p) & (share > 0)).sum(dim=-1, keepdim=True).clamp(min=1)
        least = torch.maximum(least, torch.where(top_p < 1, values.gather(1, within - 1), -torch.inf))
        least = torch.maximum(least, torch.log(self._put(state.min_p[rows])).unsqueeze(1))  # the best is 0
        keep = (values >= least) | (values == values[:, :1])
        noisy = (values + gumbel(keys, ids.to(torch.int32))).masked_fill(~keep, -torch.inf)
        tokens = ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
        lowest = values[:, -1:]
        # the top_k set must be seen whole, also where top_p leaves less of it: its mass counts
        whole = lowest < torch.where(top_k > 0, last, least)
        enough = (whole | (lowest == -torch.inf)).squeeze(1)  # beyond a forbidden token all are forbidden
        return tokens, enough

    def _logprobs(self, logits: Tensor, rows: Ints, tokens: Tensor) -> list[tuple[int, Logprobs]]:
        wanted = np.flatnonzero(self.rows.logprobs[rows] >= 0)
        if not wanted.size:
            return []
        where = self._put(wanted)
        most = int(self.rows.logprobs[rows].max())
        found = logprobs_of(logits[where], tokens[where], most)
        out = []
        for place, one in zip(wanted.tolist(), found, strict=True):
            count = int(self.rows.logprobs[rows[place]])
            out.append(
                (place, Logprobs(one.token, one.logprob, one.rank, one.top_tokens[:count], one.top_logprobs[:count]))
            )
        return out

    def _put(self, array: "np.ndarray[tuple[int, ...], np.dtype[Any]]") -> Tensor:
        return put(array, self.device)


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> list[Logprobs]:
    """What the model thought of each token, with the `top` likeliest beside it."""
    logs = logits.log_softmax(dim=-1)
    own = logs.gather(1, tokens.unsqueeze(1))
    ranks = (logs > own).sum(dim=-1) + 1
    values, ids = logs.topk(min(max(top, 1), logs.shape[1]), dim=-1)
    columns = (tokens.tolist(), own.squeeze(1).tolist(), ranks.tolist(), ids.tolist(), values.tolist())
    return [
        Logprobs(token, logprob, rank, tuple(top_ids[:top]), tuple(top_values[:top]))
        for token, logprob, rank, top_ids, top_values in zip(*columns, strict=True)
    ]
