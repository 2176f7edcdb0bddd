"""A fake device that computes nothing but notices everything.

It keeps real block contents: each position's slot holds a hash of all it depends on, and a token is a function of
every slot its sequence reads through its block table. So a block or row that was reused too early, a token fed at
the wrong position or a wrong prefix hit changes the tokens, and the oracle below, which has no blocks, tells.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from shoal.config.speculate import Speculate
from shoal.core.drafts import Draft
from shoal.core.params import SamplingParams
from shoal.core.plan import DRAFTED, FROM_DEVICE, SCRIPTED_END, BlockCopy, RowStart, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs, Request
from shoal.core.tiers import Tiers
from shoal.kv.manager import KVManager
from shoal.sched.admission import Limits, Rules
from shoal.sched.batching import Continuous, Dynamic, Static
from shoal.sched.budget import Fixed, PromiseBudget
from shoal.sched.drafts import DraftPolicy, NoDrafts
from shoal.sched.fair import Fair
from shoal.sched.flight import Flight
from shoal.sched.lanes import Headroom, Lanes
from shoal.sched.layout import LAYOUT
from shoal.sched.memory import OnDemand, Predict, Reserve
from shoal.sched.modeldrafts import ModelDrafts
from shoal.sched.order import Order
from shoal.sched.ordering import Fcfs, Priority, Sjf
from shoal.sched.policies import Policies
from shoal.sched.preempt import PREEMPT, Auto, Preempt
from shoal.sched.prefill import PREFILL
from shoal.sched.scheduler import Scheduler
from shoal.sched.slo import Slo
from shoal.sched.speculation import Speculation
from shoal.sched.steptime import CopyTimes, StepModel
from shoal.spec.make import make_drafter

VOCAB = 50
MASK = 2**61 - 1


def fold(slots: Sequence[int], start: int = 7) -> int:
    value = start
    for slot in slots:
        value = (value * 6364136223846793005 + slot + 1442695040888963407) & MASK
    return value


def slot_of(token: int, slots: Sequence[int]) -> int:
    """What a position's slot holds, given those before it: a hash of all of them, and the token itself."""
    return fold([token], fold(slots)) << 6 | token & 63


