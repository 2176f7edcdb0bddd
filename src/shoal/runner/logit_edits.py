"""What changes scores before a token is chosen: biases, ends that may not come yet, penalties for what was said.

Owns flat arrays, filled when a row starts and when it says a token, so that a pass looks at no request by itself: what
applies to a batch is gathered from them at once, by torch here or by the C kernels, which read the same arrays. Lines
of the vocabulary exist for rows with penalties only. Knows no temperature and no draws.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Flags, Ints, RowStart
from shoal.runner.inputs import put


def has_penalty(start: RowStart) -> bool:
    params = start.params
    repetition = params.repetition_penalty
    return bool(params.presence_penalty or params.frequency_penalty or (repetition is not None and repetition != 1.0))


class TokenLists:
    """For every row a list of (token id, what is added to its score), all lists in one array.

    A row that starts again leaves its old list behind; when the array is full, the lists in use move together.
    """

    def __init__(self, rows: int) -> None:
        self.first = np.zeros(rows, dtype=np.int64)
        self.count = np.zeros(rows, dtype=np.int64)
        self.ids = np.zeros(0, dtype=np.int64)
        self.amounts = np.zeros(0, dtype=np.float32)
        self._used = 0

    def set(self, row: int, edits: list[tuple[int, float]]) -> None:
        self.count[row] = 0
        if not edits:
            return
        if self._used + len(edits) > len(self.ids):
            self._pack(len(edits))
        place = slice(self._used, self._used + len(edits))
        self.ids[place] = [token for token, _ in edits]
        self.amounts[place] = [amount for _, amount in edits]
        self.first[row], self.count[row] = self._used, len(edits)
        self._used += len(edits)

    def _pack(self, more: int) -> None:
        rows = np.flatnonzero(self.count)
        _, at = self.find(rows, self.count[rows])
        ids, amounts = self.ids[at], self.amounts[at]
        size = max(64, 2 * (len(at) + more))
        self.ids, self.amounts = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        self.ids[: len(at)], self.amounts[: len(at)] = ids, amounts
        self.first[rows] = np.cumsum(self.count[rows]) - self.count[rows]
        self._used = len(at)

    def find(self, rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """For the first so many edits of each of the rows: its place among them, and where in the arrays it stands."""
        places = np.repeat(np.arange(len(rows)), counts)
        before = np.cumsum(counts) - counts
        return places, np.arange(len(places)) + np.repeat(self.first[rows] - before, counts)


class LogitEdits:
    """Everything that changes scores, of every row."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.bias = TokenLists(rows)
        self.ends = TokenLists(rows)  # forbidden …
        self.first_free_end = np.zeros(rows, dtype=np.int64)  # … up to this position
        self.always = np.zeros(rows, dtype=np.bool_)  # has a bias or a penalty
        self.repetition = np.ones(rows, dtype=np.float32)
        self.frequency = np.zeros(rows, dtype=np.float32)
        self.presence = np.zeros(rows, dtype=np.float32)
        self.line = np.full(rows, -1, dtype=np.int64)  # of rows with penalties: their line in the two tables
        self.seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # in the prompt or the output
        self.said = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)  # how often in the output
        self._free: list[int] = []

    def start(self, start: RowStart) -> bool:
        """Another life of a row. Whether it changes any score."""
        row, params = start.row, start.params
        vocab = self.seen.shape[1]
        ends = [(token, -np.inf) for token in start.stop_ids if 0 <= token < vocab] if params.min_tokens > 0 else []
        bias = params.logit_bias or {}
        assert all(0 <= token < vocab for token in bias), "a bias of a token that no score stands for"
        self.bias.set(row, list(bias.items()))
        self.ends.set(row, ends)
        self.first_free_end[row] = start.prompt_len + params.min_tokens
        self.repetition[row] = params.repetition_penalty or 1.0
        self.frequency[row], self.presence[row] = params.frequency_penalty, params.presence_penalty
        if self.line[row] >= 0:
            self._free.append(int(self.line[row]))
            self.line[row] = -1
        if has_penalty(start):
            self._count(start)
        self.always[row] = bool(bias) or has_penalty(start)
        return bool(self.always[row]) or bool(ends)

    def _count(self, start: RowStart) -> None:
        """A line for the row: what it has seen and said so far."""
        if not self._free:
            self._grow()
        line = self.line[start.row] = self._free.pop()
        tokens = put(np.array(start.tokens, dtype=np.int64), self.seen.device)
        self.seen[line] = False
        self.seen[line, tokens] = True
        self.said[line] = torch.bincount(tokens[start.prompt_len :], minlength=self.said.shape[1])

    def _grow(self) -> None:
        have, vocab = self.seen.shape
        more = max(4, have)
        self.seen = torch.cat([self.seen, self.seen.new_zeros((more, vocab))])
        self.said = torch.cat([self.said, self.said.new_zeros((more, vocab))])
        self._free += range(have, have + more)

    def still(self, rows: Ints, positions: Ints) -> Flags:
        """Which of the rows change scores at these positions, grammars apart."""
        found: Flags = self.always[rows] | ((positions < self.first_free_end[rows]) & (self.ends.count[rows] > 0))
        return found

    def apply(self, logits: Tensor, rows: Ints, positions: Ints, masked: Flags | None) -> Tensor:
        """A copy of the logits, changed. Ends are not forbidden in masked lines, where a grammar decides."""
        scores = logits.clone()
        lines = self.line[rows]
        if (lines >= 0).any():
            self._punish(scores, np.flatnonzero(lines >= 0), rows)
        early = positions < self.first_free_end[rows]
        if masked is not None:
            early &= ~masked
        for edits, counts in ((self.bias, self.bias.count[rows]), (self.ends, self.ends.count[rows] * early)):
            if counts.any():
                places, at = edits.find(rows, counts)
                where = (self._put(places), self._put(edits.ids[at]))
                scores.index_put_(where, self._put(edits.amounts[at]), accumulate=True)
        return scores

    def _punish(self, scores: Tensor, places: Ints, rows: Ints) -> None:
        """Lower the scores of what was said before."""
        where, lines = self._put(places), self._put(self.line[rows[places]])
        strengths = np.stack([one[rows[places]] for one in (self.repetition, self.frequency, self.presence)])
        repetition, frequency, presence = self._put(strengths).unsqueeze(2)
        values, said = scores[where], self.said[lines]
        penalised = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(self.seen[lines], penalised, values)
        scores[where] = values - frequency * said - presence * (said > 0)

    def note(self, rows: Ints, tokens: Tensor) -> None:
        """These rows have just said these tokens."""
        lines = self.line[rows]
        places = np.flatnonzero(lines >= 0)
        if places.size:
            at = (self._put(lines[places]), tokens[self._put(places)])
            self.seen[at] = True
            self.said[at] += 1

    def _put(self, array: "np.ndarray[tuple[int, ...], np.dtype[Any]]") -> Tensor:
        return put(array, self.seen.device)
