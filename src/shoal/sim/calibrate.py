"""Calibration: drives a real engine over the plane of passes and records how long each takes.

The engine's executor is wrapped by one that notes what each plan contains and when its calls begin and end; the
scheduler and loop are as they always are. Owns the stages, each of which is a way of loading the engine, and what they
recorded. Takes a make_engine; knows no model and no device.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.core.clock import Clock
from shoal.core.params import SamplingParams
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.sim.cost import PassSize
from shoal.sim.fit import TimedCopy, TimedPass

MakeEngine = Callable[[dict[str, Any]], EngineLoop]


class RecordingExecutor:
    """Times every pass of another executor."""

    def __init__(self, inner: Executor, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock
        self.passes: list[TimedPass] = []
        self.copies: list[TimedCopy] = []
        self._sizes: deque[tuple[PassSize | None, float | None]] = deque()  # of each pass, and what the host took
        self._orders: dict[int, tuple[str, int]] = {}
        self._since_s: float | None = None  # since when the host has been at work for the next pass
        self._begun: tuple[PassSize | None, float | None] = (None, None)

    def leave_out(self, seconds: float) -> None:
        """So much of the time since the last pass was not the engine's work."""
        if self._since_s is not None:
            self._since_s += seconds

    def forward(self, plan: StepPlan) -> None:
        self._begun = (PassSize.of(plan) if len(plan.rows) else None, self._since_s)
        for order in plan.copies:
            self._orders[order.id] = (order.direction, len(order.source))
        self.inner.forward(plan)

    def sample(self, masks: LateMasks | None) -> None:
        self.inner.sample(masks)
        now_s, (size, since_s) = self.clock.now_s(), self._begun
        self._sizes.append((size, None if since_s is None else now_s - since_s))
        self._since_s = None  # a second pass begun right after it is no measure of one pass

    def result(self) -> StepResult:
        result = self.inner.result()
        self._since_s = self.clock.now_s()
        size, host_s = self._sizes.popleft()
        for number, seconds in result.copies_done:
            if number in self._orders:
                self.copies.append(TimedCopy(*self._orders.pop(number), seconds))
        if size is not None and result.busy_s > 0 and not result.cold:
            self.passes.append(TimedPass(size, result.busy_s, host_s))
        return result

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class LoadStage:
    """One way of loading the engine: so many users, with prompts and outputs of lengths within these bounds."""

    name: str
    users: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    settings: tuple[tuple[str, Any], ...] = ()
    share: float = 1.0  # of the time, beside the other stages


def stages(slots: int, context: int, budget: int) -> Iterator[LoadStage]:
    """The plane: decodes of every batch size, with short and long pasts; prompts, alone and beside them; rectangles."""
    longest = max(2, min(context // 2, 8 * budget))
    short, medium = min(64, longest), min(512, longest)
    sizes = sorted({min(slots, 2**power) for power in range(12)})
    for users in sizes:
        yield LoadStage(f"{users} users, chats", users, (4, medium), (8, max(8, min(128, context // 4))))
    for users in sizes[:: max(1, len(sizes) // 3)]:
        yield LoadStage(f"{users} users, decodes", users, (1, short), (48, max(48, min(96, context // 4))))
    # rows that read much, and some much more than others; their prompts must be computed first, which takes its time
    pasts, answers = (min(32, longest), max(32, min(budget * 3 // 2, longest))), max(8, min(budget, context // 4))
    for users in sorted({max(1, slots // 16), max(1, slots // 4), max(1, slots * 3 // 8)}):
        yield LoadStage(f"{users} users, long pasts", users, pasts, (answers // 2, answers), share=3.0)
    for users in sorted({1, max(1, slots // 8)}):
        yield LoadStage(f"{users} users, long prompts", users, (longest // 2, longest), (2, 24))
    yield LoadStage("padded", max(1, min(8, slots)), (4, short), (4, 32), (("layout", "padded"),))


def swap_stage(slots: int, context: int) -> LoadStage:
    """Memory is short, so blocks are swapped out and in: prompts of many lengths fit, and their answers do not."""
    most = max(2, min(256, context // 4))
    answers = (max(8, most // 2), max(16, most))
    return LoadStage("swaps", max(2, slots // 2), (max(1, most // 8), most), answers, (("when_short", "swap"),))


class Calibration:
    """Runs stages on engines, and keeps what they recorded."""

    def __init__(self, make_engine: MakeEngine, vocab_size: int, seed: int = 0) -> None:
        self.passes: list[TimedPass] = []
        self.copies: list[TimedCopy] = []
        self._make_engine = make_engine
        self._vocab_size = vocab_size
        self._chance = random.Random(seed)
        self._count = 0

    def run(self, stage: LoadStage, seconds: float, least: int = 12) -> int:
        """Load a new engine this way for so long, and for so many passes at least; returns how many there were."""
        settings = {"max_num_seqs": max(stage.users, 1), "prefix_caching": False, **dict(stage.settings)}
        loop = self._make_engine(settings)
        recorder = RecordingExecutor(loop.executor, loop.clock)
        loop.executor = recorder
        try:
            self._drive(loop, recorder, stage, loop.clock.now_s() + seconds, least)
        finally:
            loop.close()
        warm = recorder.passes[3:]  # the first ones load caches and start threads
        self.passes += warm
        self.copies += recorder.copies
        return len(warm)

    def _drive(
        self, loop: EngineLoop, recorder: RecordingExecutor, stage: LoadStage, until_s: float, least: int
    ) -> None:
        running: set[str] = set()
        while loop.clock.now_s() < until_s or len(recorder.passes) < least:
            while len(running) < stage.users:
                begun_s = loop.clock.now_s()
                request = self._request(stage, loop.scheduler.limits.max_model_len)
                recorder.leave_out(loop.clock.now_s() - begun_s)
                loop.submit(request)
                running.add(request.id)
            running -= {end.id for end in loop.step().finished}
        for id in running:
            loop.abort(id)
        while not loop.idle:
            loop.step()

    def _request(self, stage: LoadStage, context: int) -> Request:
        chance = self._chance
        output = min(chance.randint(*stage.output), context - 2)
        prompt = max(1, min(chance.randint(*stage.prompt), context - output - 1))
        self._count += 1
        tokens = chance.choices(range(self._vocab_size), k=prompt)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return Request(f"calibration-{self._count}", tokens, params, seed=self._count)
