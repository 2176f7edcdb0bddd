"""The host: an engine in a process of its own, between its socket and its loop.

Reads the messages of fronts between two passes, drives the loop, shows what happened to its observers, and sends each
front at most one message per pass about its own jobs. Owns which front each request belongs to; the jobs of a front
that falls silent are aborted. Knows no HTTP and no text: it is given a function that compiles grammars.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq

from shoal.core.clock import WallClock
from shoal.core.events import PassEvents
from shoal.core.grammar import Grammar
from shoal.core.job import Ending, EngineInfo, Job, Refusal, requests_of
from shoal.core.ports import MakeGrammar
from shoal.core.request import Reason, Request
from shoal.engine import view, wire
from shoal.engine.blackbox import Suspected
from shoal.engine.block_map import live_view
from shoal.engine.elsewhere import ServiceElsewhere
from shoal.engine.host_grammars import Compiling, HostGrammars
from shoal.engine.host_handoffs import EarlyJob, HostHandoffs
from shoal.engine.listen import Inbox
from shoal.engine.load import LoadMeter
from shoal.engine.loop import EngineLoop
from shoal.engine.pass_feed import FEED_S, PassFeed
from shoal.engine.reporter import REPORT_S, Reporter
from shoal.errors import BadGrammar, EngineError, RequestFailed, ShoalError

log = logging.getLogger(__name__)

SILENCE_S = 10.0  # a front that has sent nothing for so long is taken for dead
IDLE_S = 1.0  # longest sleep with nothing to compute


class Observer(Protocol):
    """A reader of events, such as metrics. Called once for each record, in order, between two passes: must be quick."""

    def take(self, events: PassEvents) -> None: ...


class InboxClock(WallClock):
    """Wall time; a wait ends early when a message of a front arrives."""

    def __init__(self, socket: Inbox) -> None:
        self._socket = socket

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - self.now_s()
        if left_s > 0:
            self._socket.poll(round(left_s * 1000) + 1)


@dataclass
class FrontState:
    """What the host keeps about one front."""

    heard_s: float  # when its last message came
    jobs: dict[int, list[str]] = field(default_factory=dict)  # job number → ids of its requests that have not ended
    unreachable: bool = False  # the last message could not be sent; logged once
    submissions: int = 0  # since its Hello


@dataclass(frozen=True, slots=True)
class Owner:
    """The front that a request belongs to, and the request's key there."""

    front: bytes
    key: int


