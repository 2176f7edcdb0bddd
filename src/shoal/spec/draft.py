"""draft: what a smaller model of the same vocabulary would generate.

The draft model has an executor and KV tensors of its own, under the block ids that requests hold. Its passes cover all
rows that are asked for: one ragged pass brings its KV up to the last token and draws the first draft token of each,
then every further pass draws one more:

    request    t0 t1 t2 t3 t4 t5 │                 committed tokens; the draft model has computed the first four
    pass 1                 t4 t5 ► d1              what is missing, within a bound
    pass 2                         d1 ► d2
    pass 3                              d2 ► d3    d3 is not computed: nothing is drawn after it

A draft is drawn with the request's own parameters, and with the noise that the same draw has in the model: so the two
agree more often than two independent draws would. Penalties are left out, and a grammar is applied by the scheduler.

On a device with memory of its own (`on_device`) the passes are queued one after the other, and none of them waits for
the host. Draft tokens stay there; the pass that verifies them reads them there, and they are known here when these
passes have come back (`settle`), so a draft may contain an end token. If some request of a call has a grammar or
penalties, which need its draft tokens on the host before they are verified, the tokens of that call come to the host
one by one, with their probability.

Which positions of the draft model's KV are valid is known here and nowhere else. Blocks come to a request from the
prefix cache or from host memory, computed by the model and not by the draft model, or hold the KV of other tokens:

    of a request   while it holds the same blocks: how many positions were computed for its tokens. Draft tokens count
                   as far as they turned out right; the rest is computed again when its tokens are known
    of a block     the name of its tokens and all before them, once all its positions are computed; none as soon as
                   anything is written to it. A request that gets a block of the right name need not compute it

Draft tokens for which the request holds no block go to spare blocks of its row, which nothing is read from later.
Owns this and the order of the draft model's passes. Knows no torch and no clock: passes say how long they took.
"""

import hashlib
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shoal.core.drafts import Draft
from shoal.core.plan import DRAFTED, FROM_DEVICE, RowStart, StepPlan, StepResult
from shoal.core.ports import Executor
from shoal.core.request import Request

log = logging.getLogger(__name__)
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # and what none is
NEUTRAL: dict[str, Any] = {**PENALTIES, "prompt_logprobs": None}
SUREST = 0.999
UNKNOWN = math.log(0.6)  # the logprob of a draft token, where the draft model was not asked for it


@dataclass(frozen=True)
class DraftKV:
    """The blocks of the draft model's KV, and what its passes may compute."""

    blocks: int  # those that requests hold; spare blocks follow them
    block_size: int
    spare: int  # spare blocks of each row
    longest: int  # positions that the draft model can have in one sequence
    pass_tokens: int  # positions of one of its passes


