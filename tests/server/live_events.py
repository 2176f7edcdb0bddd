"""Many requests at many passes a second, as an engine would report them: made up, and counted.

A pass decodes all running requests; every few passes some end and others take their places, each with a prompt of one
chunk. Knows the records of core/live.py and what a page must know after reading them; knows no engine and no browser.
"""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.core.clock import WallClock
from shoal.core.live import LiveBatch, LivePass, LiveRequest
from shoal.core.report import EngineStatus
from shoal.server.app import Front
from tests.server.fake_client import FakeClient
from tests.server.fronts import front, listening

PROMPT, BATCH_S, CELLS, WAITING = 48, 0.1, 2048, 48
TENANTS, TIERS = ("ada", "bob", "cleo", "dora"), ("premium", "standard")


@dataclass
class MadeUpPasses:
    """`lanes` running requests; after every `every` passes `turn` of them are replaced."""

    lanes: int
    pass_s: float = 0.01
    every: int = 5
    turn: int = 4
    began_s: float = 0.0
    step: int = 0
    count: int = 0  # requests so far
    ended: int = 0
    joined: bool = False  # with the last pass
    running: list[int] = field(default_factory=list)  # oldest first
    outputs: dict[int, int] = field(default_factory=dict)

    def batch(self) -> LiveBatch:
        """The passes of the next tenth of a second."""
        came: list[LiveRequest] = []
        gone: list[int] = []
        passes = [self._pass(came, gone) for _ in range(round(BATCH_S / self.pass_s))]
        return LiveBatch(self.now_s, came, gone, msgspec.msgpack.encode(passes))

    @property
    def now_s(self) -> float:
        return self.began_s + self.step * self.pass_s

    def _pass(self, came: list[LiveRequest], gone: list[int]) -> LivePass:
        begun_s, old, leaving = self.now_s, self.running, list[int]()
        if self.step % self.every == 0 and self.step:
            leaving, self.running = old[: self.turn], old[self.turn :]
        joining = [self._arrive(begun_s, came) for _ in range(self.lanes - len(self.running))]
        # a batch begins with a pass that names its rows
        same = not joining and not leaving and not self.joined and self.step % round(BATCH_S / self.pass_s) != 0
        self.joined = bool(joining)
        positions = [PROMPT + self.outputs[number] - 1 for number in self.running]
        one = LivePass(
            self.step, begun_s, begun_s + 0.9 * self.pass_s,
            rows=None if same else [*self.running, *joining],
            starts=[] if same else positions + [0] * len(joining),
            counts=[] if same else [1] * len(positions) + [PROMPT] * len(joining),
            computed=len(positions) + PROMPT * len(joining), budget=2 * self.lanes, running=self.lanes, waiting=WAITING,
            held=3 * self.lanes, cached=self.lanes, total=8 * self.lanes, mfu=0.3, mbu=0.7,
            admitted=[(number, 0.05, 0, False) for number in joining], first=joining,
            ended=[(number, "length", self.outputs[number], True, True) for number in leaving],
        )  # fmt: skip
        for number in leaving:
            del self.outputs[number]
            gone.append(number)
            self.ended += 1
        self.running = self.running + joining
        for number in self.running:
            self.outputs[number] += 1
        self.step += 1
        return one

    def _arrive(self, at_s: float, came: list[LiveRequest]) -> int:
        self.count += 1
        tenant, tier = TENANTS[self.count % 4], TIERS[self.count % 2]
        came.append(
            LiveRequest(
                self.count, f"{self.count:06x}.0", at_s - 0.05, tenant, tier, PROMPT, most=9999, ttft_s=0.2, itl_s=0.02
            )
        )
        self.outputs[self.count] = 0
        return self.count

    def view(self) -> dict[str, Any]:
        """A queue, and a block map in which each request holds some cells."""
        ids = [f"{number:06x}.0" for number in self.running[: CELLS // 2]]
        runs = [[2, owner, 1] for owner in range(len(ids))] + [[1, -1, CELLS // 4], [0, -1, CELLS // 4]]
        blocks = {"total": 8 * self.lanes, "per_cell": 1 + 8 * self.lanes // CELLS, "owners": ids, "runs": runs}
        queue = [[id, "all places are taken", 0.15] for id in ids[:WAITING]]
        return {"queue": queue, "waiting": WAITING, "blocks": blocks, "host": [0, 0], "block_size": 16, "every_s": 0.5}


class MadeUpClient(FakeClient):
    def __init__(self, passes: MadeUpPasses) -> None:
        super().__init__()
        self.passes = passes

    @property
    def engines(self) -> list[EngineStatus]:
        return [EngineStatus(0, True, 0)]

    async def ask(self, what: str, engine: int | None = None) -> Any:
        return self.passes.view() if what == "live" else await super().ask(what, engine)


class MadeUpServer:
    """A real front, told of made-up passes as time goes on, until it has told `batches` of them."""

    def __init__(self, passes: MadeUpPasses, batches: int) -> None:
        self.passes, self.batches, self.port = passes, batches, 0
        self.told = threading.Event()  # all of them
        self._go, self._ready, self._stop = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.thread.start()
        assert self._ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/live"

    def go(self) -> None:
        self._go.set()

    def close(self) -> None:
        self._stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()

    async def _main(self) -> None:
        app: Front = front(MadeUpClient(self.passes), host="127.0.0.1")
        app.live.ring.up(0, 0)
        async with listening(app) as self.port:
            self._ready.set()
            while not self._go.is_set() and not self._stop.is_set():
                await asyncio.sleep(0.02)
            clock = WallClock()
            self.passes.began_s = clock.now_s()
            while not self._stop.is_set():
                if self.batches:
                    batch = self.passes.batch()
                    await asyncio.sleep(max(0.0, self.passes.now_s - clock.now_s()))
                    app.live.ring.batch(0, 0, batch)
                    self.batches -= 1
                else:
                    self.told.set()
                    await asyncio.sleep(0.05)
            app.draining = True  # ends the streams
