"""Steady: a batch in which every running request decodes, pass after pass.

Most passes compute one position of the same requests as the pass before. Then nothing need be decided, and the lists of
the last pass are carried on, which is several times faster than asking every request. A batch is steady from its second
pass until a request starts, leaves or computes anything but one position and one token. Knows requests and counts;
decides nothing: where it does not apply, the planner and the committer take the general way, with the same outcome.
"""

from collections.abc import Sequence
from operator import ge, lt, sub

import numpy as np

from shoal.core.events import PassEvents
from shoal.core.plan import FROM_DEVICE
from shoal.core.request import Request
from shoal.kv.manager import KVManager
from shoal.sched.pass_builder import PassBuilder, PassRows


class Steady:
    """The requests of the last pass, in its order, and how far each of them is planned."""

    def __init__(self, rows: PassRows, ends: list[int]) -> None:
        requests = rows.requests
        self.rows = rows
        self.ends = ends  # how far each will be computed by the newest pass
        self.ones = [1] * len(requests)
        self.one_array = np.ones(len(requests), dtype=np.int64)
        self.stop_ids = frozenset().union(*(request.stop_ids for request in requests))
        self._last = [request.end for request in requests]
        self._limits = [min(request.end, request.holding.capacity) for request in requests]
        self._prompt_lens = [request.prompt_len for request in requests]

    @staticmethod
    def suits(rows: PassRows, ends: list[int], draws: list[int]) -> bool:
        """Whether the requests of a pass of decodes can be carried on."""
        return all(draws) and not any(
            request.grammar is not None or request.furthest > end or end <= request.prompt_len
            for request, end in zip(rows.requests, ends, strict=True)
        )

    def ready(self, batch: PassBuilder, kv: KVManager) -> bool:
        """Whether all of them can compute one more position; takes the blocks that they need for it."""
        if batch.left < len(self.ends):
            return False
        if all(map(lt, self.ends, self._limits)):
            return True
        for index, (end, limit) in enumerate(zip(self.ends, self._limits, strict=True)):
            if end < limit:
                continue
            request = self.rows.requests[index]
            if end >= request.end or not kv.grow(request.holding, end + 1):
                return False
            batch.grown[request] = None
            self._limits[index] = min(request.end, request.holding.capacity)
        return True

    def advance(self, step: int, known: bool) -> tuple[list[int], list[int], list[int]]:
        """Count on one more position of each; returns starts, ends and token ids, which the host knows or not."""
        starts, requests = self.ends, self.rows.requests
        self.ends = ends = [start + 1 for start in starts]
        tokens = [request.tokens[-1] for request in requests] if known else [FROM_DEVICE] * len(requests)
        for request, end in zip(requests, ends, strict=True):
            request.planned = end
            request.pending += 1
            request.last_step = step
        return starts, ends, tokens

    def append(self, ends: list[int], tokens: list[int], out: PassEvents) -> bool:
        """Commit one token of each, if none of them is a request's last; False: nothing has moved."""
        if any(map(ge, ends, self._last)) or not self.stop_ids.isdisjoint(tokens):
            return False
        for request, token, end in zip(self.rows.requests, tokens, ends, strict=True):
            request.tokens.append(token)
            request.computed = end
            request.pending -= 1
        out.owners += self.rows.ids
        out.tokens += tokens
        out.indexes += map(sub, ends, self._prompt_lens)
        return True

    def full_blocks(self, ends: Sequence[int], size: int) -> list[tuple[Request, int]]:
        """Requests that have just filled a block, and their ends."""
        return [(self.rows.requests[index], end) for index, end in enumerate(ends) if not end % size]