def spare_blocks(draft_tokens: int, block_size: int) -> int:
    """Blocks that hold all draft tokens of a row but the last, which is not computed."""
    return -(-(draft_tokens - 1) // block_size)


class Life:
    """What is known of one request, while it holds the same blocks."""

    __slots__ = ("drafted", "holding", "marked", "names", "sent", "valid")

    def __init__(self) -> None:
        self.holding: Any = None
        self.sent = 0  # how many of its blocks the executor's row has; 0: the row is not started
        self.valid = 0  # its first positions, whose KV is that of its tokens …
        self.drafted: Sequence[int] = ()  # … and the tokens whose KV follows: valid as far as they turn out right
        self.marked = 0  # its first blocks that have their name in DraftDrafter._content
        self.names: list[bytes] = []  # of its full blocks, as far as they were needed; these outlive the blocks

    def begin(self, holding: Any) -> None:
        """It holds other blocks now."""
        self.holding, self.sent, self.valid, self.drafted, self.marked = holding, 0, 0, (), 0


class Asked:
    """One request in a call of `propose`."""

    __slots__ = ("confidence", "count", "drawn", "kept", "life", "most", "request", "start")

    def __init__(self, request: Request, life: Life, start: int, count: int, most: int) -> None:
        self.request, self.life = request, life
        self.start, self.count = start, count  # positions of the next pass
        self.most = most  # tokens to draw; 0: there is more to compute first
        self.drawn: list[int] = []  # DRAFTED and less: on the device
        self.confidence: list[float] = []
        self.kept: list[int] = []  # the first of `drawn`, whose KV is kept

    @property
    def tokens(self) -> Sequence[int]:
        """Those of the next pass's positions."""
        if not self.drawn:
            return self.request.tokens[self.start : self.start + self.count]
        return [max(self.drawn[-1], FROM_DEVICE)]

    def draw(self, token: int, logprob: float = UNKNOWN) -> bool:
        """Note a token; whether another one is to be drawn."""
        self.drawn.append(token)
        self.confidence.append(min(SUREST, math.exp(logprob)))
        if len(self.drawn) == self.most:
            return False
        self.start, self.count = self.start + self.count, 1
        return True


class Queued(NamedTuple):
    """A pass under way whose tokens stay on the device."""

    positions: int
    read: int  # KV positions
    drawing: Sequence[Asked]
    number: int  # of the draft token that it draws for each


class DraftDrafter:
    """Proposes what the executor's model generates."""

    ahead = False
    by_chance = False
    names: Sequence[str] = ("draft",)

    def __init__(self, executor: Executor, kv: DraftKV, on_device: bool = False) -> None:
        """on_device: drafts stay there, if they can."""
        self.kv = kv
        self._on_device = on_device
        self._queued: list[Queued] = []
        self.passes: Sequence[tuple[int, int, float]] = ()
        self._executor = executor
        self._lives: dict[Request, Life] = {}
        self._content: list[bytes | None] = [None] * kv.blocks  # the name of what a block holds in full
        self._steps = 0
        self._failed = False

    # ---- the port -------------------------------------------------------------------------------------------------

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        self.settle()
        self.passes = ()
        asked = self._asked(wanted)
        if not asked:
            return {}
        try:
            self._compute(asked)
        except Exception:
            self._fail()
            return {}
        return {
            one.request: Draft(list(one.drawn), one.confidence, (("draft", len(one.drawn)),))
            for one in asked
            if one.drawn
        }

    def settle(self) -> None:
        queued, self._queued, self.passes = self._queued, [], ()
        if not queued:
            return
        try:
            self.passes = [self._come_back(one) for one in queued]
        except Exception:
            self._fail()
            return
        for one in queued[0].drawing:
            one.kept[:] = one.drawn[: len(one.kept)]

    def _fail(self) -> None:
        """Draft no more; the requests do not depend on it."""
        log.exception("the draft model failed; from now on there are no drafts of it")
        self._failed = True
        self._lives.clear()
        self._queued.clear()

    def behind(self, request: Request) -> float:
        if self._failed or len(request.tokens) >= self.kv.longest or request.holding is None:
            return math.inf
        return len(request.tokens) - self._valid(request, self._life(request))

    def cost_s(self, rows: int, tokens: int) -> float:
        return 0.0  # nothing on the host to speak of; what its passes take is in `passes`

    def ended(self, request: Request, by_itself: bool) -> None:
        self._lives.pop(request, None)

    # ---- what is to be computed -----------------------------------------------------------------------------------

    def _asked(self, wanted: Mapping[Request, int]) -> list[Asked]:
        """The rows of the first pass: those that lack least first, as many positions as a pass may have."""
        behind = sorted((self.behind(request), place) for place, request in enumerate(wanted))
        requests, left = list(wanted), self.kv.pass_tokens
        found: list[Asked] = []
        computing: set[int] = set()  # blocks that rows of this pass begin with
        for missing, place in behind:
            request, life = requests[place], self._lives.get(requests[place])
            if life is None or missing == math.inf or left < 1:
                break
            start, count = len(request.tokens) - int(missing), min(int(missing), left)
            first = life.holding.blocks[start // self.kv.block_size]
            if first in computing:
                continue  # another row with the same prefix computes it now
            computing.add(first)
            left -= count
            most = 0
            if count == missing:  # the last token that is drawn is not computed
                most = min(wanted[request], self.kv.longest - len(request.tokens) + 1)
            found.append(Asked(request, life, start, count, most))
        return found

    def _life(self, request: Request) -> Life:
        life = self._lives.get(request)
        if life is None:
            life = self._lives[request] = Life()
        if life.holding is not request.holding:
            life.begin(request.holding)
        return life

    def _valid(self, request: Request, life: Life) -> int:
        """How many of its first positions need not be computed; its last one always is, to draw what comes after."""
        tokens, size, blocks = request.tokens, self.kv.block_size, life.holding.blocks
        valid, last = life.valid, len(tokens) - 1
        for token, drafted in zip(tokens[valid : valid + len(life.drafted)], life.drafted, strict=False):
            if token != drafted:
                break
            valid += 1
        while valid % size == 0 and valid + size <= last:
            if self._content[blocks[valid // size]] != self._name(request, life, valid // size):
                break
            valid += size
        return min(valid, last)

    def _name(self, request: Request, life: Life, number: int) -> bytes:
        """Of one of its full blocks: a hash of the tokens in it and before it, and of its tenant's salt."""
        size, names = self.kv.block_size, life.names
        for one in range(len(names), number + 1):
            before = names[-1] if names else hashlib.sha256(request.salt.encode()).digest()
            names.append(hashlib.sha256(before + array("q", request.tokens[one * size : (one + 1) * size])).digest())
        return names[number]

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _compute(self, asked: Sequence[Asked]) -> None:
        """All passes of one call."""
        starting = [self._row_start(one) for one in asked if not one.life.sent]
        grown = [entry for one in asked for entry in self._grown(one)]
        for one in asked:
            self._overwrite(one)
        stay = self._on_device and all(self._can_stay(one.request) for one in asked if one.most)
        passes: list[tuple[int, int, float]] = []
        rows, number = asked, 0
        while rows:
            drawing = [one for one in rows if one.most]
            plan = self._plan(rows, starting, grown, number if stay and drawing else -1)
            self._executor.forward(plan)
            self._executor.sample(None)
            read = int(plan.starts.sum()) + len(plan.tokens)
            if stay:
                self._queued.append(Queued(len(plan.tokens), read, drawing, number))
                rows = [one for one in drawing if one.draw(DRAFTED - number)]
            else:
                result = self._executor.result()
                passes.append((len(plan.tokens), read, result.busy_s))
                rows = self._take(drawing, result)
            number, starting, grown = number + 1, [], []
        for one in asked:
            self._note(one)
        self.passes = passes

    def _can_stay(self, request: Request) -> bool:
        """Whether its draft tokens are not needed on the host before they are verified."""
        if not self._on_device or request.grammar is not None:
            return False
        return all(getattr(request.params, name) in (None, none) for name, none in PENALTIES.items())

    def _come_back(self, one: Queued) -> tuple[int, int, float]:
        """Wait for the oldest pass, which is this one, and note what was drawn."""
        result = self._executor.result()
        for asked, token in zip(one.drawing, result.tokens.tolist(), strict=True):
            asked.drawn[one.number] = token
        return one.positions, one.read, result.busy_s

    def _row_start(self, one: Asked) -> RowStart:
        request = one.request
        logprobs = None if self._can_stay(request) else 0  # they say how sure the draft model is
        params = replace(request.params, logprobs=logprobs, **NEUTRAL)
        blocks = tuple(one.life.holding.blocks)
        one.life.sent = len(blocks)
        return RowStart(
            request.row, request.generation, (), request.prompt_len, params, request.seed, request.sample,
            request.stop_ids, blocks, needs_prompt_logprobs=False,
        )  # fmt: skip

    def _grown(self, one: Asked) -> list[tuple[int, int, int]]:
        """(row, index, block) of blocks that the executor's row lacks: those it got since, and spare ones behind them
        for draft tokens."""
        kv, row, blocks = self.kv, one.request.row, one.life.holding.blocks
        found = [(row, index, blocks[index]) for index in range(one.life.sent, len(blocks))]
        one.life.sent = len(blocks)
        needed = -(-(one.start + one.count + max(one.most - 1, 0)) // kv.block_size)
        spare = range(min(needed - len(blocks), kv.spare))
        found += [(row, len(blocks) + number, kv.blocks + row * kv.spare + number) for number in spare]
        one.most = min(one.most, (len(blocks) + len(spare)) * kv.block_size - len(one.request.tokens) + 1)
        return found

    def _overwrite(self, one: Asked) -> None:
        """These passes write to its blocks from `start` on: until they are done, nothing is known to be valid there."""
        life, size, holding = one.life, self.kv.block_size, one.life.holding
        until = min(one.start + one.count + max(one.most - 1, 0), len(holding.blocks) * size)
        for block in holding.blocks[one.start // size : -(-until // size)]:
            self._content[block] = None
        life.valid, life.drafted, life.marked = one.start, (), min(life.marked, one.start // size)

    def _plan(
        self, rows: Sequence[Asked], starting: Sequence[RowStart], grown: Sequence[tuple[int, int, int]], kept: int
    ) -> StepPlan:
        self._steps += 1
        return StepPlan(
            self._steps,
            tuple(starting),
            np.array(grown, dtype=np.int64).reshape(-1, 3),
            np.array([one.request.row for one in rows], dtype=np.int64),
            np.array([one.request.generation for one in rows], dtype=np.int64),
            np.array([one.start for one in rows], dtype=np.int64),
            np.array([one.count for one in rows], dtype=np.int64),
            np.array([one.most > 0 for one in rows], dtype=np.int64),
            np.array([token for one in rows for token in one.tokens], dtype=np.int64),
            kept=kept,
        )

    def _take(self, drawing: Sequence[Asked], result: StepResult) -> list[Asked]:
        """Take what was drawn; returns the rows that go on."""
        failed = {index for index, _ in result.failures}
        logprobs = {index: one.logprob for index, one in result.logprobs}
        going: list[Asked] = []
        for index, (one, token) in enumerate(zip(drawing, result.tokens.tolist(), strict=True)):
            if index in failed or token in one.request.stop_ids:
                continue  # nothing comes after it
            if one.draw(token, logprobs.get(index, UNKNOWN)):
                going.append(one)
        return going

    def _note(self, one: Asked) -> None:
        """Its passes are done: what they wrote is valid for its tokens, and for its draft tokens as far as those come.
        Those in spare blocks are not kept."""
        life, size, request = one.life, self.kv.block_size, one.request
        committed = min(one.start + one.count, len(request.tokens))
        held = len(life.holding.blocks) * size
        life.valid = committed
        life.drafted = one.kept = one.drawn[: max(0, min(one.start + one.count, held) - committed)]
        for number in range(life.marked, committed // size):
            self._content[life.holding.blocks[number]] = self._name(request, life, number)
        life.marked = committed // size
