"""A real front with the live page, over engines that compute nothing: a real scheduler and feed, on wall time.

The traffic is made up: chats, a large prompt, tenants and tiers. Knows no browser.
"""

import asyncio
import random
import threading
from typing import Any

import numpy as np

from shoal.core.clock import WallClock
from shoal.core.job import EngineInfo
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.report import EngineStatus
from shoal.engine.block_map import live_view
from shoal.engine.loop import EngineLoop
from shoal.engine.pass_feed import PassFeed
from shoal.server.app import Front
from tests.fakes import make_request, make_scheduler
from tests.server.fake_client import INFO, FakeClient
from tests.server.fronts import front, listening

TENANTS = ("ada", "bob", "cleo", "dora")
TIERS: dict[str, dict[str, object]] = {
    "premium": {"ttft": 0.3, "itl": 0.04, "weight": 8},
    "standard": {"ttft": 2.0, "itl": 0.2, "weight": 4},
    "batch": {"weight": 1},
}


class QuickExecutor:
    """Computes nothing: every draw is token 1."""

    def forward(self, plan: StepPlan) -> None:
        chosen = plan.draws > 0
        drawn = np.ones(int(chosen.sum()), dtype=np.int64)
        self._result = StepResult(plan.step, plan.rows[chosen], plan.generations[chosen], drawn, drawn, busy_s=0.01)

    def sample(self, masks: LateMasks | None) -> None: ...

    def result(self) -> StepResult:
        return self._result

    def close(self) -> None: ...


class PacedEngine:
    """One engine: its scheduler, and passes that take a while."""

    def __init__(self, number: int, pass_s: float, **options: Any) -> None:
        self.number, self.pass_s, self.epoch, self.up = number, pass_s, 0, True
        self.options = {"max_model_len": 4000, "block_size": 16, "tiers": TIERS, **options}
        self.start()

    def start(self) -> None:
        self.scheduler = make_scheduler(**self.options)
        self.loop = EngineLoop(self.scheduler, QuickExecutor(), WallClock(), depth=1)
        self.feed = PassFeed(self.scheduler)
        self.feed.follow(b"front")


class PacedClient(FakeClient):
    """Answers for the engines."""

    def __init__(self, engines: list[PacedEngine]) -> None:
        super().__init__()
        self.all = engines

    @property
    def info(self) -> EngineInfo | None:
        return INFO

    @property
    def engines(self) -> list[EngineStatus]:
        return [EngineStatus(one.number, one.up, one.epoch) for one in self.all]

    async def ask(self, what: str, engine: int | None = None) -> Any:
        if what == "live":
            scheduler = self.all[engine or 0].scheduler
            return live_view(scheduler, WallClock().now_s())
        return await super().ask(what, engine)


class LiveServer:
    """Serves on a thread; `submit` and the others are called from the test's thread."""

    def __init__(self, engines: int = 1, pass_s: float = 0.03, **options: Any) -> None:
        self.engines = [PacedEngine(number, pass_s, **options) for number in range(engines)]
        self.chance = random.Random(7)
        self.count = 0
        self.port = 0
        self._ready, self._stop = threading.Event(), threading.Event()
        self._todo: list[Any] = []
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.thread.start()
        assert self._ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/live"

    def submit(self, count: int = 1, prompt: int = 0, most: int = 0, engine: int = 0, **more: Any) -> None:
        for _ in range(count):
            self.count += 1
            length = prompt or self.chance.choice((20, 40, 60, 90))
            chosen = {
                "tenant": self.chance.choice(TENANTS),
                "tier": self.chance.choice(("premium", "standard")),
                **more,
            }
            ids = [self.chance.randrange(50) for _ in range(length)]
            one = make_request(f"{self.count:06x}.0", ids, most or self.chance.randrange(40, 200), **chosen)
            self._todo.append((engine, one))

    def do(self, act: Any) -> None:
        """On the server's thread."""
        self._todo.append(act)

    def kill(self, engine: int = 0) -> None:
        """The engine dies; its requests wait."""
        one = self.engines[engine]

        def act() -> None:
            one.up = False
            self.app.live.ring.down(one.number)
            self._orphans = list(one.scheduler.requests.values())

        self.do(act)

    def restart(self, engine: int = 0, onto: int | None = None) -> None:
        """… and go on, where they were or on another engine."""
        one, other = self.engines[engine], self.engines[engine if onto is None else onto]

        def act() -> None:
            one.epoch += 1
            one.start()
            one.up = True
            self.app.live.ring.up(one.number, one.epoch)
            for old in self._orphans:
                again = make_request(
                    old.id, old.tokens[: old.prompt_len], old.max_tokens, tenant=old.tenant, tier=old.tier,
                    output=old.output_tokens, waited_s=WallClock().now_s() - old.arrived_s,
                )  # fmt: skip
                other.loop.submit_all([again], resumed=True)

        self.do(act)

    def close(self) -> None:
        self._stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()

    async def _main(self) -> None:
        self.app: Front = front(PacedClient(self.engines), host="127.0.0.1")
        for one in self.engines:
            self.app.live.ring.up(one.number, one.epoch)
        async with listening(self.app) as self.port:
            self._ready.set()
            while not self._stop.is_set():
                self._step()
                await asyncio.sleep(self.engines[0].pass_s)
            self.app.draining = True  # ends the streams

    def _step(self) -> None:
        todo, self._todo = self._todo, []
        for one in todo:
            if callable(one):
                one()
            else:
                engine, request = one
                self.engines[engine].loop.submit(request)
        for engine in self.engines:
            if not engine.up:
                continue
            if not engine.loop.idle:
                engine.feed.take(engine.loop.step())
            for batch in engine.feed.due(WallClock().now_s()).values():
                self.app.live.ring.batch(engine.number, engine.epoch, batch)