def draw(slots: Sequence[int], seed: int, sample: int, position: int, allowed: Sequence[int] | None = None) -> int:
    """A token; in two of three cases the one that came some positions before, so that drafters find something."""
    choices = range(VOCAB) if allowed is None else allowed
    chance = fold([seed, sample, position], fold(slots))
    again = slots[-(3 + seed % 3) :][0] & 63
    if chance % 3 and again in choices:
        return again
    return choices[chance // 3 % len(choices)]


class FakeGrammar:
    """Allows about one token in four, depending on all that it accepted before, and in some states a single one; ends
    after `length` tokens.

    It allows no token at output `breaks_at`, and accepts none at output `refuses_at`.
    """

    def __init__(self, seed: int, length: int, breaks_at: int = -1, refuses_at: int = -1) -> None:
        self.seed = seed
        self.length = length
        self.breaks_at = breaks_at
        self.refuses_at = refuses_at
        self.outputs: list[int] = []
        self.ended = False
        self.error = ""

    def allowed(self) -> list[int]:
        state = fold(self.outputs, self.seed)
        if state % 5 < 3:
            return [state % VOCAB]
        return [token for token in range(VOCAB) if fold([token], state) % 4 == 0] or [0]

    def accept(self, token: int) -> bool:
        assert not self.ended, "a token after the end"
        assert not self.error, "a token after an error"
        if len(self.outputs) == self.refuses_at or token not in self.allowed():
            self.error = f"token {token} was refused"
            return False
        self.outputs.append(token)
        self.ended = len(self.outputs) == self.length
        return True

    def fill(self, line: "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]") -> None:
        line[:] = 0
        if len(self.outputs) == self.breaks_at:
            self.error = "the grammar broke"
            return
        for token in self.allowed():
            line[token // 32] |= np.uint32(1 << token % 32)

    def forced(self) -> list[int]:
        ahead, tokens = self._copy(), []
        while not ahead.ended and not ahead.error and len(ahead.allowed()) == 1 and len(tokens) < 20:
            tokens += ahead.allowed()
            ahead.accept(tokens[-1])
        return tokens

    def allows(self, tokens: Sequence[int]) -> int:
        ahead = self._copy()
        for place, token in enumerate(tokens):
            if ahead.ended or ahead.error or not ahead.accept(token):
                return place
        return len(tokens)

    def fill_ahead(self, lines: "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]", tokens: Sequence[int]) -> None:
        self.fill(lines[0])
        ahead = self._copy()
        for token, line in zip(tokens, lines[1:], strict=True):
            line[:] = 0
            if not ahead.error and not ahead.ended and ahead.accept(token) and not ahead.ended:
                ahead.fill(line)

    def _copy(self) -> "FakeGrammar":
        copy = FakeGrammar(self.seed, self.length, self.breaks_at, self.refuses_at)
        copy.outputs, copy.ended, copy.error = list(self.outputs), self.ended, self.error
        return copy


def oracle(
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
    sample: int,
    min_tokens: int = 0,
    grammar: FakeGrammar | None = None,
) -> list[int]:
    """The output tokens, computed with no batch, no blocks and no scheduler. `grammar` has accepted nothing yet."""
    slots: list[int] = []
    for token in prompt:
        slots.append(slot_of(token, slots))
    output: list[int] = []
    while True:
        if grammar is not None and len(output) == grammar.breaks_at:
            return output
        token = draw(slots, seed, sample, len(slots), grammar.allowed() if grammar else None)
        if grammar is not None and not grammar.accept(token):
            return output
        output.append(token)
        if token in stop_ids and (len(output) > min_tokens or grammar is not None):
            return output
        if len(output) == max_tokens or (grammar is not None and grammar.ended):
            return output
        slots.append(slot_of(token, slots))


def fake_logprobs(token: int) -> Logprobs:
    """Logprobs of a token, made up."""
    return Logprobs(token, -float(token), 1, (), ())


class FakeExecutor:
    """Changes its row tables as soon as it is handed a plan, and computes it only when asked for the result.

    Copies of blocks are done some passes after the one that brought them, each after its own delay, and are reported
    later still; some fail, if asked to. A pass takes `pass_s` of its positions.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        slow_copies: int = 0,
        failing: Callable[[int], bool] = lambda number: False,
        pass_s: Callable[[int], float] = lambda positions: 0.0,
    ) -> None:
        self.pass_s = pass_s
        self.host = [[-2] * block_size for _ in range(host_blocks)]
        self.copies: list[tuple[int, BlockCopy]] = []  # (passes to go, order)
        self.leaving: dict[int, list[list[int]]] = {}  # what a copy from the device would have copied at once
        self.reported_late: list[tuple[int, BlockCopy, bool]] = []  # done, but not reported for so many passes
        self.slow_copies = slow_copies
        self.failing = failing
        self.copied_blocks = 0
        self.block_size = block_size
        self.memory = [[-1] * block_size for _ in range(blocks)]
        self.rows: dict[int, RowStart] = {}
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.drafted: dict[tuple[int, int], int] = {}  # (number, row) → a draft token that is on the device
        self.positions: dict[int, int] = {}  # row → the next position to compute, where it is known to the device only
        self.rejected: dict[int, int] = {}  # row → draft tokens rejected in its present life
        self.rejected_then: dict[int, list[int]] = {}  # pass → what each of its rows had rejected when it came
        self.queue: deque[StepPlan] = deque()
        self.accepted_drafts = self.rejected_drafts = 0
        self.masks: dict[int, LateMasks | None] = {}  # by pass, from its sample() to its result()
        self.computed_tokens = 0

    def forward(self, plan: StepPlan) -> None:
        for start in plan.starting:
            self.rows[start.row] = start
            self.tables[start.row] = list(start.blocks)
            self.rejected[start.row] = 0
            self.positions.pop(start.row, None)
        for row, index, block in plan.grown.tolist():
            assert len(self.tables[row]) == index, "a block was added out of order"
            self.tables[row].append(block)
        for order in plan.copies:
            if order.direction == "out":
                self.leaving[order.id] = [list(self.memory[block]) for block in order.source]
        self.rejected_then[plan.step] = [self.rejected[row] for row in plan.rows.tolist()]
        self.queue.append(plan)

    def sample(self, masks: LateMasks | None) -> None:
        plan = self.queue[-1]
        assert plan.step not in self.masks, "a pass was sampled twice"
        if masks is not None:
            assert masks.lines.tolist() == sorted(set(masks.lines.tolist())), "masks out of order"
            assert masks.lines[-1] < plan.draws.sum(), "a mask for a draw that does not exist"
        self.masks[plan.step] = masks

    def result(self) -> StepResult:
        plan = self.queue.popleft()
        then = self.rejected_then.pop(plan.step)
        allowed = self._allowed(self.masks.pop(plan.step, None))
        self.copies += [(order.id * 7 % (self.slow_copies + 1), order) for order in plan.copies]
        failures: list[tuple[int, str]] = []
        tokens: list[int] = []
        accepted: list[int] = []
        logprobs, prompt_logprobs = [], []
        offset = line = 0
        for place, (row, start, count, draws) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.draws.tolist(), strict=True)
        ):
            start -= self.rejected[row] - then[place]  # planned as if all drafts in flight were accepted
            assert start == self.positions.get(row, start), "a row goes on at another position than it stopped at"
            ids = [
                self.drafted[DRAFTED - token, row] if token <= DRAFTED else token
                for token in plan.tokens[offset : offset + count].tolist()
            ]
            offset += count
            begun = self.rows[row]
            slots = self._compute(row, start, ids)
            self.positions[row] = start + count
            if draws:
                if allowed.get(line) == []:
                    failures.append((len(accepted), "nothing is allowed"))
                    allowed[line] = [0]
                masked = [allowed.get(one) for one in range(line, line + draws)]
                line += draws
                drawn = self._verify(row, start, ids, masked, slots)
                if begun.params.logprobs is not None:
                    logprobs += [(len(tokens) + index, fake_logprobs(token)) for index, token in enumerate(drawn)]
                ends = [start + count - draws + 1 + index == begun.ends_at for index in range(len(drawn))]
                tokens += [SCRIPTED_END if end else token for end, token in zip(ends, drawn, strict=True)]
                accepted.append(len(drawn))
            if begun.needs_prompt_logprobs and start < begun.prompt_len - 1:
                seen = begun.tokens[start + 1 : min(start + count + 1, begun.prompt_len)]
                prompt_logprobs.append((place, start + 1, tuple(fake_logprobs(token) for token in seen)))
        chosen = plan.draws > 0
        done, failed = self._copy(everything=not len(plan.rows))
        return StepResult(
            plan.step,
            plan.rows[chosen],
            plan.generations[chosen],
            np.array(accepted, dtype=np.int64),
            np.array(tokens, dtype=np.int64),
            tuple(logprobs),
            tuple(prompt_logprobs),
            tuple(failures),
            tuple((order.id, 1e-3 * len(order.source)) for order in done),
            tuple(order.id for order in failed),
            padded=(len(plan.rows) + plan.dead) * plan.width - len(plan.tokens) if plan.width else 0,
            busy_s=self.pass_s(len(plan.tokens)),
        )

    def _compute(self, row: int, start: int, ids: list[int]) -> list[int]:
        """Write the slots of these positions; returns them with all before them."""
        slots = self._read(row, start)
        for step, token in enumerate(ids):
            slots.append(slot_of(self.last[row] if token == FROM_DEVICE else token, slots))
            self._write(row, start + step, slots[-1])
        self.computed_tokens += len(ids)
        return slots

    def _verify(
        self, row: int, start: int, ids: list[int], allowed: list[list[int] | None], slots: list[int]
    ) -> list[int]:
        """Draw after each of the last positions, up to the first draw that its draft does not confirm. Now and then
        fewer than that: how many are accepted is the device's own affair. allowed: the tokens of each draw."""
        begun, draws = self.rows[row], len(allowed)
        first = len(ids) - draws
        drawn: list[int] = []
        for place in range(first, len(ids)):
            position = start + place + 1
            if allowed[place - first] == []:
                break  # nothing can be drawn here: the next pass finds that out
            drawn.append(draw(slots[:position], begun.seed, begun.sample, position, allowed[place - first]))
            confirmed = place + 1 < len(ids) and ids[place + 1] == drawn[-1]
            if not confirmed or fold([position, begun.seed], 11) % 7 == 0:
                break
        self.last[row] = drawn[-1]
        self.rejected[row] += draws - len(drawn)
        self.positions[row] -= draws - len(drawn)
        self.accepted_drafts += len(drawn) - 1
        self.rejected_drafts += draws - len(drawn)
        return drawn

    def _copy(self, everything: bool) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Do the copies whose time has come, and tell of those done a while ago: (done, failed)."""
        waiting = []
        for passes, order in self.copies:
            if passes and not everything:
                waiting.append((passes - 1, order))
                continue
            fails = self.failing(order.id)
            source, target = (self.memory, self.host) if order.direction == "out" else (self.host, self.memory)
            if order.direction == "out":
                now = [self.memory[block] for block in order.source]
                assert now == self.leaving.pop(order.id), "a block was copied from the device before it was complete"
            for one, other in zip(order.source, order.target, strict=True):
                target[other] = [-3] * self.block_size if fails else list(source[one])
                self.copied_blocks += 1
            self.reported_late.append((order.id * 5 % (self.slow_copies + 1), order, fails))
        self.copies = waiting
        reported = [(order, fails) for passes, order, fails in self.reported_late if everything or not passes]
        self.reported_late = [
            (passes - 1, order, fails) for passes, order, fails in self.reported_late if passes and not everything
        ]
        return [order for order, fails in reported if not fails], [order for order, fails in reported if fails]

    def _allowed(self, masks: LateMasks | None) -> dict[int, list[int]]:
        """Line → the tokens that may be drawn, for lines that may not draw all."""
        if masks is None:
            return {}
        bits = np.unpackbits(masks.allowed.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        return {int(line): np.flatnonzero(one).tolist() for line, one in zip(masks.lines, bits, strict=True)}

    def _read(self, row: int, count: int) -> list[int]:
        size, table = self.block_size, self.tables[row]
        return [self.memory[table[place // size]][place % size] for place in range(count)]

    def _write(self, row: int, place: int, value: int) -> None:
        self.memory[self.tables[row][place // self.block_size]][place % self.block_size] = value

    def close(self) -> None:
        pass


class PublishedBlocks:
    """Every block that a request could hit holds the tokens that it is named for: none rejected, none overwritten."""

    def __init__(self, kv: KVManager, executor: FakeExecutor) -> None:
        self.kv = kv
        self.executor = executor
        self._contents: dict[bytes, list[int]] = {}  # name of a full block → what it must hold

    def check(self, requests: Iterable[Request]) -> None:
        """To be called after a commit, with all requests so far."""
        index, size = self.kv.index, self.kv.block_size
        for request in requests:
            if request.names and request.names[-1] not in self._contents:
                slots: list[int] = []
                for token in request.tokens[: len(request.names) * size]:
                    slots.append(slot_of(token, slots))
                for number, name in enumerate(request.names):
                    self._contents[name] = slots[number * size : (number + 1) * size]
        for block in index.named():
            name = index.name_of(block)
            assert name is not None
            held = self.executor.memory[block]
            assert held == self._contents[name], f"block {block} holds other tokens than it is named for"


class FakeDrafter:
    """Proposes up to `most` tokens for every request; some are what it will generate, and some are not.

    It knows the oracle's answer, so it guesses right also after tokens that are still on their way.
    """

    ahead = True
    by_chance = False
    names: Sequence[str] = ("fake",)

    def __init__(self, most: int, wrong: int = 3) -> None:
        self.most = most
        self.wrong = wrong  # one draft token in so many is wrong; 0: none
        self._answers: dict[Request, list[int]] = {}

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        found = {request: self._drafts(request)[:most] for request, most in wanted.items()}
        return {
            request: Draft(drafts, [0.6] * len(drafts), (("fake", len(drafts)),))
            for request, drafts in found.items()
            if drafts
        }

    def cost_s(self, rows: int, tokens: int) -> float:
        return 0.0

    def ended(self, request: Request, by_itself: bool) -> None:
        self._answers.pop(request, None)

    def _drafts(self, request: Request) -> list[int]:
        known = request.outputs + request.pending
        chance = fold([known, request.sample], request.seed)
        if request not in self._answers:
            prompt = request.tokens[: request.prompt_len]
            self._answers[request] = oracle(prompt, request.max_tokens, frozenset(), request.seed, request.sample)
        drafts = self._answers[request][known : known + chance % (self.most + 1)]
        return [
            (token + 1) % VOCAB if self.wrong and fold([place, known], chance) % self.wrong == 0 else token
            for place, token in enumerate(drafts)
        ]


class FreeDrafts(Speculation):
    """Never learns what passes cost, so that what it decides does not depend on the speed of a real device."""

    def committed(
        self, flight: Flight, accepted: Mapping[Request, int], tokens: int, busy_s: float, now_s: float, more: bool
    ) -> None:
        super().committed(flight, accepted, tokens, 0.0, now_s, more)


def make_scheduler(
    *,
    blocks: int = 64,
    block_size: int = 4,
    keep: bool = True,
    max_model_len: int = 200,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    chunk_tokens: int = 0,
    watermark: float = 0.01,
    batching: str = "continuous",
    group_size: int = 3,
    window_s: float = 2.0,
    layout: str = "ragged",
    prefill: str = "chunked",
    memory: str = "ondemand",
    quantile: float = 0.5,
    order: str = "fcfs",
    age_s: float = 5.0,
    tiers: dict[str, dict[str, object]] | None = None,
    when_short: str = "recompute",
    host_blocks: int = 0,
    max_preemptions: int = 8,
    budget: str = "fixed",
    lane_tokens: int = 0,
    long_share: float = 0.25,
    headroom: float = 0.0,
    headroom_tokens: int = 0,
    max_queue: int = 0,
    max_wait_s: float | None = None,
    drafts: int = 0,
    wrong_drafts: int = 3,
    speculate: str = "off",
    on_device: bool = False,
    kind: type[Scheduler] = Scheduler,
) -> Scheduler:
    limits = Limits(max_model_len, max_num_seqs, max_num_batched_tokens, VOCAB)
    batchings = {
        "continuous": Continuous,
        "static": lambda: Static(group_size),
        "dynamic": lambda: Dynamic(group_size, window_s),
    }
    memories = {"ondemand": lambda: OnDemand(watermark), "reserve": Reserve, "predict": lambda: Predict(quantile)}
    orders: dict[str, Callable[[], Order]] = {
        "fcfs": Fcfs,
        "priority": lambda: Priority(age_s),
        "sjf": lambda: Sjf(age_s),
        "fair": Fair,
        "slo": lambda: Slo(known, steps, max_num_batched_tokens),
    }
    known, steps, copies = Tiers.read(tiers), StepModel(), CopyTimes()
    preempts: dict[str, Callable[[], Preempt]] = {
        **PREEMPT,
        "auto": lambda: Auto(steps, copies, max_num_batched_tokens),
    }
    speculation: DraftPolicy = NoDrafts()
    if speculate != "off":
        models = None
        if "draft" in speculate:
            from tests.draft_fakes import checked_drafter  # which needs this module

            sizes = blocks, block_size, limits.rows, drafts or 4, max_model_len
            models = ModelDrafts(checked_drafter(*sizes, on_device=on_device))
        speculation = Speculation(make_drafter(Speculate.read(speculate)), steps, VOCAB, drafts or 4, models)
    elif drafts:
        speculation = Speculation(FakeDrafter(drafts, wrong_drafts), steps, VOCAB, drafts)
    policies = Policies(
        batchings[batching](),
        LAYOUT[layout](),
        PREFILL[prefill](chunk_tokens),
        memories[memory](),
        orders[order](),
        preempts["wait" if memory == "reserve" and when_short == "recompute" and order != "slo" else when_short](),
        PromiseBudget(steps) if budget == "promise" else Fixed(),
        Lanes(lane_tokens, long_share, known),
        Headroom(headroom, headroom_tokens, len(known)),
        known,
        steps,
        copies,
        speculation,
    )
    rules = Rules(max_queue, max_wait_s, max_preemptions)
    return kind(limits, KVManager(blocks, block_size, keep, host_blocks), policies, rules)


def make_request(
    id: str, prompt: Sequence[int], max_tokens: int = 8, params: SamplingParams | None = None, **more: object
) -> Request:
    params = params or SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(id, list(prompt), params, **more)  # type: ignore[arg-type]
