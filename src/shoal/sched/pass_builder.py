"""A pass in the making, and one in flight: what the scheduler notes on its way from a request to a StepPlan and back.

Knows requests and counts. Decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from shoal.core.events import PassEvents
from shoal.core.plan import FROM_DEVICE, Ints, RowStart, StepPlan
from shoal.core.request import Request


class Start(Enum):
    """What came of trying to start a request."""

    STARTED = 1
    FETCHING = 2  # it has its blocks, and some of them are on their way from the host
    NO_BLOCKS = 3
    NO_BUDGET = 4  # the pass is full


class PassBuilder:
    """A plan in the making: who computes how many positions, as long as things may still change."""

    def __init__(self, budget: int, cap: int = 0, long: bool = False) -> None:
        self.left = budget  # below 0 if a prompt had to be taken whole
        self.cap = cap  # tokens that part short sequences from long ones; 0: all are alike
        self.long = long  # this pass is for the long ones
        self.only: Mapping[Request, int] | None = None  # nobody else may be in it
        self.takes: dict[Request, int] = {}
        self.starting: dict[Request, bool] = {}  # … and whether it has run before
        self.grown: dict[Request, None] = {}  # who got blocks beyond those it started with
        self.lost = False  # somebody had to give way
        self.prompts = 0
        self.decodes = 0

    def add(self, request: Request, count: int, prompt: bool) -> None:
        self.takes[request] = count
        self.left -= count
        self.prompts += prompt
        self.decodes += not prompt

    def raise_to(self, request: Request, count: int) -> None:
        """It is in this pass, and gets more of its prompt."""
        self.left -= count - self.takes[request]
        self.takes[request] = count
        self.prompts += 1

    @property
    def picky(self) -> bool:
        """Not everybody may be in this pass."""
        return self.cap > 0 or self.only is not None

    def excludes(self, request: Request) -> bool:
        """It is to run in other passes."""
        if self.only is not None:
            return request not in self.only
        return self.cap > 0 and (len(request.tokens) > self.cap) != self.long

    def remove(self, request: Request) -> None:
        """It lost its blocks after all."""
        self.left += self.takes.pop(request, 0)
        self.starting.pop(request, None)
        self.grown.pop(request, None)


@dataclass(frozen=True, slots=True)
class Places:
    """Who stands in a pass, in order, and where: kept from pass to pass while nobody comes or goes."""

    requests: list[Request]
    ids: list[str]
    generations: list[int]
    rows: Ints
    lives: Ints  # the generations again


@dataclass(frozen=True, slots=True)
class Flight:
    """What the scheduler remembers of a pass until it comes back: parallel lists, in the plan's order."""

    plan: StepPlan
    requests: list[Request]
    generations: list[int]  # of their rows, then
    ends: list[int]  # how far each will have been computed
    samples: list[bool]
    events: PassEvents
    masked: list[tuple[int, Request]]  # (row, request) of those that choose a token and must follow a grammar


def row_start(request: Request) -> RowStart:
    request.blocks_sent = len(request.holding.blocks)
    return RowStart(
        request.row,
        request.generation,
        tuple(request.tokens),
        request.prompt_len,
        request.params,
        request.seed,
        request.sample,
        request.stop_ids,
        tuple(request.holding.blocks),
        request.wants_prompt_logprobs,
        request.prompt_len + request.ends_after - 1 if request.ends_after else 0,
    )


def grown_blocks(batch: PassBuilder) -> Ints:
    """(row, index, block) of the blocks that the runner does not know yet."""
    grown = []
    for request in batch.grown:
        blocks = request.holding.blocks
        grown += [(request.row, index, blocks[index]) for index in range(request.blocks_sent, len(blocks))]
        request.blocks_sent = len(blocks)
    return np.array(grown, dtype=np.int64).reshape(-1, 3)


def count_on(
    requests: list[Request], starts: list[int], ends: list[int], step: int, events: PassEvents
) -> tuple[list[bool], list[int]]:
    """Which of them choose a token, and the ids of all positions; and count on their being computed."""
    samples: list[bool] = []
    tokens: list[int] = []
    for request, start, end in zip(requests, starts, ends, strict=True):
        known = len(request.tokens)
        sampling = end == known + request.pending
        samples.append(sampling)
        tokens += request.tokens[start : min(end, known)]
        if end > known:
            tokens += [FROM_DEVICE] * (end - max(start, known))
        if start < request.furthest:
            events.recomputed_tokens += min(end, request.furthest) - start
        request.planned = end
        request.pending += sampling
        request.last_step = step
    return samples, tokens


def count_on_decodes(
    requests: list[Request], ends: list[int], step: int, events: PassEvents
) -> tuple[list[bool], list[int]]:
    """As count_on, where everybody computes one position. Hot."""
    samples, tokens = [], []
    for request, end in zip(requests, ends, strict=True):
        ids, pending = request.tokens, request.pending
        known = len(ids)
        if end == known + pending:
            samples.append(True)
            request.pending = pending + 1
        else:
            samples.append(False)
        tokens.append(ids[end - 1] if end <= known else FROM_DEVICE)
        if end <= request.furthest:
            events.recomputed_tokens += 1
        request.planned = end
        request.last_step = step
    return samples, tokens
