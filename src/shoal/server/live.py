"""The live page's data: a ring of the engines' last passes, and a stream of summaries for pages that watch.

Owns the ring (bounded in time and bytes, each entry in one piece) and, while something watches, the summaries made of
it: at most ten a second, the same for all watchers. A recording is a watcher, too. Access is that of the debug pages.
Shows no text. Knows the engines only by what they send, and as an EngineClient.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.core.clock import Clock, WallClock
from shoal.core.live import LiveBatch, LivePass, LiveRequest
from shoal.core.ports import EngineClient
from shoal.core.turns import TurnTaker
from shoal.errors import EngineDown
from shoal.obs.live import KEY_LINES, LiveSummary, header

log = logging.getLogger(__name__)

RING_S = 180.0  # what is kept of the past
RING_BYTES = 16 * 2**20
LINE_S = 0.1  # between two lines
QUIET_S = 1.0  # … while nothing happens
LINES = 20 * KEY_LINES  # lines that are kept for the next watcher
UNREAD = 200  # lines that a watcher may be behind before it is dropped
LINGER_S = 10.0  # how long summaries go on when the last watcher has left
APART_S = 5.0  # an engine whose clock differs by more is on another machine, and its times are shifted

_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(LiveBatch)
_decoder = msgspec.msgpack.Decoder(list[LivePass])


@dataclass(frozen=True, slots=True)
class RingEntry:
    """A batch, or the engine went up or down."""

    at_s: float
    engine: int
    epoch: int = 0
    packed: bytes = b""  # the batch: thousands of small objects among short-lived ones would keep much more memory
    is_up: bool = False
    shift_s: float = 0.0  # from the engine's clock to this one

    @property
    def size(self) -> int:
        """About the bytes that it takes."""
        return 200 + len(self.packed)

    def batch(self) -> LiveBatch | None:
        return _batch_decoder.decode(self.packed) if self.packed else None


class LiveRing:
    """The engines' last passes, packed. A LiveSink."""

    on = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or WallClock()
        self.entries: deque[RingEntry] = deque()
        self.size = 0
        self.listener: Callable[[RingEntry], None] | None = None  # while something watches
        self.states: dict[int, tuple[int, bool]] = {}  # engine → epoch, up: before the first entry
        self.base: dict[tuple[int, int], dict[int, LiveRequest]] = {}  # … and its requests then
        self._shifts: dict[tuple[int, int], float] = {}

    def up(self, engine: int, epoch: int) -> None:
        self._add(RingEntry(self.clock.now_s(), engine, epoch, is_up=True))

    def down(self, engine: int) -> None:
        self._add(RingEntry(self.clock.now_s(), engine))

    def batch(self, engine: int, epoch: int, batch: LiveBatch) -> None:
        now_s = self.clock.now_s()
        apart_s = now_s - batch.sent_s
        shift_s = self._shifts.setdefault((engine, epoch), apart_s if abs(apart_s) > APART_S else 0.0)
        self._add(RingEntry(now_s, engine, epoch, _encoder.encode(batch), shift_s=shift_s))

    def _add(self, entry: RingEntry) -> None:
        self.entries.append(entry)
        self.size += entry.size
        while len(self.entries) > 1 and (self.size > RING_BYTES or self.entries[0].at_s < entry.at_s - RING_S):
            self._evict()
        if self.listener is not None:
            self.listener(entry)

    def _evict(self) -> None:
        """Drop the oldest entry; what it says about requests that are still there is kept."""
        entry = self.entries.popleft()
        self.size -= entry.size
        batch = entry.batch()
        if batch is None:
            epoch = entry.epoch if entry.is_up else self.states.get(entry.engine, (0, False))[0]
            self.states[entry.engine] = (epoch, entry.is_up)
            for key in [one for one in self.base if one[0] == entry.engine and one[1] != epoch]:
                del self.base[key]
            return
        known = self.base.setdefault((entry.engine, entry.epoch), {})
        known.update((one.number, one) for one in batch.came)
        for number in batch.gone:
            known.pop(number, None)


