"""The host: an engine in a process of its own, between its socket and its loop.

Reads what fronts say between two passes, turns the loop, and tells each front once per pass what happened to its jobs.
Owns who asked for what; a front that falls silent is forgotten and its requests are aborted. Knows no HTTP and no text:
grammars come from a maker it is handed.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import zmq

from shoal.core.clock import WallClock
from shoal.core.events import PassEvents
from shoal.core.grammar import Grammar
from shoal.core.job import EngineInfo, GrammarSpec, Job
from shoal.core.request import Group, Reason, Request
from shoal.engine import view, wire
from shoal.engine.loop import EngineLoop
from shoal.errors import BadGrammar, EngineError, Rejected, RequestFailed, ShoalError

log = logging.getLogger(__name__)

SILENCE_S = 10.0  # a front that says nothing for so long is dead
IDLE_S = 1.0  # longest sleep with nothing to do

Inbox: TypeAlias = "zmq.Socket[bytes]"
MakeGrammar: TypeAlias = Callable[[GrammarSpec, Sequence[int]], Grammar]


class Metrics(Protocol):
    """A reader of events that can say what it read."""

    def take(self, events: PassEvents) -> None: ...

    def render(self) -> bytes: ...


class InboxClock(WallClock):
    """Wall time; waiting ends early when a front says something."""

    def __init__(self, socket: Inbox) -> None:
        self._socket = socket

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - self.now_s()
        if left_s > 0:
            self._socket.poll(round(left_s * 1000) + 1)


class Suspected:
    """Who was in the last pass of an engine that died of a fault.

    The first time they are one group. If they were being tried when it happened again they are two halves; and one that
    was tried alone did it.
    """

    def __init__(self, ids: Sequence[str], tried: bool) -> None:
        half = len(ids) // 2 if tried else len(ids)
        self.guilty = ids[0] if tried and len(ids) == 1 else None
        self.first, self.second = frozenset(ids[:half]), frozenset(ids[half:])


@dataclass
class FrontState:
    """What the host remembers of one front."""

    heard_s: float
    jobs: dict[int, list[str]] = field(default_factory=dict)  # job number → ids of its requests that have not ended
    unreachable: bool = False  # the last message could not be sent; said once


class Outbox:
    """What one front will be told next."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.tokens: list[int] = []
        self.indexes: list[int] = []
        self.logprobs: list[tuple[int, wire.PackedLogprobs]] = []
        self.prompt_logprobs: list[tuple[int, int, list[wire.PackedLogprobs]]] = []
        self.ended: list[tuple[int, str, int | None, int, int, float, str]] = []
        self.refused: list[tuple[int, str, str, float | None]] = []

    def packed(self, epoch: int) -> bytes:
        return wire.pack(
            wire.Pass(
                epoch,
                self.keys,
                self.tokens,
                self.indexes,
                self.logprobs,
                self.prompt_logprobs,
                self.ended,
                self.refused,
            )
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose request it is."""

    front: bytes
    key: int


@dataclass(frozen=True)
class Compiling:
    """A job whose grammar is being made, off the loop."""

    front: bytes
    said: wire.Submit
    job: Job
    grammars: "Future[dict[int, Grammar]]"


class Host:
    """Serves fronts from one loop until told to stop."""

    def __init__(
        self,
        loop: EngineLoop,
        socket: Inbox,
        info: EngineInfo,
        metrics: Metrics,
        make_grammar: MakeGrammar | None = None,
        suspects: Suspected | None = None,
    ) -> None:
        self.loop = loop
        self.socket = socket
        self.info = info
        self.metrics = metrics
        self.make_grammar = make_grammar
        self.beat: Callable[[], None] = lambda: None  # tells the supervisor that the loop turns
        self._suspects = suspects or Suspected((), False)
        self.stopping = False
        self.fronts: dict[bytes, FrontState] = {}
        self.owners: dict[str, Owner] = {}  # by request id
        self.queue_s: dict[str, float] = {}  # how long it waited, until it ends
        self._out: dict[bytes, Outbox] = {}
        self._compiling: deque[Compiling] = deque()
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-grammar")
        loop.scheduler.more_coming = True  # fronts may always say more
        self._readers: dict[type[wire.Message], Callable[[bytes, Any], None]] = {
            wire.Hello: self._hello,
            wire.Ping: lambda front, said: None,
            wire.Submit: self._submit,
            wire.Abort: lambda front, said: self._abort(front, said.number),
            wire.FinishAt: self._finish_at,
            wire.Ask: self._ask,
        }

    def run(self) -> None:
        """Until stop() is called, from a signal for instance."""
        try:
            while not self.stopping:
                self.turn()
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        self.stopping = True

    def turn(self) -> None:
        """Hear everybody, compute a pass (or wait a little), tell everybody."""
        self.beat()
        self._read()
        self._take_compiled()
        self._send()
        now_s = self.loop.clock.now_s()
        wait_s = 0.01 if self._compiling else IDLE_S
        events = self.loop.step(until_s=now_s + wait_s)
        self.metrics.take(events)
        self._sort(events)
        self._send()

    # ---- what fronts say ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            try:
                front, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                continue  # not two parts: not one of ours
            try:
                said = wire.read_front(data)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                log.warning("a message that nobody understands was dropped")
                continue
            now_s = self.loop.clock.now_s()
            state = self.fronts.get(front)
            if state is None:
                self.fronts[front] = FrontState(now_s)
                said = wire.Hello()  # it was forgotten and does not know: let it hand over all it has
            else:
                state.heard_s = now_s
            self._readers[type(said)](front, said)
        self._forget_silent()

    def _forget_silent(self) -> None:
        now_s = self.loop.clock.now_s()
        for front, state in list(self.fronts.items()):
            if now_s - state.heard_s > SILENCE_S:
                log.warning("front %s is silent; its %d jobs are aborted", named(front), len(state.jobs))
                self._forget(front)

    def _forget(self, front: bytes) -> None:
        """It is gone: nobody waits for its jobs."""
        for number in list(self.fronts[front].jobs):
            self._abort(front, number)
        del self.fronts[front]
        self._out.pop(front, None)

    def _hello(self, front: bytes, said: wire.Hello) -> None:
        """A front that says hello has no jobs here: it is new, or believes this engine is."""
        for number in list(self.fronts[front].jobs):
            self._abort(front, number)
        name, dot, _ = front.rpartition(b".")
        for other in [one for one in self.fronts if dot and one != front and one.rpartition(b".")[0] == name]:
            self._forget(other)  # it lives again under the next number, so the one before is dead
        self._tell(front, wire.Ready(*astuple(self.info)))

    def _submit(self, front: bytes, said: wire.Submit) -> None:
        try:
            job = wire.unpack_job(said)
        except ShoalError as error:
            self._refuse(front, said.number, error)
            return
        if job.grammar is None:
            self._start(front, said, job, {})
            return
        if self.make_grammar is None:
            self._refuse(front, said.number, BadGrammar("this model has no tokenizer, so it cannot follow a grammar"))
            return
        self.fronts[front].jobs[said.number] = []
        self._compiling.append(
            Compiling(front, said, job, self._compiler.submit(self._grammars, job.grammar, self._samples(said, job)))
        )

    def _samples(self, said: wire.Submit, job: Job) -> dict[int, list[int]]:
        """sample → what it has said so far."""
        return said.said if said.said is not None else {sample: [] for sample in range(job.params.n)}

    def _grammars(self, spec: GrammarSpec, samples: dict[int, list[int]]) -> dict[int, Grammar]:
        assert self.make_grammar is not None
        return {sample: self.make_grammar(spec, output) for sample, output in samples.items()}

    def _take_compiled(self) -> None:
        """Start the jobs whose grammars are ready."""
        while self._compiling and self._compiling[0].grammars.done():
            one = self._compiling.popleft()
            state = self.fronts.get(one.front)
            if state is None or one.said.number not in state.jobs:
                continue  # aborted meanwhile
            try:
                made = one.grammars.result()
            except ShoalError as error:
                del state.jobs[one.said.number]
                self._refuse(one.front, one.said.number, error)
                continue
            except Exception:
                log.exception("a grammar could not be made")
                del state.jobs[one.said.number]
                self._refuse(one.front, one.said.number, EngineError("the grammar could not be compiled"))
                continue
            self._start(one.front, one.said, one.job, made)

    def _start(self, front: bytes, said: wire.Submit, job: Job, grammars: dict[int, Grammar]) -> None:
        samples = self._samples(said, job)
        group = Group(job.id) if len(samples) > 1 else None
        requests = [
            Request(
                f"{job.id}.{sample}",
                job.prompt,
                job.params,
                seed=job.seed,
                sample=sample,
                stop_ids=job.stop_ids,
                group=group,
                tenant=job.tenant,
                salt=job.salt,
                output=output,
                priority=job.priority,
                tier=job.tier,
                timeout_s=job.timeout_s,
                grammar=grammars.get(sample),
            )
            for sample, output in samples.items()
        ]
        state = self.fronts[front]
        guilty = [request.id for request in requests if request.id == self._suspects.guilty]
        if guilty and said.said is not None:
            state.jobs.pop(said.number, None)
            self._refuse(front, said.number, RequestFailed("the engine died each time it computed this request"))
            return
        try:
            self.loop.submit_all(requests, resumed=said.said is not None)
        except ShoalError as error:
            state.jobs.pop(said.number, None)
            self._refuse(front, said.number, error)
            return
        self._watch(requests)
        state.jobs[said.number] = [request.id for request in requests]
        for request in requests:
            self.owners[request.id] = Owner(front, said.number * wire.SAMPLES + request.sample)

    def _watch(self, requests: Sequence[Request]) -> None:
        """Those who were in the last pass of an engine that died of a fault run apart from the others at first."""
        for request in requests:
            for which, part in enumerate((self._suspects.first, self._suspects.second)):
                if request.id in part:
                    self.loop.scheduler.suspects.add(request, which)

    def _refuse(self, front: bytes, number: int, error: ShoalError) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, Rejected) else None
        box = self._box(front)
        box.refused.append((number * wire.SAMPLES, type(error).__name__, str(error), retry_after_s))

    def _abort(self, front: bytes, number: int) -> None:
        for request_id in self.fronts[front].jobs.pop(number, ()):
            self.owners.pop(request_id, None)
            self.queue_s.pop(request_id, None)
            self.loop.abort(request_id)

    def _finish_at(self, front: bytes, said: wire.FinishAt) -> None:
        number, sample = divmod(said.key, wire.SAMPLES)
        for request_id in self.fronts[front].jobs.get(number, ()):
            if self.owners[request_id].key % wire.SAMPLES == sample:
                self.loop.finish_at(request_id, said.outputs)
                return

    def _ask(self, front: bytes, said: wire.Ask) -> None:
        text = self.metrics.render() if said.what == "metrics" else json.dumps(self.state()).encode()
        self._tell(front, wire.Answer(said.number, said.what, text))

    def state(self) -> dict[str, Any]:
        """What is in the tables, for people and tests."""
        scheduler = self.loop.scheduler
        pool = scheduler.kv.pool
        return {
            "epoch": self.info.epoch,
            "places": scheduler.limits.max_num_seqs,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "compiling": len(self._compiling),
            "in_flight": self.loop.scheduler.in_flight,
            "blocks": {"held": pool.held, "cached": pool.cached, "total": pool.total},
            "fronts": {named(front): len(state.jobs) for front, state in self.fronts.items()},
            "owners": len(self.owners),
            "queue_s": len(self.queue_s),
            "requests": view.requests(scheduler, self.loop.clock.now_s()) + self._being_compiled(),
        }

    def _being_compiled(self) -> list[dict[str, Any]]:
        """Jobs that are not in the line yet: their grammars are being made."""
        return [
            {
                "id": one.job.id,
                "state": "compiling",
                "why": "its grammar is being made",
                "tenant": one.job.tenant,
                "tier": one.job.tier,
                "prompt_tokens": len(one.job.prompt),
            }
            for one in list(self._compiling)[: view.MOST]
        ]

    # ---- what fronts are told -------------------------------------------------------------------------------------

    def _sort(self, events: PassEvents) -> None:
        """Everything in the record, into the boxes of those it is about. Hot: once per token."""
        for admitted in events.admitted:
            if admitted.id in self.owners and not admitted.resumed:
                self.queue_s[admitted.id] = admitted.waited_s
        for id, (first, values) in events.prompt_logprobs.items():
            owner = self.owners.get(id)
            if owner:
                packed = [wire.pack_logprobs(one) for one in values]
                self._box(owner.front).prompt_logprobs.append((owner.key, first, packed))
        logprobs = events.logprobs
        box, front = None, None
        for id, token, index in zip(events.owners, events.tokens, events.indexes, strict=True):
            owner = self.owners.get(id)
            if owner is None:
                continue
            if owner.front is not front or box is None:
                box, front = self._box(owner.front), owner.front
            if logprobs and (id, index) in logprobs:
                box.logprobs.append((len(box.keys), wire.pack_logprobs(logprobs[id, index])))
            box.keys.append(owner.key)
            box.tokens.append(token)
            box.indexes.append(index)
        for rejected in events.rejected:
            owner = self._let_go(rejected.id)
            if owner:
                self.queue_s.pop(rejected.id, None)
                self._box(owner.front).refused.append(
                    (owner.key, rejected.kind, rejected.message, rejected.retry_after_s)
                )
        for end in events.finished:
            owner = self._let_go(end.id)
            queue_s = self.queue_s.pop(end.id, 0.0)
            if owner and end.reason is not Reason.REJECTED:
                self._box(owner.front).ended.append(
                    (
                        owner.key,
                        end.reason.value,
                        end.stop_token,
                        end.cached_tokens,
                        end.preemptions,
                        queue_s,
                        end.error,
                    )
                )

    def _let_go(self, request_id: str) -> Owner | None:
        """It has ended: forget whose it was."""
        owner = self.owners.pop(request_id, None)
        if owner is None:
            return None
        jobs = self.fronts[owner.front].jobs
        left = jobs[owner.key // wire.SAMPLES]
        left.remove(request_id)
        if not left:
            del jobs[owner.key // wire.SAMPLES]
        return owner

    def _box(self, front: bytes) -> Outbox:
        box = self._out.get(front)
        if box is None:
            box = self._out[front] = Outbox()
        return box

    def _send(self) -> None:
        """One message to each front that something happened to."""
        out, self._out = self._out, {}
        for front, box in out.items():
            self._put(front, box.packed(self.info.epoch))

    def _tell(self, front: bytes, message: wire.Message) -> None:
        self._put(front, wire.pack(message))

    def _put(self, front: bytes, data: bytes) -> None:
        """Never waits: to a front that is gone or stuck nothing is sent, and silence will tell."""
        state = self.fronts[front]
        try:
            self.socket.send_multipart([front, data], zmq.NOBLOCK)
            state.unreachable = False
        except zmq.ZMQError as error:
            if not state.unreachable:
                log.warning("front %s cannot be told anything: %s", named(front), error)
            state.unreachable = True


def named(front: bytes) -> str:
    """A stranger's name may be any bytes."""
    return front.decode(errors="replace")


def open_socket(folder: Path) -> Inbox:
    """Not bound yet: fronts must not connect to an engine that cannot answer."""
    (folder / wire.ADDRESS).unlink(missing_ok=True)
    socket: Inbox = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a front is gone
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a front that comes back under its name is that front
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