class Host:
    """Serves fronts from one loop until stop() is called."""

    def __init__(
        self,
        loop: EngineLoop,
        socket: Inbox,
        info: EngineInfo,
        observers: Sequence[Observer] = (),
        answers: Mapping[str, Callable[[], bytes]] | None = None,
        make_grammar: MakeGrammar | None = None,
        suspects: Suspected | None = None,
    ) -> None:
        """`answers`: to questions of fronts, by name. The host itself answers the others of wire.Ask. For "metrics" the
        caller names the function of the observer that counts them."""
        self.loop = loop
        self.socket = socket
        self.info = info
        self.observers = observers
        self.reporter = Reporter(loop.scheduler)
        self.meter = LoadMeter(loop.scheduler, self.reporter)
        self.feed = PassFeed(loop.scheduler)
        self.answers = {
            "state": lambda: json.dumps(self.state()).encode(),
            "live": lambda: json.dumps(live_view(loop.scheduler, loop.clock.now_s())).encode(),
            "load": lambda: json.dumps(self.meter.load()).encode(),
            "reset_prefix_cache": lambda: json.dumps({"forgotten": loop.scheduler.kv.forget_all()}).encode(),
            **(answers or {}),
        }
        self.make_grammar = make_grammar
        self.beat: Callable[[], None] = lambda: None  # shows the supervisor that the loop runs
        self._suspects = suspects or Suspected((), False)
        self.stopping = False
        self.fronts: dict[bytes, FrontState] = {}
        self.owners: dict[str, Owner] = {}  # by request id
        self.queue_s: dict[str, float] = {}  # request id → time it waited in the queue, until it ends
        self._outbox: dict[bytes, wire.Pass] = {}  # the next message to each front
        self._elsewhere = ServiceElsewhere()
        self.handoffs = HostHandoffs(loop.scheduler)
        self._drain_until_s: float | None = None  # it is about to end
        self._told_leaving = False
        self.grammars = HostGrammars()
        loop.open_ended = True  # a front may always submit more
        self._readers: dict[type[wire.Message], Callable[[bytes, Any], None]] = {
            wire.Hello: self._hello,
            wire.Watch: lambda front, message: self.reporter.watch(front),
            wire.Follow: lambda front, message: self.feed.follow(front),
            wire.Elsewhere: self._served_elsewhere,
            wire.Ping: lambda front, message: None,
            wire.Submit: self._submit,
            wire.Abort: self._abort_all,
            wire.FinishAt: self._finish_at,
            wire.Ask: self._ask,
            wire.Arriving: self.handoffs.announce,
        }

    def run(self) -> None:
        """Until stop() is called, from a signal for instance."""
        try:
            while not self.stopping:
                self.step()
        finally:
            self.grammars.close()

    def stop(self) -> None:
        self.stopping = True

    def drain(self, timeout_s: float) -> None:
        """Have the fronts move their jobs to another engine, and stop when no job is left, at the latest after the
        timeout. May be called from a signal handler."""
        if self._drain_until_s is None:
            self._drain_until_s = self.loop.clock.now_s() + timeout_s

    def _leave(self) -> None:
        """Part of drain(), between two passes."""
        if not self._told_leaving:
            self._told_leaving = True
            for front in list(self.fronts):
                self._send(front, wire.Leaving())
            return
        over = self.loop.clock.now_s() >= (self._drain_until_s or 0.0)
        if over or not any(state.jobs for state in self.fronts.values()):
            self.stop()

    def step(self) -> None:
        """Read all messages, compute a pass (or wait a little), send what came of it."""
        self.beat()
        self._read()
        self._start_held()
        self._send_news()
        now_s = self.loop.clock.now_s()
        events = self.loop.step(until_s=now_s + self._longest_wait_s())
        for observer in self.observers:
            observer.take(events)
        self._sort(events)
        for front, blocks in self.handoffs.blocks():
            self._news(front).blocks.append(blocks)
        self.reporter.note(events)
        self.feed.take(events)
        self.meter.take(events)
        self._report()
        self._send_news()
        if self._drain_until_s is not None:
            self._leave()

    def _longest_wait_s(self) -> float:
        """How long it may do nothing while no message comes."""
        if self.grammars:
            return 0.01
        soon = self.reporter.pending or self._drain_until_s is not None
        return REPORT_S if soon else FEED_S if self.feed.pending else IDLE_S

    def _report(self) -> None:
        """Tell the fronts that follow, and those that choose among several engines."""
        for front, batch in self.feed.due(self.loop.clock.now_s()).items():
            if not self._send(front, wire.Passes(self.info.epoch, batch)):
                self.feed.missed(front)
        if self.reporter.watchers:
            counts = {front: state.submissions for front, state in self.fronts.items()}
            for front, report in self.reporter.reports(counts, self.loop.clock.now_s()).items():
                if not self._send(front, wire.Report(self.info.epoch, report)):
                    self.reporter.missed(front)

    def _served_elsewhere(self, front: bytes, message: wire.Elsewhere) -> None:
        now_s = self.loop.clock.now_s()
        service = self._elsewhere.take(message.engine, message.epoch, message.number, message.service, now_s)
        if service is not None:
            self.loop.scheduler.policies.order.served_elsewhere(service)

    # ---- messages of fronts ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            try:
                front, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                continue  # not two parts: not a message of a front
            try:
                message = wire.read_front(data)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                log.warning("dropped a message that could not be decoded")
                continue
            now_s = self.loop.clock.now_s()
            state = self.fronts.get(front)
            if state is None:
                self.fronts[front] = FrontState(now_s)
                message = wire.Hello()  # a front that was forgotten and does not know: Ready makes it resubmit its jobs
            else:
                state.heard_s = now_s
            self._readers[type(message)](front, message)
        self._forget_silent()

    def _forget_silent(self) -> None:
        now_s = self.loop.clock.now_s()
        for front, state in list(self.fronts.items()):
            if now_s - state.heard_s > SILENCE_S:
                log.warning("front %s is silent; its %d jobs are aborted", named(front), len(state.jobs))
                self._forget(front)

    def _forget(self, front: bytes) -> None:
        """The front is gone: abort its jobs."""
        for number in list(self.fronts[front].jobs):
            self._abort(front, number)
        self.handoffs.forget_front(front)
        del self.fronts[front]
        self._outbox.pop(front, None)
        self.reporter.forget(front)
        self.feed.forget(front)

    def _hello(self, front: bytes, message: wire.Hello) -> None:
        """A front that sends Hello has no jobs here: it is new, or takes this engine for a new one."""
        self.fronts[front].submissions = 0
        self.reporter.forget(front)
        for number in list(self.fronts[front].jobs):
            self._abort(front, number)
        self.handoffs.forget_front(front)
        name, dot, _ = front.rpartition(b".")
        for other in [one for one in self.fronts if dot and one != front and one.rpartition(b".")[0] == name]:
            self._forget(other)  # names are NAME.START: an earlier start of the same front, which is dead
        self._send(front, wire.Ready(self.info))
        if self._told_leaving:
            self._send(front, wire.Leaving())

    def _submit(self, front: bytes, message: wire.Submit) -> None:
        self.fronts[front].submissions += 1
        self.reporter.note_submission()
        try:
            job = message.job()
            if job.grammar is not None and self.make_grammar is None:
                raise BadGrammar("this model has no tokenizer, so it cannot follow a grammar")
        except ShoalError as error:
            self._refuse(front, message.number, error)
            return
        if job.grammar is None or self.make_grammar is None:
            self._start(front, message, job)
            return
        self.fronts[front].jobs[message.number] = []
        self.grammars.add(front, message, job, self.make_grammar)

    def _start_held(self) -> None:
        """Start the jobs whose grammars, or whose blocks, had to be waited for; stop strings were found meanwhile."""
        for compiled in self.grammars.ready():
            self._start_compiled(compiled)
            self._finish_all(compiled)
        for arrived in self.handoffs.ready():
            self._start(arrived.front, arrived.message, arrived.job, arrived.grammars)
            self._finish_all(arrived)

    def _finish_all(self, one: Compiling | EarlyJob) -> None:
        for message in one.finishes:
            self._finish_at(one.front, message)

    def _start_compiled(self, one: Compiling) -> None:
        try:
            grammars = one.grammars.result()
        except ShoalError as error:
            self._refuse(one.front, one.message.number, error)
        except Exception:
            log.exception("a grammar could not be compiled")
            self._refuse(one.front, one.message.number, EngineError("the grammar could not be compiled"))
        else:
            self._start(one.front, one.message, one.job, grammars)

    def _start(
        self, front: bytes, message: wire.Submit, job: Job, grammars: Mapping[int, Grammar] | None = None
    ) -> None:
        if self.handoffs.hold_back(front, message, job, grammars):
            self.fronts[front].jobs[message.number] = []
            return
        requests = requests_of(job, message.outputs, grammars)
        resumed = message.outputs is not None
        try:
            if resumed and any(request.id == self._suspects.guilty for request in requests):
                raise RequestFailed("the engine died each time it computed this request")
            self.loop.submit_all(requests, resumed=resumed, leave=message.leave)
        except ShoalError as error:
            self._refuse(front, message.number, error)
            return
        self._watch(requests)
        if message.leave:
            self.handoffs.begin(front, message.number, requests)
        self.fronts[front].jobs[message.number] = [request.id for request in requests]
        for request in requests:
            self.owners[request.id] = Owner(front, message.number * wire.SAMPLES + request.sample)

    def _watch(self, requests: Sequence[Request]) -> None:
        """Requests from the last passes of an engine that died run apart from the others at first."""
        for request in requests:
            for which, part in enumerate((self._suspects.first, self._suspects.second)):
                if request.id in part:
                    self.loop.scheduler.suspects.add(request, which)

    def _refuse(self, front: bytes, number: int, error: ShoalError) -> None:
        self.handoffs.forget(front, number)
        self.fronts[front].jobs.pop(number, None)
        self._news(front).refused.append((number * wire.SAMPLES, Refusal.of(error)))

    def _abort_all(self, front: bytes, message: wire.Abort) -> None:
        for number in message.numbers:
            self._abort(front, number)

    def _abort(self, front: bytes, number: int) -> None:
        self.handoffs.forget(front, number)
        self.grammars.forget(front, number)
        for request_id in self.fronts[front].jobs.pop(number, ()):
            self.owners.pop(request_id, None)
            self.queue_s.pop(request_id, None)
            self.loop.abort(request_id)

    def _finish_at(self, front: bytes, message: wire.FinishAt) -> None:
        if self.grammars.finish_later(front, message) or self.handoffs.finish_later(front, message):
            return
        number, sample = divmod(message.key, wire.SAMPLES)
        for request_id in self.fronts[front].jobs.get(number, ()):
            if self.owners[request_id].key % wire.SAMPLES == sample:
                self.loop.finish_at(request_id, message.outputs)
                return

    def _ask(self, front: bytes, message: wire.Ask) -> None:
        answer = self.answers.get(message.what)
        if answer is None:
            log.warning("dropped a question about %.40r, which has no answer here", message.what)
            return
        self._send(front, wire.Reply(message.number, message.what, answer()))

    def state(self) -> dict[str, Any]:
        """What the tables hold, for people and tests."""
        scheduler = self.loop.scheduler
        pool = scheduler.kv.pool
        return {
            "epoch": self.info.epoch,
            "places": scheduler.limits.max_num_seqs,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "compiling": len(self.grammars),
            "in_flight": self.loop.scheduler.in_flight,
            "blocks": {"held": pool.held, "cached": pool.cached, "total": pool.total},
            "fronts": {named(front): len(state.jobs) for front, state in self.fronts.items()},
            "owners": len(self.owners),
            "queue_s": len(self.queue_s),
            "requests": view.requests(scheduler, self.loop.clock.now_s()) + self.grammars.view(view.MOST),
        }

    # ---- messages to fronts ---------------------------------------------------------------------------------------

    def _sort(self, events: PassEvents) -> None:
        """Put each event into the next message to the front it concerns. Hot: runs once per token."""
        for admitted in events.admitted:
            owner = self.owners.get(admitted.id)
            if owner:
                self.handoffs.started(owner.front, owner.key // wire.SAMPLES)
                if not admitted.resumed:
                    self.queue_s[admitted.id] = admitted.waited_s
        for id, (first, values) in events.prompt_logprobs.items():
            owner = self.owners.get(id)
            if owner:
                packed = tuple(map(wire.pack_logprobs, values))
                self._news(owner.front).prompt_logprobs.append(wire.PromptLogprobs(owner.key, first, packed))
        self._sort_tokens(events)
        for rejected in events.rejected:
            owner = self._let_go(rejected.id)
            if owner:
                self.queue_s.pop(rejected.id, None)
                refusal = Refusal(rejected.kind, rejected.message, rejected.retry_after_s)
                self._news(owner.front).refused.append((owner.key, refusal))
        for end in events.finished:
            owner = self._let_go(end.id)
            queue_s = self.queue_s.pop(end.id, 0.0)
            if owner and end.reason is not Reason.REJECTED:
                self._news(owner.front).ended.append((owner.key, Ending.of(end, queue_s)))

    def _sort_tokens(self, events: PassEvents) -> None:
        logprobs = events.logprobs
        news, front = None, None
        for id, token, index in zip(events.owners, events.tokens, events.indexes, strict=True):
            owner = self.owners.get(id)
            if owner is None:
                continue
            if owner.front is not front or news is None:
                news, front = self._news(owner.front), owner.front
            if logprobs and (id, index) in logprobs:
                news.logprobs[len(news.keys)] = wire.pack_logprobs(logprobs[id, index])
            news.keys.append(owner.key)
            news.tokens.append(token)
            news.indexes.append(index)

    def _let_go(self, request_id: str) -> Owner | None:
        """The request has ended: forget its owner."""
        owner = self.owners.pop(request_id, None)
        if owner is None:
            return None
        jobs = self.fronts[owner.front].jobs
        left = jobs[owner.key // wire.SAMPLES]
        left.remove(request_id)
        if not left:
            del jobs[owner.key // wire.SAMPLES]
        return owner

    def _news(self, front: bytes) -> wire.Pass:
        """The next message to this front."""
        news = self._outbox.get(front)
        if news is None:
            news = self._outbox[front] = wire.Pass(self.info.epoch)
        return news

    def _send_news(self) -> None:
        """One message to each front that something happened to."""
        outbox, self._outbox = self._outbox, {}
        for front, news in outbox.items():
            self._send(front, news)

    def _send(self, front: bytes, message: wire.Message) -> bool:
        """Never blocks. A message to a front that is gone or stuck is lost; its silence will show that it is gone."""
        state = self.fronts[front]
        try:
            self.socket.send_multipart([front, wire.pack(message)], zmq.NOBLOCK)
            state.unreachable = False
            return True
        except zmq.ZMQError as error:
            if not state.unreachable:
                log.warning("front %s cannot be reached: %s", named(front), error)
            state.unreachable = True
            return False


def named(front: bytes) -> str:
    """The name of a front, for logs; a peer may connect with any bytes as its name."""
    return front.decode(errors="replace")
