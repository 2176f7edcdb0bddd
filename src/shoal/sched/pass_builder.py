"""A pass under construction: what the scheduler notes between its requests and a StepPlan.

Knows requests and counts. Decides nothing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.drafts import Draft
from shoal.core.events import PassEvents
from shoal.core.plan import FROM_DEVICE, Ints, RowStart
from shoal.core.request import Request

NONE_GROWN: Ints = np.zeros((0, 3), dtype=np.int64)


class PassBuilder:
    """How many positions of which requests a pass computes, while that may still change."""

    def __init__(self, budget: int, cap: int = 0, long: bool = False) -> None:
        self.left = budget  # positions; below 0 if a prompt had to be taken whole
        self.cap = cap  # tokens that separate short sequences from long ones; 0: there is one lane
        self.long = long  # this pass is for long sequences
        self.only: Mapping[Request, int] | None = None  # no other request may be in it
        self.takes: dict[Request, int] = {}
        self.drafts: dict[Request, Draft] = {}  # their tokens are the last positions of a request in `takes`
        self.starting: dict[Request, bool] = {}  # … and whether it has run before
        self.grown: dict[Request, None] = {}  # requests that got blocks beyond those they started with
        self.victims: list[Request] = []  # preempted, and not yet back in the queue
        self.lost = False  # a request was preempted
        self.steady = False  # it begins with the steady batch
        self.prompts = 0
        self.decodes = 0

    def add(self, request: Request, count: int, prompt: bool) -> None:
        self.takes[request] = count
        self.left -= count
        self.prompts += prompt
        self.decodes += not prompt

    def take_steady(self, requests: Sequence[Request]) -> None:
        """Add one position of each of these decoding requests, before all others."""
        assert not self.takes, "a pass begins with the requests that decode"
        self.takes = dict.fromkeys(requests, 1)
        self.left -= len(requests)
        self.decodes += len(requests)
        self.steady = True

    def raise_to(self, request: Request, count: int) -> None:
        """Give a request of this pass more positions of its prompt."""
        self.left -= count - self.takes[request]
        self.takes[request] = count
        self.prompts += 1

    def add_draft(self, request: Request, draft: Draft) -> None:
        """Let a decoding request of this pass verify draft tokens."""
        self.drafts[request] = draft
        self.takes[request] += len(draft.tokens)
        self.left -= len(draft.tokens)

    @property
    def picky(self) -> bool:
        """Some requests may not be in this pass."""
        return self.cap > 0 or self.only is not None

    def excludes(self, request: Request) -> bool:
        """It is to run in other passes."""
        if self.only is not None:
            return request not in self.only
        return self.cap > 0 and (len(request.tokens) > self.cap) != self.long

    def remove(self, request: Request) -> None:
        """It was preempted."""
        self.left += self.takes.pop(request, 0)
        self.steady = False
        self.starting.pop(request, None)
        self.grown.pop(request, None)


class PassRows(NamedTuple):
    """The requests of a pass in order, and their rows."""

    requests: list[Request]
    ids: list[str]
    generation_list: list[int]
    rows: Ints
    generations: Ints

    @classmethod
    def of(cls, requests: list[Request]) -> "PassRows":
        generations = [request.generation for request in requests]
        return cls(
            requests,
            [request.id for request in requests],
            generations,
            np.array([request.row for request in requests], dtype=np.int64),
            np.array(generations, dtype=np.int64),
        )

    def followed_by(self, more: "PassRows") -> "PassRows":
        return PassRows(
            self.requests + more.requests,
            self.ids + more.ids,
            self.generation_list + more.generation_list,
            np.concatenate((self.rows, more.rows)),
            np.concatenate((self.generations, more.generations)),
        )


class Counted(NamedTuple):
    """What some requests compute in a pass, and is counted on: parallel lists, and the arrays of a plan."""

    rows: PassRows
    counts: list[int]
    starts: list[int]
    ends: list[int]
    draws: list[int]
    arrays: tuple[Ints, Ints, Ints, Ints]  # starts, counts, draws, and the ids of all positions

    def followed_by(self, more: "Counted") -> "Counted":
        one, two, three, four = map(np.concatenate, zip(self.arrays, more.arrays, strict=True))
        return Counted(
            self.rows.followed_by(more.rows),
            self.counts + more.counts,
            self.starts + more.starts,
            self.ends + more.ends,
            self.draws + more.draws,
            (one, two, three, four),
        )


def row_start(request: Request) -> RowStart:
    request.blocks_sent = len(request.holding.blocks)
    return RowStart(
        request.row,
        request.generation,
        tuple(request.ids(0, len(request.tokens))),
        request.prompt_len,
        request.params,
        request.seed,
        request.sample,
        request.stop_ids,
        tuple(request.holding.blocks),
        request.needs_prompt_logprobs,
        request.prompt_len + request.ends_after - 1 if request.ends_after else 0,
    )


def grown_blocks(batch: PassBuilder) -> Ints:
    """(row, index, block) of the blocks that the runner does not know yet."""
    if not batch.grown:
        return NONE_GROWN
    grown: list[int] = []  # flat, which is faster than a list of triples
    for request in batch.grown:
        row, blocks = request.row, request.holding.blocks
        for index in range(request.blocks_sent, len(blocks)):
            grown += (row, index, blocks[index])
        request.blocks_sent = len(blocks)
    return np.array(grown, dtype=np.int64).reshape(-1, 3)


def count_on(batch: PassBuilder, requests: list[Request], step: int, events: PassEvents) -> Counted:
    """What these requests of the pass compute; and count on all of it being computed."""
    rows, counts = PassRows.of(requests), [batch.takes[request] for request in requests]
    starts = [request.planned for request in requests]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    if batch.prompts or batch.drafts:
        draws, tokens = _draws_and_ids(batch, requests, starts, ends, step, events)
    else:
        draws, tokens = _draws_and_ids_of_decodes(requests, ends, step, events)
    first, many, drawing, ids = (np.array(values, dtype=np.int64) for values in (starts, counts, draws, tokens))
    return Counted(rows, counts, starts, ends, draws, (first, many, drawing, ids))


def _draws_and_ids(
    batch: PassBuilder,
    requests: Sequence[Request],
    starts: Sequence[int],
    ends: Sequence[int],
    step: int,
    events: PassEvents,
) -> tuple[list[int], list[int]]:
    """How many tokens each request draws, and the ids of all positions."""
    draws: list[int] = []
    tokens: list[int] = []
    drafted = batch.drafts
    for request, start, end in zip(requests, starts, ends, strict=True):
        ids, pending = request.tokens, request.pending
        known = len(ids)
        drafts = drafted[request].tokens if request in drafted else ()
        last = end - len(drafts)
        drawing = 1 + len(drafts) if last == known + pending else 0
        draws.append(drawing)
        if last - start == 1:
            tokens.append(ids[start] if last <= known else FROM_DEVICE)
        elif last <= known:
            tokens += request.ids(start, last)
        else:
            tokens += request.ids(start, known) + [FROM_DEVICE] * (last - max(start, known))
        if drafts:
            tokens += drafts
        if start < request.furthest:
            events.recomputed_tokens += min(end, request.furthest) - start
        request.planned = end
        request.pending = pending + drawing
        request.last_step = step
    return draws, tokens


def _draws_and_ids_of_decodes(
    requests: Sequence[Request], ends: Sequence[int], step: int, events: PassEvents
) -> tuple[list[int], list[int]]:
    """As _draws_and_ids, where every request computes one position. Hot."""
    draws, tokens = [], []
    for request, end in zip(requests, ends, strict=True):
        ids, pending = request.tokens, request.pending
        known = len(ids)
        if end == known + pending:
            draws.append(1)
            request.pending = pending + 1
        else:
            draws.append(0)
        tokens.append(ids[end - 1] if end <= known else FROM_DEVICE)
        if end <= request.furthest:
            events.recomputed_tokens += 1
        request.planned = end
        request.last_step = step
    return draws, tokens
