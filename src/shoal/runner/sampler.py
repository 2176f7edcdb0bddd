"""Sampler: logits to tokens, for a whole batch at once.

Owns the sampling parameters of every row, as arrays. How a token is chosen from scores is `Ops.choose`: logit edits
(logit_edits.py) and grammar masks change the scores, then temperature, top_k, top_p and min_p, then one draw. Logprobs
are the model's own, before any of that. Knows no plans beyond a row's start, and no blocks.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import kernels
from shoal.core.params import NEUTRAL
from shoal.core.plan import Flags, Ints, RowStart
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.kernels import Ops
from shoal.kernels.draw_table import PARAMETERS, SamplingState
from shoal.kernels.torch_choose import has_edits
from shoal.kernels.transfer import to_device
from shoal.runner.logit_edits import LogitEdits


class SamplerRows:
    """Parameters of every row, as arrays."""

    def __init__(self, rows: int) -> None:
        self.filters: dict[str, Any] = {name: np.zeros(rows, dtype=dtype) for name, dtype in PARAMETERS.items()}
        self.seed = np.zeros(rows, dtype=np.int64)
        self.sample = np.zeros(rows, dtype=np.int64)
        self.logprobs = np.full(rows, -1, dtype=np.int64)
        self.logprob_ids: dict[int, list[int]] = {}  # rows that ask for those of certain tokens
        self.ends_at = np.zeros(rows, dtype=np.int64)  # replay: the position of the scripted end
        self.asks_more = np.zeros(rows, dtype=np.bool_)  # than a draw from the model's own scores: see Sampler.asking

    def start(self, start: RowStart) -> None:
        row, params = start.row, start.params
        for name, values in self.filters.items():
            value = getattr(params, name)
            values[row] = NEUTRAL[name] if value is None else value
        self.seed[row] = np.uint64(start.seed % 2**64).astype(np.int64)
        self.sample[row] = start.sample
        self.ends_at[row] = start.ends_at
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.logprob_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            self.logprob_ids[row] = list(params.logprob_token_ids)


class Sampler:
    """Chooses one token for each line of logits."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str, ops: Ops | None = None) -> None:
        self.device = torch.device(device)
        self.ops = ops or kernels.pick(self.device.type)
        self.rows = SamplerRows(rows)
        self.edits = LogitEdits(rows, vocab_size, self.device)
        self.state = self._make_state()

    def _make_state(self) -> SamplingState:
        return SamplingState(**self.rows.filters, seed=self.rows.seed, sample=self.rows.sample, **self.edits.arrays())

    def start(self, start: RowStart) -> None:
        self.rows.start(start)
        edits = self.edits.start(start)
        if edits:
            self.state = self._make_state()  # arrays of edits may have grown, and then they are others
        self.rows.asks_more[start.row] = edits or start.params.logprobs is not None

    def asking(self, rows: Ints, positions: Ints, masks: LateMasks | None) -> Flags:
        """Which lines, of these rows and positions, ask for more than a draw from the model's own scores."""
        more: Flags = self.rows.asks_more[rows]
        if more.any():  # forbidden ends matter for the first tokens only
            more = has_edits(self.state, rows, positions) | (self.rows.logprobs[rows] >= 0)
            self.rows.asks_more[rows[::-1]] = more[::-1]  # a row's first line decides: the others may be rejected
            more = self.rows.asks_more[rows]
        if masks is not None:
            more[masks.lines] = True
        return more

    def sample(
        self,
        logits: Tensor,
        rows: Ints,
        positions: Ints,
        masks: LateMasks | None = None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor, list[tuple[int, Logprobs]]]:
        """Tokens [n] for float32 logits [n, vocab]; the best score of each line; logprobs where a row asks for them.

        A best score that is not finite means that the line has no meaning, and neither has its token. expected: the
        draft token that each line verifies, as in Ops.choose.
        """
        tokens, best = self.ops.choose(logits, rows, positions, self.state, masks, expected)
        return tokens, best, self._logprobs(logits, rows, tokens)

    def _logprobs(self, logits: Tensor, rows: Ints, tokens: Tensor) -> list[tuple[int, Logprobs]]:
        asked = self.rows.logprobs[rows]
        lines = np.flatnonzero(asked >= 0)
        if not lines.size:
            return []
        where = to_device(lines, self.device)
        found = logprobs_of(logits[where], tokens[where], int(asked.max()))
        out = []
        for line, one in zip(lines.tolist(), found, strict=True):
            count = int(asked[line])
            others, theirs = one.top_tokens[:count], one.top_logprobs[:count]
            ids = self.rows.logprob_ids.get(int(rows[line]))
            if ids is not None:
                others, theirs = tuple(ids), tuple(logits[line].log_softmax(dim=-1)[ids].tolist())
            out.append((line, Logprobs(one.token, one.logprob, one.rank, others, theirs)))
        return out


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> list[Logprobs]:
    """The model's own log probability of each token, with the `top` likeliest beside it."""
    logs = logits.log_softmax(dim=-1)
    own = logs.gather(1, tokens.unsqueeze(1))
    ranks = (logs > own).sum(dim=-1) + 1
    values, ids = logs.topk(min(max(top, 1), logs.shape[1]), dim=-1)
    columns = (tokens.tolist(), own.squeeze(1).tolist(), ranks.tolist(), ids.tolist(), values.tolist())
    return [
        Logprobs(token, logprob, rank, tuple(top_ids[:top]), tuple(top_values[:top]))
        for token, logprob, rank, top_ids, top_values in zip(*columns, strict=True)
    ]
