"""Logit edits: what changes scores before a token is chosen. Biases, ends forbidden before min_tokens, penalties.

Owns flat arrays, filled when a row starts; `Ops.choose` gathers from them what applies to a batch, and adds the tokens
it chooses to the counts of rows with penalties. Lines of the vocabulary exist for rows with penalties only. Knows
neither temperature nor draws.
"""

from typing import Any

import numpy as np
import torch

from shoal.core.plan import RowStart
from shoal.kernels.draw_table import stretches
from shoal.kernels.transfer import to_device


def has_penalty(start: RowStart) -> bool:
    params = start.params
    repetition = params.repetition_penalty
    return bool(params.presence_penalty or params.frequency_penalty or (repetition is not None and repetition != 1.0))


class TokenLists:
    """For every row a list of token ids with an amount each, all lists in one pair of arrays.

    A row that starts again leaves its old list behind; when the arrays are full, the lists in use move together.
    """

    def __init__(self, rows: int) -> None:
        self.first = np.zeros(rows, dtype=np.int64)
        self.count = np.zeros(rows, dtype=np.int64)
        self.ids = np.zeros(0, dtype=np.int64)
        self.amounts = np.zeros(0, dtype=np.float32)
        self._used = 0

    def set(self, row: int, entries: list[tuple[int, float]]) -> None:
        self.count[row] = 0
        if not entries:
            return
        if self._used + len(entries) > len(self.ids):
            self._pack(len(entries))
        stretch = slice(self._used, self._used + len(entries))
        self.ids[stretch] = [token for token, _ in entries]
        self.amounts[stretch] = [amount for _, amount in entries]
        self.first[row], self.count[row] = self._used, len(entries)
        self._used += len(entries)

    def _pack(self, more: int) -> None:
        rows = np.flatnonzero(self.count)
        _, at = stretches(self.first[rows], self.count[rows])
        ids, amounts = self.ids[at], self.amounts[at]
        size = max(64, 2 * (len(at) + more))
        self.ids, self.amounts = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        self.ids[: len(at)], self.amounts[: len(at)] = ids, amounts
        self.first[rows] = np.cumsum(self.count[rows]) - self.count[rows]
        self._used = len(at)


class LogitEdits:
    """The edits of every row."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.bias = TokenLists(rows)
        self.ends = TokenLists(rows)  # forbidden …
        self.first_free_end = np.zeros(rows, dtype=np.int64)  # … before this position
        self.repetition = np.ones(rows, dtype=np.float32)
        self.frequency = np.zeros(rows, dtype=np.float32)
        self.presence = np.zeros(rows, dtype=np.float32)
        self.penalty_slot = np.full(rows, -1, dtype=np.int64)  # of rows with penalties: their entry in the two tables
        self.seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # in the prompt or the output
        self.counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)  # how often in the output
        self._free: list[int] = []

    def arrays(self) -> dict[str, Any]:
        """The edits' part of a SamplingState; start() replaces some of them for rows that have edits."""
        return {
            "first_free_end": self.first_free_end,
            "bias_first": self.bias.first,
            "bias_count": self.bias.count,
            "ends_first": self.ends.first,
            "ends_count": self.ends.count,
            "penalty_slot": self.penalty_slot,
            "repetition": self.repetition,
            "frequency": self.frequency,
            "presence": self.presence,
            "bias_ids": self.bias.ids,
            "ends_ids": self.ends.ids,
            "bias_amounts": self.bias.amounts,
            "seen": self.seen,
            "counts": self.counts,
        }

    def start(self, start: RowStart) -> bool:
        """Begin a row, perhaps again. True: it edits scores."""
        row, params = start.row, start.params
        vocab = self.seen.shape[1]
        ends = [(token, -np.inf) for token in start.stop_ids if 0 <= token < vocab] if params.min_tokens > 0 else []
        bias = params.logit_bias or {}
        assert all(0 <= token < vocab for token in bias), "a bias of a token outside the vocabulary"
        self.bias.set(row, list(bias.items()))
        self.ends.set(row, ends)
        self.first_free_end[row] = start.prompt_len + params.min_tokens
        self.repetition[row] = params.repetition_penalty or 1.0
        self.frequency[row], self.presence[row] = params.frequency_penalty, params.presence_penalty
        if self.penalty_slot[row] >= 0:
            self._free.append(int(self.penalty_slot[row]))
            self.penalty_slot[row] = -1
        penalised = has_penalty(start)
        if penalised:
            self._count(start)
        return penalised or bool(bias) or bool(ends)

    def _count(self, start: RowStart) -> None:
        """Take a slot for the row, and count its tokens so far."""
        if not self._free:
            self._grow()
        slot = self.penalty_slot[start.row] = self._free.pop()
        tokens = to_device(np.array(start.tokens, dtype=np.int64), self.seen.device)
        self.seen[slot] = False
        self.seen[slot, tokens] = True
        self.counts[slot] = torch.bincount(tokens[start.prompt_len :], minlength=self.counts.shape[1])

    def _grow(self) -> None:
        have, vocab = self.seen.shape
        more = max(4, have)
        self.seen = torch.cat([self.seen, self.seen.new_zeros((more, vocab))])
        self.counts = torch.cat([self.counts, self.counts.new_zeros((more, vocab))])
        self._free += range(have, have + more)
