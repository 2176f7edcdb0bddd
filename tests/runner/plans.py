"""Drives an executor by hand-made plans, without a scheduler: prompts in chunks, decodes, and rows that verify drafts.

Every sequence keeps one row and all of its blocks. A row with drafts in flight is planned again once they are
committed; a row without may be planned meanwhile, with its last token still on the device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from shoal.core.params import SamplingParams
from shoal.core.plan import FROM_DEVICE, RowStart, StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.core.request import Logprobs

# (number of the sequence, its tokens so far) → what may follow; and → the tokens that a grammar allows next
Guess = Callable[[int, list[int]], Sequence[int]]
Allow = Callable[[int, list[int]], Sequence[int]]


@dataclass
class Sequenced:
    """A sequence in its row."""

    row: int
    tokens: list[int]
    prompt: int
    params: SamplingParams
    planned: int = 0  # positions in plans so far
    in_flight: int = 0
    verifies: bool = False  # drafts are in flight
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclass
class Planned:
    """A pass in flight: (sequence, drafts or None without a draw) of its rows."""

    plan: StepPlan
    rows: list[tuple[Sequenced, list[int] | None]]


class Drive:
    """Runs sequences until each has `most` outputs, with up to `depth` passes in flight."""

    def __init__(
        self, executor: Executor, block_size: int, vocab: int, most: int, depth: int = 1, chunk: int = 37
    ) -> None:
        self.executor, self.block_size, self.vocab = executor, block_size, vocab
        self.most, self.depth, self.chunk = most, depth, chunk
        self.passes = 0
        self.accepted: list[int] = []  # drafts, of every row that verified some
        self._steps = count()
        self._blocks = 0  # in use

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        guess: Guess | None = None,
        allow: Allow | None = None,
    ) -> list[Sequenced]:
        made = [
            Sequenced(number, list(prompt), len(prompt), one)
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        self._blocks = 0
        starting, flights = tuple(map(self._start, made)), deque[Planned]()
        while any(len(one.outputs) < self.most for one in made) or flights:
            while len(flights) < self.depth:
                planned = self._plan(made, starting, guess, allow is not None)
                if planned is None:
                    break
                starting = ()
                flights.append(planned)
                self.executor.forward(planned.plan)
                self.executor.sample(None if allow is None else self._masks(planned, allow))
            self._commit(flights.popleft(), self.executor.result())
            self.passes += 1
        for one in made:
            del one.tokens[one.prompt + self.most :], one.logprobs[self.most :]
        return made

    def _start(self, one: Sequenced) -> RowStart:
        each = -(-(one.prompt + self.most + 40) // self.block_size)
        blocks = tuple((self._blocks + np.random.default_rng(one.row).permutation(each)).tolist())  # in any order
        self._blocks += each
        seed = one.params.seed or one.row
        return RowStart(one.row, 1, tuple(one.tokens), one.prompt, one.params, seed, 0, frozenset({5}), blocks, False)

    def _plan(self, made: list[Sequenced], starting: Any, guess: Guess | None, masked: bool) -> Planned | None:
        rows, columns, ids, step = [], [], [], next(self._steps)
        for one in made:
            known = len(one.tokens)
            if known + one.in_flight - one.prompt >= self.most or one.verifies or (masked and one.in_flight):
                continue
            if guess is not None and one.in_flight and (step + one.row) % 3:
                continue  # it will draft when its token is committed; now and then it goes on without
            left = known + one.in_flight - one.planned
            new, drafts = min(left, self.chunk), []
            if guess is not None and left == 1 and not one.in_flight:
                drafts = [*guess(one.row, one.tokens)]
            draws = 0 if new < left else 1 + len(drafts)
            ids += [*one.tokens[one.planned : one.planned + new], *drafts] if one.planned < known else [FROM_DEVICE]
            columns.append((one.row, 1, one.planned, new + len(drafts), draws))
            one.planned += new  # without drafts: what is accepted is added when it is known
            one.in_flight += draws > 0
            one.verifies = bool(drafts)
            rows.append((one, drafts if draws else None))
        if not rows:
            return None
        arrays = np.array(columns, dtype=np.int64).T
        grown, tokens = np.empty((0, 3), dtype=np.int64), np.array(ids, dtype=np.int64)
        return Planned(StepPlan(step, starting, grown, *np.ascontiguousarray(arrays), tokens), rows)

    def _masks(self, planned: Planned, allow: Allow) -> LateMasks:
        allowed: list[Sequence[int]] = []
        for one, drafts in planned.rows:
            if drafts is not None:
                allowed += [allow(one.row, one.tokens + drafts[:length]) for length in range(len(drafts) + 1)]
        bits = np.zeros((len(allowed), -(-self.vocab // 32) * 32), dtype=np.uint8)
        for line, tokens in zip(bits, allowed, strict=True):
            line[list(tokens)] = 1
        return LateMasks(np.arange(len(bits)), np.packbits(bits, axis=1, bitorder="little").view(np.uint32))

    def _commit(self, planned: Planned, result: StepResult) -> None:
        assert not result.failures
        drawing = [(one, drafts) for one, drafts in planned.rows if drafts is not None]
        assert result.rows.tolist() == [one.row for one, _ in drawing]
        assert result.accepted.sum() == len(result.tokens)
        begins, logprobs = np.cumsum(result.accepted) - result.accepted, dict(result.logprobs)
        for (one, drafts), begin, taken in zip(drawing, begins.tolist(), result.accepted.tolist(), strict=True):
            assert 1 <= taken <= len(drafts) + 1
            one.tokens += result.tokens[begin : begin + taken].tolist()
            one.logprobs += [logprobs[number] for number in range(begin, begin + taken) if number in logprobs]
            one.planned += taken - 1
            one.in_flight, one.verifies = one.in_flight - 1, False
            if drafts:
                self.accepted.append(taken - 1)
