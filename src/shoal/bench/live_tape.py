"""What the engines of a run do, kept for a recording: what a server keeps for its live page, of any driver.

Owns one feed of passes for each engine (engine/pass_feed.py, packed as it would be sent), and now and then its queue
and block map; turns them into the lines of obs/live.py when the run has ended, so that a run which is measured pays for
little more than a served one. Bounded in passes and maps. Knows no page and no files. Times are those of the engines.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import msgspec

from shoal.bench.record import Promise
from shoal.core.events import PassEvents
from shoal.core.live import LiveBatch, LivePass, LiveRequest
from shoal.core.work import NO_WORK, DeviceRates, ModelWork
from shoal.engine.block_map import live_view
from shoal.engine.pass_feed import FEED_S, PassFeed
from shoal.obs.live import LiveSummary
from shoal.obs.utilisation import Utilisation
from shoal.sched.scheduler import Scheduler

MOST_PASSES = 20_000  # of a run; what a browser replays with ease
MOST_VIEWS = 240  # queues and block maps of an engine; of longer runs, fewer in a second
LINE_S = 0.1  # between two lines
TAPE = b"tape"

_decoder = msgspec.msgpack.Decoder(list[LivePass])


class NoTape:
    """Keeps nothing."""

    def arrived(self, id: str, at_s: float) -> None:
        """A request arrived, perhaps at a front, and before an engine knows it."""

    def follow(self, scheduler: Scheduler) -> None: ...

    def take(self, events: PassEvents, scheduler: Scheduler) -> None: ...

    def lines(self, began_s: float) -> list[str]:
        return []


@dataclass
class EngineTape:
    """Of one engine."""

    feed: PassFeed
    arrived_s: dict[str, float]  # of all engines
    every_s: float = 0.0  # between two views
    due_s: float = -math.inf
    sent_s: float = -math.inf
    last_s: float = -math.inf  # of the last record
    batches: list[tuple[float, LiveBatch]] = field(default_factory=list)
    views: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def take(self, events: PassEvents, promise: Promise, among: bool) -> None:
        """A record. What came before it is sent first, if that is due, with the time of its own last record: engines
        are put in order by it, and this one may have been idle. `among` others, each record is sent alone, so that a
        request which moves is known to the first engine before the second."""
        if (among or events.committed_s >= self.sent_s + FEED_S) and self.send():
            self.look(promise)
        self.feed.take(events)
        self.last_s = max(self.last_s, events.committed_s)

    def send(self) -> bool:
        found = [(self.last_s, batch) for batch in self.feed.flush(self.last_s).values()]
        self.batches += found
        self.sent_s = self.last_s
        return bool(found)

    def look(self, promise: Promise) -> None:
        """Keep a view, if one is due; when there are too many, every other one is dropped."""
        now_s = self.last_s
        if now_s < self.due_s:
            return
        answer = live_view(self.feed.scheduler, now_s)
        answer["queue"] = [
            [id, why, self._slack_s(id, now_s, promise) if slack_s is None else slack_s]
            for id, why, slack_s in answer["queue"]
        ]
        self.views.append((now_s, answer))
        if len(self.views) > MOST_VIEWS:
            self.views, self.every_s = self.views[::2], 2 * self.every_s
        self.every_s = max(self.every_s, float(answer["every_s"]))
        self.due_s = now_s + self.every_s

    def _slack_s(self, id: str, now_s: float, promise: Promise) -> float | None:
        """By the run's promise, for a request that no tier promises anything."""
        request = self.feed.scheduler.requests.get(id)
        if request is None or request.outputs:
            return None
        return round(self.arrived_s.get(id, request.arrived_s) + promise.ttft_s - now_s, 3)


class LiveTape(NoTape):
    """Keeps the engines that it follows; they are numbered in that order.

    Engines on threads of their own may call `take` at the same time.
    """

    def __init__(self, promise: Promise, work: ModelWork = NO_WORK, rates: DeviceRates | None = None) -> None:
        self.promise = promise
        self._use = Utilisation(work)
        if rates is not None and work != NO_WORK:
            self._use.learn(rates)
        self._engines: dict[int, EngineTape] = {}  # by the identity of the scheduler
        self._arrived_s: dict[str, float] = {}
        self._left = MOST_PASSES

    def arrived(self, id: str, at_s: float) -> None:
        self._arrived_s[id] = at_s

    def follow(self, scheduler: Scheduler) -> None:
        feed = PassFeed(scheduler)
        feed.shares = self._use.of_pass
        feed.follow(TAPE)
        self._engines[id(scheduler)] = EngineTape(feed, self._arrived_s)

    def take(self, events: PassEvents, scheduler: Scheduler) -> None:
        """A record, just committed."""
        engine = self._engines.get(id(scheduler))
        if engine is None or self._left <= 0:
            return
        self._left -= bool(events.scheduled_ids)
        engine.take(events, self.promise, among=len(self._engines) > 1)

    def lines(self, began_s: float) -> list[str]:
        """The recording, once the run has ended: lines of JSON, seconds counted from `began_s`."""
        return [json.dumps(one, separators=(",", ":"), allow_nan=False) for one in self._lines(began_s)]

    def _lines(self, began_s: float) -> Iterator[dict[str, Any]]:
        summary, last_s, due_s = LiveSummary(began_s), began_s, began_s + LINE_S
        for number in range(len(self._engines)):
            summary.up(number, 0, began_s)
        for at_s, number, what in self._in_order():
            if summary.news and due_s <= last_s < at_s:
                yield summary.line(last_s)
                due_s = last_s + LINE_S
            last_s = max(last_s, at_s)
            if isinstance(what, LiveBatch):
                came = [self._completed(one) for one in what.came]
                summary.batch(number, 0, came, _decoder.decode(what.packed), what.sent_s)
            else:
                summary.view(number, what)
        yield summary.line(last_s)

    def _in_order(self) -> list[tuple[float, int, LiveBatch | dict[str, Any]]]:
        """Of all engines; a view after the batch that it was taken with."""
        found: list[tuple[float, int, LiveBatch | dict[str, Any]]] = []
        for number, engine in enumerate(self._engines.values()):
            engine.send()  # what is left
            found += [(at_s, number, batch) for at_s, batch in engine.batches]
            found += [(at_s, number, view) for at_s, view in engine.views]
        return sorted(found, key=itemgetter(0))

    def _completed(self, one: LiveRequest) -> LiveRequest:
        """With what the engine does not know."""
        one = replace(one, at_s=self._arrived_s.get(one.id, one.at_s))
        if one.ttft_s is not None or one.itl_s is not None:
            return one
        return replace(one, ttft_s=self.promise.ttft_s, itl_s=self.promise.gap_s)
