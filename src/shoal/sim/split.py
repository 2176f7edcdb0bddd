"""Disaggregated prefill on virtual time: prefill engines, decode engines, and the handoff between them.

What fronts and engines know of a handoff are the server's own objects (FrontHandoffs, Departures, Receptions), which
know no sockets and no clock. Owns the messages between them, each of which takes a hop, and the requests that wait for
their blocks. Copies of blocks take their time in the executors: out to the outbox, and in from there, not before they
are written.

    arrival ─► prefill engine ── first token, blocks ─► front ── Arriving, the request ─► decode engine ─► tokens
                    └──► outbox ◄────────────────────────────────────── copies ──┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shoal.core.events import PassEvents
from shoal.core.request import Reason, Request
from shoal.disagg.handoff import DECODE, PREFILL, Departures, Receptions
from shoal.engine import wire
from shoal.engine.front_handoffs import FrontHandoffs
from shoal.engine.loop import EngineLoop
from shoal.routing.work import Work
from shoal.sim.cost import SimulatedExecutor
from shoal.sim.front import SimulatedFronts
from shoal.sim.request import NAME_BYTES, SimulatedRequest
from shoal.sim.virtual import ArrivalSource, MakeRequest, RunObserver, VirtualEngine, VirtualServer


@dataclass
class OutboxAddress:
    outbox: str


class MessageLink:
    """The front's way to one engine."""

    def __init__(self, server: "SplitServer", number: int, outbox: str) -> None:
        self.info = OutboxAddress(outbox)
        self._server = server
        self._number = number

    def send(self, message: wire.Message) -> bool:
        self._server.send(self._number, message)
        return True


