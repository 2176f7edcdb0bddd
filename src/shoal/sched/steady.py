"""Steady: the running requests that decode, carried on from pass to pass.

Most rows of a pass compute the next position of the same requests as the pass before. Nothing need be decided for them,
and the lists of the last pass are carried on, which is faster than asking every request. A request that starts to
decode joins them, one that leaves or is about to end is taken out; prompts follow behind them in the same pass, in the
general way. Knows requests and counts; decides nothing: where a steady batch does not apply (grammars, lanes, drafts,
too few blocks), the planner and the committer take the general way, with the same outcome.
"""

from bisect import bisect_left
from operator import ge, sub
from typing import NamedTuple

import numpy as np

from shoal.core.events import PassEvents
from shoal.core.plan import FROM_DEVICE, Ints
from shoal.core.request import Request
from shoal.kv.manager import KVManager
from shoal.sched.pass_builder import Counted, PassBuilder, PassRows

LONG = 2**40  # passes
MOST_STOP_IDS = 64  # that are kept of requests that may have left


class DecodeLists(NamedTuple):
    """Parallel lists, in the order in which requests started."""

    requests: list[Request]
    ids: list[str]
    generations: list[int]
    rows: list[int]
    ends: list[int]
    limits: list[int]
    last: list[int]
    prompt_lens: list[int]

    def copy(self) -> "DecodeLists":
        requests, ids, *numbers = self
        return DecodeLists(requests[:], ids[:], *(one[:] for one in numbers))

    def insert(self, request: Request) -> None:
        place = bisect_left(self.generations, request.generation)
        limit = min(request.end, request.holding.capacity)
        self.requests.insert(place, request)
        self.ids.insert(place, request.id)
        self.generations.insert(place, request.generation)
        self.rows.insert(place, request.row)
        self.ends.insert(place, request.planned)
        self.limits.insert(place, limit)
        self.last.insert(place, request.end)
        self.prompt_lens.insert(place, request.prompt_len)

    def remove(self, generation: int) -> None:
        place = bisect_left(self.generations, generation)
        for one in self:
            del one[place]


