"""Engines on virtual time: the real loops, schedulers, router and reports, driven through a trace.

Every engine is an EngineLoop with a clock of its own. The driver does what is due first: an arrival, news of an engine
for the fronts (tokens, reports), or the next step of the engine whose clock is furthest behind. A step may end after
later arrivals; its news wait until their time, so that no request is placed by what is not known yet.

    arrival ─► front (SimulatedFronts) ─► router ─► inbox of an engine ─► loop.step() ─► tokens ─► front ─► observer
                                           ▲                                   │
                                           └────────────── reports ◄───────────┘

Owns the order of events. Knows no policies and no costs; what it observes is handed to a RunObserver.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from shoal.core.clock import VirtualClock
from shoal.core.events import PassEvents
from shoal.core.report import EngineReport
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.engine.reporter import REPORT_S, Reporter
from shoal.errors import BadConfig, ShoalError
from shoal.routing.router import Router
from shoal.routing.work import Work
from shoal.sched.scheduler import Scheduler
from shoal.sim.cost import Coin, SimulatedExecutor, Times
from shoal.sim.front import FrontTimes, SimulatedFronts
from shoal.workload.traces import TraceRequest

FRONT = b"front"
MakeRequest = Callable[[int, TraceRequest], Request]


class RunObserver(Protocol):
    """Is told what happens; a request is known by its number in the trace."""

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None: ...

    def refused(self, number: int, kind: str) -> None:
        """It was refused when it was submitted."""

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        """A pass was committed, just now."""

    def delivered(self, events: PassEvents, at_s: float) -> None:
        """What it reports about requests has reached their clients."""


def virtual_loop(
    scheduler: Scheduler, times: Times, depth: int, check: bool = False, coin: Coin | None = None
) -> EngineLoop:
    """An engine that computes nothing, on a clock of its own.

    >>> from shoal.config.engine import EngineConfig
    >>> from shoal.sched.admission import Limits
    >>> from shoal.sched.make import make_scheduler
    >>> from shoal.sim.cost import CostModel, DeviceTimes
    >>> scheduler = make_scheduler(EngineConfig(), Limits(1000, 8, 512, 100), blocks=100)
    >>> virtual_loop(scheduler, CostModel(DeviceTimes(((1, 0.01),), ((1, 0.01),))), depth=2).clock.now_s()
    0.0
    """
    clock = VirtualClock()
    executor = SimulatedExecutor(times, clock, scheduler.limits.rows, coin)
    return EngineLoop(scheduler, executor, clock, depth, check)


Deliver = Callable[[float], None]  # what a message does to its engine; takes the time


@dataclass
class VirtualEngine:
    """One engine, and what is on its way to it."""

    loop: EngineLoop
    inbox: list[tuple[float, int, Deliver]] = field(default_factory=list)  # a heap: (when it is there, order, what)
    reporter: Reporter | None = None  # None: no router needs reports
    submissions: int = 0

    def next_s(self) -> float | None:
        """When it can go on; None: it has nothing to do."""
        if not self.loop.idle:
            return self.loop.clock.now_s()
        return max(self.loop.clock.now_s(), self.inbox[0][0]) if self.inbox else None


class ArrivalSource(Protocol):
    """When requests arrive."""

    def next_s(self) -> float | None:
        """When the next one does; None: that is not known, or there is none."""

    def take(self) -> TraceRequest: ...

    def ended(self, at_s: float) -> None:
        """A request has ended."""

    @property
    def left(self) -> bool:
        """Requests are still to arrive, whenever that is."""


class OpenArrivals:
    """At the trace's times, however slow the engines are."""

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self._trace: Iterator[TraceRequest] = iter(trace)
        self._next = next(self._trace, None)

    def next_s(self) -> float | None:
        return None if self._next is None else self._next.at_s

    def take(self) -> TraceRequest:
        one = self._next
        assert one is not None, "asked for a request after the last one"
        self._next = next(self._trace, None)
        if self._next is not None and self._next.at_s < one.at_s:
            raise BadConfig(f"a request arrives at {self._next.at_s} s, after one at {one.at_s} s; sort the trace")
        return one

    def ended(self, at_s: float) -> None:
        pass

    @property
    def left(self) -> bool:
        return self._next is not None