class SplitServer(VirtualServer):
    """Prefill engines and decode engines behind fronts."""

    def __init__(
        self,
        prefill: Sequence[EngineLoop],
        decode: Sequence[EngineLoop],
        observer: RunObserver,
        make_request: MakeRequest,
        fronts: SimulatedFronts | None = None,
        routing: str = "prefix",
    ) -> None:
        roles = [PREFILL] * len(prefill) + [DECODE] * len(decode)
        super().__init__([*prefill, *decode], observer, make_request, fronts, routing, roles)
        assert self.router is not None, "there are at least two engines"
        addresses = [str(number) if role == PREFILL else "" for number, role in enumerate(roles)]
        links = {number: MessageLink(self, number, address) for number, address in enumerate(addresses)}
        self.handoffs = FrontHandoffs(links, self.router)
        self._links = links
        self._departures = [Departures(engine.loop.scheduler.kv) for engine in self.engines]
        self._receptions = [Receptions(engine.loop.scheduler.kv) for engine in self.engines]
        self._early: list[dict[int, SimulatedRequest]] = [{} for _ in self.engines]  # whose blocks are under way
        self._blocks: dict[tuple[int, int], list[wire.OutboxBlocks]] = {}  # (engine, pass) → what went to its outbox
        self._open: dict[int, SimulatedRequest] = {}  # as it was submitted last
        self._leaves: dict[int, bool] = {}  # … and whether it leaves that engine after one token
        self._tokenless: set[int] = set()  # placed on an engine, from which no token has come
        self._now_s = 0.0  # of the message that a front deals with
        executors = {str(number): loop.executor for number, loop in enumerate(prefill)}
        for loop in decode:
            assert isinstance(loop.executor, SimulatedExecutor)
            loop.executor.peers = {
                address: one for address, one in executors.items() if isinstance(one, SimulatedExecutor)
            }

    def check(self) -> None:
        """Nothing is kept for requests that have ended."""
        assert not len(self.handoffs.table), "a handoff is left"
        assert not any(one.jobs for one in self._departures), "blocks are kept for no request"
        assert not any(one.jobs for one in self._receptions), "blocks are kept for no request"
        for engine in self.engines:
            engine.loop.scheduler.check()

    # ---- the front ------------------------------------------------------------------------------------------------

    def _work(self, request: Request) -> Work:
        assert self.router is not None
        full = (len(request.tokens) - 1) // self.router.block_size()
        most = (request.params.max_tokens or 1) - request.outputs
        return Work(len(request.tokens), most, 1, request.names[:full] if self.router.policy.uses_names else ())

    def _place(self, number: int, request: Request) -> int:
        assert isinstance(request, SimulatedRequest)
        engine = self.handoffs.place(number, self._work(request), None)
        assert engine is not None, "no engine is up"
        self._leaves[number] = self.handoffs.going(number, engine, [0])
        self._open[number] = request
        self._tokenless.add(number)
        return engine

    def send(self, engine: int, message: wire.Message) -> None:
        """To an engine, one hop after what the front deals with."""
        at_s = self._now_s + self.fronts.times.hop_s
        if isinstance(message, wire.Arriving):
            self.to_engine(engine, at_s, lambda now_s: self._announce(engine, message))
        elif isinstance(message, wire.Abort):
            self.to_engine(engine, at_s, lambda now_s: self._release(engine, message.numbers))

    def _deliver(self, number: int, events: PassEvents, at_s: float, arrivals: ArrivalSource) -> None:
        self._now_s = at_s
        blocks = self._blocks.pop((number, events.step), [])
        handed = [end for end in events.finished if end.reason is Reason.HANDED]
        events.finished = [end for end in events.finished if end.reason is not Reason.HANDED]
        super()._deliver(number, events, at_s, arrivals)
        for one in blocks:
            if one.number in self._open:
                self.handoffs.blocks(self._links[number], one, self._work(self._open[one.number]))
        for end in handed:
            self._hand_over(int(end.id))
        for end in events.finished:
            job = int(end.id)
            self.handoffs.handed(job, 0)
            self.handoffs.end(job)
            self._open.pop(job, None)

    def _note_tokens(self, events: PassEvents) -> None:
        assert self.router is not None
        for job in self._tokenless.intersection(map(int, events.owners)):
            self._tokenless.discard(job)
            self.router.began(job)
            self.handoffs.token(job)

    def _lost(self, number: int, at_s: float) -> None:
        self._now_s = at_s
        super()._lost(number, at_s)
        self.handoffs.end(number)
        self._open.pop(number, None)

    def _hand_over(self, job: int) -> None:
        assert self.router is not None
        if not self.handoffs.handed(job, 0):
            return
        self.router.ended(job)
        request = self._open[job].continued(self._now_s - self._open[job].arrived_s)
        engine = self._place(job, request)
        at_s = self._now_s + self.fronts.times.hop_s
        self.to_engine(engine, at_s, partial(self._submit, self.engines[engine], job, request))

    # ---- the engines ----------------------------------------------------------------------------------------------

    def _more_coming(self) -> bool:
        return bool(self._open)

    def _enter(self, engine: VirtualEngine, number: int, request: Request, at_s: float) -> None:
        place = self.engines.index(engine)
        assert isinstance(request, SimulatedRequest)
        if self._receptions[place].waits(number):
            self._early[place][number] = request
            return
        leave = self._leaves[number]
        engine.loop.scheduler.submit_all([request], at_s, resumed=request.outputs > 0, leave=leave)
        if leave:
            self._departures[place].begin(number, [request])

    def _announce(self, engine: int, message: wire.Arriving) -> None:
        scheduler = self.engines[engine].loop.scheduler
        names = [message.names[at : at + NAME_BYTES] for at in range(0, len(message.names), NAME_BYTES)]
        spare = len(scheduler.running) + scheduler.kv.pool.total // 100
        self._receptions[engine].announce(message.number, names, message.slots, message.peer, spare)

    def _release(self, engine: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._departures[engine].release(number)
            self._receptions[engine].forget(number)

    def _passed(self, number: int, events: PassEvents) -> None:
        """Blocks go to the outbox, and requests whose blocks have come start."""
        for start in events.admitted:
            self._receptions[number].forget(int(start.id))
        found = [
            wire.OutboxBlocks(int(str(one.job)), b"".join(one.names), list(one.slots))
            for one in self._departures[number].step()
        ]
        if found:
            self._blocks[number, events.step] = found
            self._send(events.committed_s, number, events)
        else:
            super()._passed(number, events)
        early, engine = self._early[number], self.engines[number]
        for job in [job for job in early if not self._receptions[number].waits(job)]:
            self._submit(engine, job, early.pop(job), engine.loop.clock.now_s())
