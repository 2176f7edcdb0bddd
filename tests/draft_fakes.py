"""A draft model on a fake device, whose KV is checked at every call.

Its blocks hold what fakes.FakeExecutor writes: a hash of all that a position depends on. So a draft that was computed
from KV of other tokens, or of tokens that were rejected, is noticed where it is read.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs, Request
from shoal.sched.scheduler import Scheduler
from shoal.spec.draft import Asked, DraftDrafter, DraftKV, spare_blocks
from tests.fakes import VOCAB, FakeExecutor, fold, slot_of


class DraftDevice(FakeExecutor):
    """Draws what the model draws, and now and then another token. Rows begin and go on wherever the plan says.

    Passes are computed as soon as they can be, as on a stream: tokens that are kept are there for the model's next
    pass, whether their result was taken or not.
    """

    def __init__(self, blocks: int, block_size: int, wrong: int = 4, fails_at: int = -1) -> None:
        super().__init__(blocks, block_size, pass_s=lambda positions: 1e-4 + 1e-6 * positions)
        self.wrong = wrong  # one token in so many is wrong; 0: none
        self.fails_at = fails_at  # the pass that raises
        self.plans: list[StepPlan] = []
        self.results: deque[StepResult | Exception] = deque()

    def forward(self, plan: StepPlan) -> None:
        for start in plan.starting:
            self.rows[start.row], self.tables[start.row], self.rejected[start.row] = start, list(start.blocks), 0
        for row, index, block in plan.grown.tolist():
            assert index <= len(self.tables[row]), "a block was added out of order"
            self.tables[row][index:] = [block]  # what stood behind it were spare blocks
        for row in plan.rows.tolist():
            self.positions.pop(row, None)
        self.rejected_then[plan.step] = [0] * len(plan.rows)
        self.queue.append(plan)
        self.plans.append(plan)

    def sample(self, masks: LateMasks | None) -> None:
        super().sample(masks)
        if len(self.plans) - 1 == self.fails_at:
            self.queue.clear()
            self.results.append(RuntimeError("no memory left"))
            return
        kept, result = self.plans[-1].kept, super().result()
        if kept >= 0:
            for place in [place for place in self.drafted if place[0] == kept]:
                del self.drafted[place]  # of rows that draw nothing: not to be read
            drawn = zip(result.rows.tolist(), result.tokens.tolist(), strict=True)
            self.drafted.update({(kept, row): token for row, token in drawn})
        sure = [
            (index, Logprobs(token, -0.3, 1, (), ()))
            for index, (row, token) in enumerate(zip(result.rows.tolist(), result.tokens.tolist(), strict=True))
            if self.rows[row].params.logprobs is not None
        ]
        self.results.append(result._replace(logprobs=tuple(sure)))

    def result(self) -> StepResult:
        result = self.results.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def _verify(
        self, row: int, start: int, ids: list[int], allowed: list[list[int] | None], slots: list[int]
    ) -> list[int]:
        tokens = super()._verify(row, start, ids, allowed, slots)
        if self.wrong and fold([start, self.rows[row].seed], 5) % self.wrong == 0:
            tokens = [(token + 1) % VOCAB for token in tokens]
        self.last[row] = tokens[-1]
        return tokens


class CheckedDrafter(DraftDrafter):
    """Checks before each call that all it relies on is valid, and afterwards that all it notes is."""

    def __init__(self, device: DraftDevice, kv: DraftKV, on_device: bool = False) -> None:
        super().__init__(device, kv, on_device)
        self.device = device
        self.stayed = 0  # passes whose tokens stayed on the device
        self.reused = 0  # positions that were not computed again
        self.named = 0  # … of these, in blocks that another request or life had computed
        self._known: dict[bytes, list[int]] = {}  # name of a block → what it must hold
        self._slots: dict[Request, list[int]] = {}  # what the positions of a request must hold

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        found = super().propose(wanted)
        assert not self._failed or self.device.fails_at >= 0, "it was switched off: see the log"
        return found

    def _compute(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            self.reused += one.start
            if not one.life.sent:
                self.named += one.start
            expected = self._slots_of(one.request)[: one.start]
            assert self._held(one.life.holding.blocks, one.start) == expected, "KV of other tokens is relied on"
            assert one.start < len(one.request.tokens), "nothing is left to draw from"
        super()._compute(asked)
        self.stayed += len(self._queued)
        for one in asked:
            slots = self._check(one)
            for number, name in enumerate(one.life.names):
                self._known[name] = slots[number * self.kv.block_size : (number + 1) * self.kv.block_size]
        for block, content in enumerate(self._content):
            assert content is None or self.device.memory[block] == self._known[content], (
                f"block {block} was overwritten"
            )

    def settle(self) -> None:
        queued = list(self._queued)
        super().settle()
        for one in queued[0].drawing if queued else ():
            if one.life.drafted is one.kept and one.life.holding is one.request.holding and not self._failed:
                assert all(token >= 0 for token in one.kept), "a token that has come back is not known"
                self._check(one)

    def _check(self, one: Asked) -> list[int]:
        """What is noted of its KV is there, as far as it is known."""
        slots = self._slots_of(one.request)
        expected = slots[: one.life.valid]
        for token in one.life.drafted:
            if token >= 0:
                expected.append(slot_of(token, expected))
        assert self._held(one.life.holding.blocks, len(expected)) == expected, "KV of other tokens is noted"
        return slots

    def ended(self, request: Request, by_itself: bool) -> None:
        super().ended(request, by_itself)
        self._slots.pop(request, None)

    def _slots_of(self, request: Request) -> list[int]:
        slots = self._slots.setdefault(request, [])
        for token in request.tokens[len(slots) :]:
            slots.append(slot_of(token, slots))
        return slots

    def _held(self, blocks: Sequence[int], count: int) -> list[int]:
        size = self.kv.block_size
        return [self.device.memory[blocks[place // size]][place % size] for place in range(count)]


def checked_drafter(
    blocks: int,
    block_size: int,
    rows: int,
    draft_tokens: int,
    longest: int = 200,
    pass_tokens: int = 12,
    wrong: int = 4,
    fails_at: int = -1,
    on_device: bool = False,
) -> CheckedDrafter:
    spare = spare_blocks(draft_tokens, block_size)
    device = DraftDevice(blocks + rows * spare, block_size, wrong, fails_at)
    return CheckedDrafter(device, DraftKV(blocks, block_size, spare, longest, pass_tokens), on_device)


def one_device(scheduler: Scheduler, executor: FakeExecutor) -> None:
    """The draft model, if the scheduler has one, is on the executor's device: it leaves its tokens there."""
    models = getattr(scheduler.policies.drafts, "models", None)
    drafter = getattr(models, "_drafter", None)
    if isinstance(drafter, CheckedDrafter):
        executor.drafted = drafter.device.drafted