class LiveHub:
    """Makes summaries while something watches, and hands them to every watcher."""

    def __init__(self, ring: LiveRing, client: EngineClient, facts: Callable[[], dict[str, Any]]) -> None:
        """`facts`: for the first event: the model's name, for instance."""
        self.ring = ring
        self.client = client
        self.facts = facts
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._lines: deque[tuple[bool, bytes]] = deque()  # whether it has a key
        self._coming: deque[RingEntry] = deque()
        self._summary: LiveSummary | None = None
        self._task: asyncio.Task[None] | None = None
        self._said_s = 0.0  # the time of the last line

    @asynccontextmanager
    async def watch(self) -> AsyncIterator["asyncio.Queue[bytes | None]"]:
        """A queue of lines, from the oldest one that is kept; None at its end: the watcher is too slow."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        if self._task is None or self._task.done():
            self._begin()
        for _, line in self._lines:
            queue.put_nowait(line)
        self._watchers.add(queue)
        try:
            yield queue
        finally:
            self._watchers.discard(queue)

    def head(self) -> bytes:
        now_s = self.ring.clock.now_s()
        began_s = self._summary.began_s if self._summary is not None else now_s
        return encode(header(["live"], now=round(now_s - began_s, 4), **self.facts()))

    def _begin(self) -> None:
        ring = self.ring
        began_s = ring.entries[0].at_s if ring.entries else ring.clock.now_s()
        self._summary = LiveSummary(began_s)
        self._lines.clear()
        for engine, (epoch, is_up) in ring.states.items():
            self._summary.up(engine, epoch, began_s)
            if not is_up:
                self._summary.down(engine, began_s)
        for (engine, epoch), requests in ring.base.items():
            self._summary.came(engine, epoch, requests.values(), began_s)
        self._coming = deque(ring.entries)
        ring.listener = self._coming.append
        self._task = asyncio.create_task(self._run(self._summary), name="live summaries")

    async def _run(self, summary: LiveSummary) -> None:
        """Until nothing watches."""
        clock, pause = self.ring.clock, TurnTaker()
        watched_s = clock.now_s()
        self._said_s = watched_s - LINE_S
        views_s = 0.0
        try:
            while watched_s > clock.now_s() - LINGER_S:
                await self._catch_up(summary, pause)
                now_s = clock.now_s()
                if self._watchers:
                    watched_s = now_s
                if now_s >= views_s:
                    views_s = now_s + await self._ask_views(summary)
                if now_s - self._said_s >= (LINE_S if summary.news else QUIET_S):
                    self._say(summary.line(now_s), now_s)
                await asyncio.sleep(LINE_S)
        except Exception:
            log.exception("the live page's summaries failed; they begin again with the next watcher")
        finally:
            self.ring.listener = None
            self._lines.clear()
            self._summary = None
            for queue in self._watchers:
                queue.put_nowait(None)

    async def _catch_up(self, summary: LiveSummary, pause: TurnTaker) -> None:
        """Take what has come; the past in lines of half a second."""
        said_s = self._coming[0].at_s if self._coming else 0.0
        while self._coming:
            entry = self._coming.popleft()
            take(summary, entry)
            if entry.at_s - said_s > 5 * LINE_S and self._coming:
                said_s = entry.at_s
                self._say(summary.line(entry.at_s), entry.at_s)
            await pause.if_long()

    async def _ask_views(self, summary: LiveSummary) -> float:
        """The queues and block maps of all engines; returns after how many seconds to ask again."""
        every_s = 0.5
        for one in self.client.engines:
            if not one.up:
                continue
            try:
                answer = await self.client.ask("live", one.number)
            except EngineDown:
                continue
            if isinstance(answer, dict) and "blocks" in answer:
                summary.view(one.number, answer)
                every_s = max(every_s, float(answer["every_s"]))
        return every_s

    def _say(self, line: dict[str, Any], at_s: float) -> None:
        data, self._said_s = encode(line), at_s
        self._lines.append(("key" in line, data))
        if len(self._lines) > LINES:  # the first one that is kept has a key
            self._lines.popleft()
            while self._lines and not self._lines[0][0]:
                self._lines.popleft()
        for queue in list(self._watchers):
            if queue.qsize() > UNREAD + LINES:
                self._watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(data)


def take(summary: LiveSummary, entry: RingEntry) -> None:
    """One entry of the ring, into the summary."""
    batch, shift_s = entry.batch(), entry.shift_s
    if batch is None:
        if entry.is_up:
            summary.up(entry.engine, entry.epoch, entry.at_s)
        else:
            summary.down(entry.engine, entry.at_s)
        return
    came = [replace(one, at_s=one.at_s + shift_s) for one in batch.came] if shift_s else batch.came
    passes = _decoder.decode(batch.packed) if batch.packed else []
    if shift_s:
        for one in passes:
            one.begun_s, one.ended_s = one.begun_s + shift_s, one.ended_s + shift_s
    summary.batch(entry.engine, entry.epoch, came, passes, batch.sent_s + shift_s)


def encode(line: dict[str, Any]) -> bytes:
    """
    >>> encode({"t": 1.5, "new": []})
    b'{"t":1.5,"new":[]}'
    """
    return msgspec.json.encode(line)