def array_of(numbers: list[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


class Steady:
    """Requests that decode, in the order in which they started, and how far each of them is planned.

    Passes in flight keep the object that they were planned with, so only what the next pass computes changes in it.
    """

    def __init__(self, lists: DecodeLists, stop_ids: frozenset[int] = frozenset(), left: int = 0) -> None:
        requests, ids, generations, rows, self.ends, limits, self._last, self._prompt_lens = self._lists = lists
        count = len(requests)
        self.rows = PassRows(requests, ids, generations, array_of(rows), array_of(generations))
        self._end_array = array_of(self.ends)  # how far each will be computed by the newest pass: ends, as an array
        self._limits = array_of(limits)  # how far each may be computed in the blocks that it has
        self._stop_ids = stop_ids  # of all of them, and perhaps some more
        self._ones, self._one_array = [1] * count, np.ones(count, dtype=np.int64)
        self._left = left  # for so many passes at least, none of them is about to end
        self._gone: list[int] = []  # generations of those that have lost their rows since
        self._asks = False  # the last token of one of them is known, although passes are in flight

    def __len__(self) -> int:
        return len(self.ends)

    def leaves(self, generation: int) -> None:
        """A running request is about to lose its row."""
        if self._has(generation):
            self._gone.append(generation)

    def _has(self, generation: int) -> bool:
        generations = self.rows.generation_list
        place = bisect_left(generations, generation)
        return place < len(generations) and generations[place] == generation

    def renewed(self, running: dict[Request, None]) -> "Steady | None":
        """The requests that decode in the next pass; None if there are none, or one that must be asked."""
        if not self._gone and len(running) == len(self.ends) and self._left > 0:
            return self
        joining = self._joining(running, len(running) - len(self.ends) + len(self._gone))
        if joining is None:
            return None
        lists = self._lists._replace(ends=self.ends, limits=self._limits.tolist()).copy()
        gone, left = self._gone, self._left
        if left <= 0:
            ahead = [last - end for last, end in zip(lists.last, lists.ends, strict=True)]
            gone = gone + [life for life, more in zip(lists.generations, ahead, strict=True) if more <= 0]
            left = min((more for more in ahead if more > 0), default=LONG)
        for generation in set(gone):
            lists.remove(generation)
        for request in joining:
            lists.insert(request)
        if not lists.requests:
            return None
        stop_ids = self._stop_ids.union(*(request.stop_ids for request in joining))
        if len(stop_ids) > MOST_STOP_IDS:
            stop_ids = frozenset().union(*(request.stop_ids for request in lists.requests))
        left = min([left, *(request.end - request.planned for request in joining)])
        new = Steady(lists, stop_ids, left)
        new._asks = self._asks or not all(request.pending for request in joining)
        return new

    def _joining(self, running: dict[Request, None], others: int) -> list[Request] | None:
        """Those of the `others`, running requests that are not in it, that decode; None if one must be asked."""
        joining: list[Request] = []
        for request in reversed(running):
            if not others:
                break
            if not self._has(request.generation):
                others -= 1
                planned, visible, end = request.planned, len(request.tokens) + request.pending, request.end
                # request.need() == 1, without the call
                if (visible if visible < end else end) - planned == 1:
                    if not self.suits(request):
                        return None
                    joining.append(request)
        return joining

    @staticmethod
    def suits(request: Request) -> bool:
        """Whether a request that needs one position can be carried on: it draws a token, and computes nothing again."""
        return request.grammar is None and request.furthest <= request.planned >= request.prompt_len

    def ready(self, batch: PassBuilder, kv: KVManager) -> bool:
        """Whether all of them can compute one more position; takes the blocks that they need for it."""
        if batch.left < len(self.ends):
            return False
        for index in (self._end_array >= self._limits).nonzero()[0].tolist():
            request = self.rows.requests[index]
            if not kv.grow(request.holding, self.ends[index] + 1):
                return False
            batch.grown[request] = None
            self._limits[index] = min(request.end, request.holding.capacity)
        return True

    def advance(self, step: int, known: bool) -> Counted:
        """Count on one more position of each. `known`: no pass is in flight that draws their last tokens."""
        requests, starts, start_array = self.rows.requests, self.ends, self._end_array
        if known or self._asks:
            tokens = array_of([FROM_DEVICE if request.pending else request.tokens[-1] for request in requests])
        else:
            tokens = np.full(len(requests), FROM_DEVICE, dtype=np.int64)
        self.ends = ends = [end + 1 for end in starts]
        self._end_array = start_array + 1
        self._asks = False
        self._left -= 1
        for request, end in zip(requests, ends, strict=True):
            request.planned = end
            request.pending += 1
            request.last_step = step
        ones = self._one_array
        return Counted(self.rows, self._ones, starts, ends, self._ones, (start_array, ones, ones, tokens))

    def odd(self, ends: list[int], tokens: list[int], left: bool) -> list[int]:
        """Which of them may end with this token or, if requests have `left` since the pass was planned, have left."""
        stop_ids, rows = self._stop_ids, self.rows
        found: list[int] = []
        if not stop_ids.isdisjoint(tokens):
            found += [index for index, token in enumerate(tokens[: len(self)]) if token in stop_ids]
        if any(map(ge, ends, self._last)):
            found += [index for index, (end, last) in enumerate(zip(ends, self._last, strict=False)) if end >= last]
        if left:
            lives = zip(rows.requests, rows.generation_list, strict=True)
            found += [index for index, (request, life) in enumerate(lives) if request.generation != life]
        return sorted(set(found)) if found else found

    def append(
        self, first: int, last: int, ends: list[int], tokens: list[int], out: PassEvents, size: int
    ) -> list[tuple[Request, int]]:
        """Commit one token of each of these rows, of which none ends; returns those that have filled a block."""
        requests, full = self.rows.requests[first:last], []
        ends, tokens = ends[first:last], tokens[first:last]
        for request, token, end in zip(requests, tokens, ends, strict=True):
            request.tokens.append(token)
            request.computed = end
            request.pending -= 1
            if not end % size:
                full.append((request, end))
        out.owners += self.rows.ids[first:last]
        out.tokens += tokens
        out.indexes += map(sub, ends, self._prompt_lens[first:last])
        return full


NOTHING = Steady(DecodeLists([], [], [], [], [], [], [], []), left=LONG)
