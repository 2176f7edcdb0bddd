"""Two engines that share this process's machine: one computes prompts, the other continues the answers.

Looks like one EngineLoop to a replay. Each engine runs on a thread of its own, with its own half of the KV memory and
of the CPU threads; blocks go from one to the other through shared memory, and requests with them, as between the
engines of a server. Owns the two threads and what they tell each other; knows no HTTP and no fronts.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from shoal.core.clock import Clock
from shoal.core.events import PassEvents
from shoal.core.request import Reason, Request
from shoal.disagg.handoff import Departures, Receptions
from shoal.engine.loop import EngineLoop
from shoal.sched.scheduler import Scheduler

POLL_S = 0.005  # longest time that an engine does not look for messages


class Side:
    """One of the two, on its thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.loop.scheduler.more_coming = True  # the other engine may always send some

    def turn(self) -> PassEvents | None:
        """Read all messages and compute a pass; None if there was nothing to do."""
        try:
            self.inbox.get(block=self.loop.idle, timeout=POLL_S)()
            while True:
                self.inbox.get(block=False)()
        except Empty:
            pass
        if self.loop.idle and not self.loop.scheduler.news:
            return None
        return self.loop.step(until_s=self.loop.clock.now_s() + POLL_S)


@dataclass
class SplitSchedulers:
    """What a replay asks of a scheduler, for both."""

    first: EngineLoop
    second: EngineLoop
    submit: Callable[[Request, float], None]
    more_coming: bool = False
    limits: Any = field(init=False)
    kv: Any = field(init=False)

    def __post_init__(self) -> None:
        self.limits, self.kv = self.second.scheduler.limits, self.second.scheduler.kv

    @property
    def running(self) -> Sequence[Request]:
        return [*list(self.first.scheduler.running), *list(self.second.scheduler.running)]


class SplitEngines:
    """A prefill engine and a decode engine that reads its outbox at this address."""

    def __init__(
        self, prefill: EngineLoop, decode: EngineLoop, outbox: str, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.clock: Clock = prefill.clock
        self.scheduler = SplitSchedulers(prefill, decode, self._submit)
        self._outbox = outbox
        self._on_close = on_close
        self.parts = (prefill, decode)
        self.watch: Callable[[PassEvents, Scheduler], None] = lambda events, scheduler: None  # on each engine's thread
        self._prefill, self._decode = Side(prefill), Side(decode)
        self._departures, self._receptions = Departures(prefill.scheduler.kv), Receptions(decode.scheduler.kv)
        self._leaving: dict[str, Request] = {}  # on the prefill engine
        self._early: dict[str, Request] = {}  # on the decode engine: blocks of them are under way
        self._open = 0
        self._events: SimpleQueue[PassEvents | BaseException] = SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(side, after), name=f"shoal-{name}", daemon=True)
            for side, after, name in (
                (self._prefill, self._prefilled, "prefill"),
                (self._decode, self._decoded, "decode"),
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the replay -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._open

    def step(self, until_s: float | None = None) -> PassEvents:
        """What happened next on either engine; nothing, if nothing did until then."""
        left_s = None if until_s is None else max(0.0, until_s - self.clock.now_s())
        try:
            found = self._events.get(timeout=left_s)
        except Empty:
            return PassEvents(-1)
        if isinstance(found, BaseException):
            raise found
        self._open -= len(found.finished)
        return found

    def close(self) -> None:
        self._closing = True
        for thread in self._threads:
            thread.join()
        for side in (self._decode, self._prefill):
            side.loop.close()
        self._on_close()

    def _submit(self, request: Request, now_s: float) -> None:
        self._open += 1

        def submit() -> None:
            self._prefill.loop.scheduler.submit_all([request], now_s, leave=True)
            self._departures.begin(request.id, [request])
            self._leaving[request.id] = request

        self._prefill.inbox.put(submit)

    # ---- on the engines' threads ----------------------------------------------------------------------------------

    def _run(self, side: Side, after: Callable[[PassEvents], None]) -> None:
        try:
            while not self._closing:
                events = side.turn()
                if events is not None:
                    self.watch(events, side.loop.scheduler)
                    after(events)
                    events.busy_s /= 2  # of half the machine
                    self._events.put(events)
        except BaseException as error:
            self._events.put(error)

    def _prefilled(self, events: PassEvents) -> None:
        for one in self._departures.step():
            self._decode.inbox.put(partial(self._announce, str(one.job), one.names, one.slots))
        handed = [end.id for end in events.finished if end.reason is Reason.HANDED]
        events.finished = [end for end in events.finished if end.reason is not Reason.HANDED]
        for end in events.finished:
            self._leaving.pop(end.id, None)
        for id in handed:
            self._decode.inbox.put(partial(self._arrive, resumed(self._leaving.pop(id))))

    def _announce(self, id: str, names: Sequence[bytes], slots: Sequence[int]) -> None:
        spare = len(self._decode.loop.scheduler.running) + 1
        self._receptions.announce(id, names, slots, self._outbox, spare)

    def _arrive(self, request: Request) -> None:
        self._early[request.id] = request
        self._start_ready()

    def _start_ready(self) -> None:
        for id in [id for id in self._early if not self._receptions.waits(id)]:
            self._decode.loop.submit_all([self._early.pop(id)], resumed=True)

    def _decoded(self, events: PassEvents) -> None:
        for admitted in events.admitted:
            self._receptions.forget(admitted.id)
            self._prefill.inbox.put(partial(self._departures.release, admitted.id))
        self._start_ready()


def resumed(request: Request) -> Request:
    """The same request, to go on elsewhere."""
    return Request(
        request.id,
        request.tokens[: request.prompt_len],
        request.params,
        seed=request.seed,
        sample=request.sample,
        stop_ids=request.stop_ids,
        tenant=request.tenant,
        salt=request.salt,
        ends_after=request.ends_after,
        output=request.output_tokens,
        priority=request.priority,
        tier=request.tier,
    )