class ClosedArrivals(OpenArrivals):
    """So many users, each with one request at a time; the trace's times are not used."""

    def __init__(self, trace: Iterable[TraceRequest], users: int) -> None:
        super().__init__(trace)
        self._ready = [0.0] * users  # a heap: when each idle user sends the next request

    def next_s(self) -> float | None:
        return self._ready[0] if self._ready and self._next is not None else None

    def take(self) -> TraceRequest:
        heapq.heappop(self._ready)
        one = self._next
        assert one is not None, "asked for a request after the last one"
        self._next = next(self._trace, None)
        return one

    def ended(self, at_s: float) -> None:
        heapq.heappush(self._ready, at_s)


Message = PassEvents | EngineReport | None  # None: a report of an idle engine is due


class VirtualServer:
    """One or several engines behind fronts, and a router where there are several."""

    def __init__(
        self,
        loops: Sequence[EngineLoop],
        observer: RunObserver,
        make_request: MakeRequest,
        fronts: SimulatedFronts | None = None,
        routing: str = "prefix",
        roles: Sequence[str] = (),
    ) -> None:
        self.engines = [VirtualEngine(loop) for loop in loops]
        self.observer = observer
        self.router: Router | None = None
        self.fronts = fronts or SimulatedFronts(FrontTimes())
        self.now_s = 0.0
        self._make_request = make_request
        self._numbers = count()
        self._news: list[tuple[float, int, int, Message]] = []  # a heap: (when, in which order, engine, what)
        self._order = count()  # of news and messages
        self._refused_s: list[float] = []  # when requests were refused, of which the arrivals do not know yet
        if len(loops) > 1:
            self.router = Router(routing)
            for number, engine in enumerate(self.engines):
                scheduler = engine.loop.scheduler
                self.router.joined(number, scheduler.kv.block_size, roles[number] if roles else "")
                engine.reporter = Reporter(scheduler)
                engine.reporter.watch(FRONT)

    def run(self, arrivals: ArrivalSource) -> float:
        """To the end of all requests; returns when that is."""
        never = float("inf")
        while True:
            engine_s, number = never, -1
            for index, one in enumerate(self.engines):
                at_s = one.next_s()
                if at_s is not None and at_s < engine_s:
                    engine_s, number = at_s, index
            arrival_s = arrivals.next_s()
            earliest_s = engine_s if arrival_s is None else min(engine_s, arrival_s)
            if self._news and self._news[0][0] <= earliest_s:
                self._tell(arrivals)
            elif arrival_s is not None and arrival_s <= engine_s:
                self._arrive(arrivals.take(), arrival_s)
            elif number >= 0:
                self._step(number, engine_s, arrivals)
            else:
                return self.now_s

    def _arrive(self, one: TraceRequest, at_s: float) -> None:
        number = next(self._numbers)
        self.observer.arrived(number, one, at_s)
        request = self._make_request(number, one)
        there_s = self.fronts.submitted_s(at_s, one.prompt)
        engine = self._place(number, request)
        self.to_engine(engine, there_s, lambda now_s: self._submit(self.engines[engine], number, request, now_s))

    def to_engine(self, engine: int, at_s: float, what: Deliver) -> None:
        """A message to an engine, which is there at this time."""
        heapq.heappush(self.engines[engine].inbox, (at_s, next(self._order), what))

    def _place(self, number: int, request: Request) -> int:
        if self.router is None:
            return 0
        full = (len(request.tokens) - 1) // self.router.block_size()
        names = request.names[:full] if self.router.policy.uses_names else ()
        chosen = self.router.place(number, Work(len(request.tokens), request.params.max_tokens, 1, names))
        assert chosen is not None, "no engine is up"
        return chosen

    def _step(self, number: int, at_s: float, arrivals: ArrivalSource) -> None:
        """Let an engine take what has arrived, and compute a pass or wait until it can."""
        engine = self.engines[number]
        loop, inbox = engine.loop, engine.inbox
        loop.clock.wait_until(at_s)
        while inbox and inbox[0][0] <= at_s:
            heapq.heappop(inbox)[2](at_s)
        while self._refused_s:
            arrivals.ended(self._refused_s.pop())
        loop.scheduler.more_coming = bool(inbox) or arrivals.left or self._more_coming()
        news_s = self._news[0][0] if self._news else None
        known = [one for one in (inbox[0][0] if inbox else None, arrivals.next_s(), news_s) if one is not None]
        events = loop.step(min(known, default=None))
        self.observer.passed(events, loop.scheduler)
        self._passed(number, events)
        if engine.reporter is not None:
            engine.reporter.note(events)
            self._report(engine, engine.reporter, number, loop.clock.now_s())

    def _more_coming(self) -> bool:
        """Whether other engines may send requests."""
        return False

    def _passed(self, number: int, events: PassEvents) -> None:
        """An engine has committed a pass: its front will be told."""
        if events.owners or events.finished or events.rejected:
            self._send(events.committed_s, number, events)

    def _submit(self, engine: VirtualEngine, number: int, request: Request, at_s: float) -> None:
        engine.submissions += 1
        if engine.reporter is not None:
            engine.reporter.note_submission()
        try:
            self._enter(engine, number, request, at_s)
        except ShoalError as error:
            self.observer.refused(number, type(error).__name__)
            self._refused_s.append(at_s)
            self._lost(number, at_s)

    def _lost(self, number: int, at_s: float) -> None:
        """It was refused, and is on no engine."""
        if self.router is not None:
            self.router.ended(number)

    def _enter(self, engine: VirtualEngine, number: int, request: Request, at_s: float) -> None:
        engine.loop.scheduler.submit(request, at_s)

    def _report(self, engine: VirtualEngine, reporter: Reporter, number: int, now_s: float) -> None:
        """Send what there is to report, at most every REPORT_S; an idle engine does so as soon as that has passed."""
        for report in reporter.reports({FRONT: engine.submissions}, now_s).values():
            self._send(now_s, number, report)
        if engine.loop.idle and reporter.pending:
            self._send(now_s + REPORT_S, number, None)

    def _send(self, at_s: float, engine: int, what: Message) -> None:
        heapq.heappush(self._news, (at_s, next(self._order), engine, what))

    def _tell(self, arrivals: ArrivalSource) -> None:
        """Take the earliest news."""
        at_s, _, number, what = heapq.heappop(self._news)
        engine = self.engines[number]
        if isinstance(what, PassEvents):
            self._deliver(number, what, at_s, arrivals)
        elif isinstance(what, EngineReport):
            assert self.router is not None
            self.router.report(number, what)
        elif engine.reporter is not None and engine.loop.idle and engine.reporter.pending:
            self._report(engine, engine.reporter, number, max(at_s, engine.loop.clock.now_s()))

    def _deliver(self, number: int, events: PassEvents, at_s: float, arrivals: ArrivalSource) -> None:
        there_s = self.fronts.delivered_s(at_s, len(events.owners))
        self.now_s = max(self.now_s, there_s)
        self.observer.delivered(events, there_s)
        if self.router is not None:
            self._note_tokens(events)
            for end in events.finished:
                self.router.ended(int(end.id))
        for _ in events.finished:
            arrivals.ended(there_s)

    def _note_tokens(self, events: PassEvents) -> None:
        """Tell the router of first tokens."""
        if self.router is not None:
            for id, index in zip(events.owners, events.indexes, strict=True):
                if not index:
                    self.router.began(int(id))
