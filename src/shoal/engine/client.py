"""The engine as a front sees it: jobs go out, their events come back to their sinks.

Owns every job of this front until it has ended: its prompt, parameters and tokens so far. When the engine is restarted,
unfinished jobs are submitted to the new one and continue where they were; jobs that arrive meanwhile wait, if the
restart policy lets them, and follow. A token is taken only if its index equals the number of tokens already there, so
none is lost or doubled. Knows no HTTP and no text.
"""

import asyncio
import json
import logging
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from shoal.core.clock import Clock, WallClock
from shoal.core.job import Ending, EngineInfo, Job, Refusal, Sink
from shoal.core.request import Reason
from shoal.core.turns import TurnTaker
from shoal.engine import wire
from shoal.engine.restart_policy import RETRY_S, STARTING, RestartPolicy, WaitForEngine, check_timeout
from shoal.errors import DeadlinePassed, EngineDown

log = logging.getLogger(__name__)

PING_S = 1.0
LATE_S = 0.1  # between two looks for jobs whose time is over while there is no engine
ANSWER_S = 5.0  # longest wait for an answer to a question
FRESH_S = 1.0  # longest wait for fresh metrics: a pass may take long, and old ones are better than none
MOST_RESUMES = 10  # a job is not submitted again once it has seen so many restarts
GIVEN_UP = "the engine died and could not be started again; this server must be restarted"


@dataclass
class LiveJob:
    """A job that has not ended."""

    number: int
    job: Job
    sink: Sink
    begun_s: float
    outputs: dict[int, list[int]]  # sample → its output so far, for samples that have not ended
    prompt_logprobs: int = 0  # how many of them the sink has
    accepted: bool = False
    sent: bool = False  # an engine has had it
    stopped: set[int] = field(default_factory=set)  # samples whose stop string was found
    resumes: int = 0


@dataclass
class Question:
    """A question that has been sent."""

    answer: "asyncio.Future[bytes]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ZmqClient:
    """An EngineClient over ZMQ. Made, started, used and closed on one event loop."""

    def __init__(
        self, folder: Path, name: str, restart: RestartPolicy | None = None, clock: Clock | None = None
    ) -> None:
        self.folder = folder
        self.name = name
        self.restart = restart or WaitForEngine()
        self.clock = clock or WallClock()
        self._info: EngineInfo | None = None
        self._last_info: EngineInfo | None = None
        self._given_up = False  # no engine will come back
        self._live: dict[int, LiveJob] = {}  # by number
        self._numbers: dict[str, int] = {}  # by job id
        self._line: deque[LiveJob] | None = None  # jobs that are being submitted to a new engine
        self._count = 0
        self._aborts: list[int] = []  # numbers to be sent
        self._questions: dict[int, Question] = {}
        self._metrics: str | None = None  # of the engine, as of its last answer
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: Any = None

    # ---- for the front --------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def last_info(self) -> EngineInfo | None:
        return self._last_info

    @property
    def accepting(self) -> bool:
        return self._info is not None or (self.restart.waits and not self._given_up)

    @property
    def trouble(self) -> str:
        return GIVEN_UP if self._given_up else STARTING

    @property
    def jobs(self) -> int:
        return len(self._live)

    def start(self) -> None:
        """Connect as soon as there is an engine. Needs a running event loop."""
        self._context = zmq.asyncio.Context()
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.name.encode())
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # messages are not queued for an engine that is down
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{self.folder / wire.ADDRESS}")
        self._tasks = [
            asyncio.create_task(self._watch(self._monitor), name="engine connection"),
            asyncio.create_task(self._listen(socket), name="engine messages"),
            asyncio.create_task(self._ping(), name="engine pings"),
            asyncio.create_task(self._watch_time(), name="jobs without an engine"),
        ]

    async def close(self) -> None:
        """Abort the jobs that still run, and disconnect."""
        for live in list(self._live.values()):
            self.abort(live.job.id)
        self._send_aborts()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
        if self._context is not None:
            self._context.term()
        self._info = None

    def submit(self, job: Job, sink: Sink) -> None:
        if self._given_up:
            raise EngineDown(GIVEN_UP, RETRY_S)
        self._count += 1
        outputs: dict[int, list[int]] = {sample: [] for sample in range(job.params.n)}
        live = LiveJob(self._count, job, sink, self.clock.now_s(), outputs)
        if self._line is not None:
            self._line.append(live)
        else:
            live.sent = self._info is not None and self._send(wire.Submit.of(live.number, job))
        if not live.sent and self._line is None:
            waiting = sum(len(other.outputs) for other in self._live.values() if not other.sent)
            self.restart.check(waiting, len(outputs))
        self._live[live.number] = live
        self._numbers[job.id] = live.number

    def abort(self, job_id: str) -> None:
        number = self._numbers.get(job_id)
        if number is not None:
            live = self._live[number]
            self._forget(live)
            self._abort(live)

    def _abort(self, live: LiveJob) -> None:
        """Tell the engine, if it has the job."""
        if self._info is not None and live.sent:
            if not self._aborts:  # a request may have a thousand jobs: their numbers go out in one message
                asyncio.get_running_loop().call_soon(self._send_aborts)
            self._aborts.append(live.number)

    def _send_aborts(self) -> None:
        if self._aborts:
            self._send(wire.Abort(self._aborts))
            self._aborts = []

    def finish_at(self, job_id: str, sample: int, outputs: int) -> None:
        number = self._numbers.get(job_id)
        if number is not None:
            live = self._live[number]
            live.stopped.add(sample)
            self._send(wire.FinishAt(number * wire.SAMPLES + sample, outputs))
            if self._info is None:
                self._end_stopped(live)

    def _end_stopped(self, live: LiveJob) -> None:
        """End the samples whose stop string was found here: they do not need the next engine."""
        for sample in sorted(live.stopped & live.outputs.keys()):
            del live.outputs[sample]
            self._accept(live)
            live.sink.ended(sample, Ending(Reason.STOP.value))
        self._flush_or_forget(live)

    async def ask(self, what: str) -> Any:
        if self._info is None:
            raise EngineDown(self.trouble, RETRY_S)
        self._count += 1
        number, question = self._count, Question()
        self._questions[number] = question
        try:
            self._send(wire.Ask(number, what))
            wait_s = FRESH_S if what == "metrics" and self._metrics is not None else ANSWER_S
            text = await asyncio.wait_for(question.answer, wait_s)
        except TimeoutError:
            if what == "metrics" and self._metrics is not None:
                return self._metrics
            raise EngineDown(
                f"the engine has not answered for {ANSWER_S:g} s; it may be busy with a long pass"
            ) from None
        finally:
            del self._questions[number]
        return text.decode() if what == "metrics" else json.loads(text)

    # ---- to and from the engine -----------------------------------------------------------------------------------

    def _send(self, message: wire.Message) -> bool:
        """False if no engine is connected."""
        if self._socket is None or self._socket.closed:
            return False
        sent: Any = self._socket.send(wire.pack(message), zmq.NOBLOCK)  # NOBLOCK: sent at once or not at all
        return not sent.cancelled() and sent.done() and sent.exception() is None

    async def _watch(self, monitor: Any) -> None:
        """Follow the engine's connection: up or lost."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send(wire.Hello())
            elif event == zmq.EVENT_DISCONNECTED:
                self._gone()

    def _gone(self) -> None:
        if self._info is not None:
            log.warning("the engine is down; %d jobs wait for its restart", len(self._live))
        self._info = self._metrics = None
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(EngineDown("the engine went away before it answered", RETRY_S))

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if self._info is not None:
                self._send(wire.Ping())
            elif not self._given_up and (self.folder / wire.GIVEN_UP).exists():
                self._give_up()

    def _give_up(self) -> None:
        """No engine will come back: end all jobs, however far they are."""
        log.error("the engine will not be restarted; %d jobs are ended", len(self._live))
        self._given_up = True
        for live in list(self._live.values()):
            self._forget(live)
            live.sink.refused(Refusal("EngineDown", GIVEN_UP))
            live.sink.flush()

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        pause = TurnTaker()
        while True:
            await pause.if_long()  # recv() does not wait while there are messages
            arriving: Any = socket.recv()
            if not arriving.done():
                data = await arriving
                pause.restart()
            else:
                data = arriving.result()
            try:
                message = wire.read_engine(data)
                if isinstance(message, wire.Pass):
                    await self._take(message, pause)
                elif isinstance(message, wire.Ready):
                    await self._ready(message, pause)
                else:
                    self._replied(message)
            except Exception:  # one bad message must not end this task
                log.exception("a message of the engine could not be processed")

    def _replied(self, message: wire.Reply) -> None:
        if message.what == "metrics":
            self._metrics = message.text.decode()
        question = self._questions.get(message.number)
        if question is not None and not question.answer.done():
            question.answer.set_result(message.text)

    async def _ready(self, message: wire.Ready, pause: TurnTaker) -> None:
        """A new engine, which has none of this front's jobs: submit those that have not ended, in the order of their
        arrival, but first those that an earlier engine had. Jobs that arrive meanwhile join the end of the line."""
        self._info = self._last_info = message.info
        self._send(wire.Ask(0, "metrics"))  # so that there are some to show during a long pass
        self._line = line = deque(sorted(self._live.values(), key=lambda one: not one.sent))
        try:
            while line and self._info is message.info:  # else it has gone again
                live = line.popleft()
                if live.number in self._live:
                    self._submit_again(live)
                await pause.if_long()
        finally:
            self._line = None

    def _submit_again(self, live: LiveJob) -> None:
        """To an engine that does not have it."""
        job = replace(live.job, waited_s=max(0.0, self.clock.now_s() - live.begun_s))
        if not live.sent:
            live.sent = self._send(wire.Submit.of(live.number, job))
            return
        if live.stopped:
            self._end_stopped(live)
            if not live.outputs:
                return
        live.resumes += 1
        if live.resumes > MOST_RESUMES:
            self._fail(live, "the engine died several times while it computed this request")
        else:
            self._send(wire.Submit.of(live.number, job, live.outputs))

    # ---- without an engine ----------------------------------------------------------------------------------------

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(LATE_S)
            if self._info is None:
                self._expire()

    def _expire(self) -> None:
        """End the jobs whose time is over, as an engine would."""
        for live in list(self._live.values()):
            waited_s = self.clock.now_s() - live.begun_s
            try:
                check_timeout(live.job, waited_s)
                if not live.sent:
                    self.restart.check_wait(waited_s)
            except DeadlinePassed as error:
                while live.outputs:
                    self._refused(live, next(iter(live.outputs)), Refusal.of(error))
                self._flush_or_forget(live)

    # ---- events of jobs -------------------------------------------------------------------------------------------

    async def _take(self, message: wire.Pass, pause: TurnTaker) -> None:
        """Pass everything on to the sinks, in order; a long message lets others have the event loop in between."""
        if self._info is None or message.epoch != self._info.epoch:
            return  # from an engine that is gone
        touched: dict[int, LiveJob] = {}
        for part in message.prompt_logprobs:
            await self._take_prompt_logprobs(part, pause)
        await self._take_tokens(message, touched, pause)
        for key, ending in message.ended:
            await pause.if_long()
            number, sample = divmod(key, wire.SAMPLES)
            live = self._live.get(number)
            if live is not None and live.outputs.pop(sample, None) is not None:
                self._accept(live)
                live.sink.ended(sample, ending)
                touched[number] = live
        for key, refusal in message.refused:
            live = self._live.get(key // wire.SAMPLES)
            if live is not None:
                self._refused(live, key % wire.SAMPLES, refusal)
                touched[live.number] = live
        for live in touched.values():
            self._flush_or_forget(live)

    async def _take_prompt_logprobs(self, part: wire.PromptLogprobs, pause: TurnTaker) -> None:
        live = self._live.get(part.key // wire.SAMPLES)
        if live is None:
            return
        fresh = part.values[live.prompt_logprobs + 1 - part.first :]  # a restarted engine repeats some of them
        live.prompt_logprobs += len(fresh)
        for packed in fresh:
            live.sink.prompt_logprobs([wire.read_logprobs(packed)])
            await pause.if_long()

    async def _take_tokens(self, message: wire.Pass, touched: dict[int, LiveJob], pause: TurnTaker) -> None:
        """Hot: runs once per token."""
        logprobs = message.logprobs
        for at, (key, token, index) in enumerate(zip(message.keys, message.tokens, message.indexes, strict=True)):
            number, sample = divmod(key, wire.SAMPLES)
            live = self._live.get(number)
            if live is None:
                continue
            output = live.outputs.get(sample)
            if output is None or len(output) != index:
                continue  # the sample has ended, or a restarted engine repeats a token
            output.append(token)
            if not live.accepted:
                self._accept(live)
            packed = logprobs.get(at) if logprobs else None
            live.sink.token(sample, token, None if packed is None else wire.read_logprobs(packed))
            touched[number] = live
            if pause.is_long():
                await pause.turn()

    def _accept(self, live: LiveJob) -> None:
        if not live.accepted:
            live.accepted = True
            live.sink.accepted()

    def _refused(self, live: LiveJob, sample: int, refusal: Refusal) -> None:
        """Before its first token the whole job is refused; later only a sample whose time is over."""
        if not live.accepted:
            live.sink.refused(refusal)
            self._abort(live)
            live.outputs.clear()
        elif refusal.kind in ("DeadlinePassed", "PromiseBroken"):
            live.outputs.pop(sample, None)
            live.sink.ended(sample, Ending(Reason.TIMEOUT.value))
        else:  # a new engine refuses what the old one had begun
            self._fail(live, refusal.message)

    def _fail(self, live: LiveJob, error: str) -> None:
        self._accept(live)
        for sample in list(live.outputs):
            live.sink.ended(sample, Ending(Reason.ERROR.value, error=error))
        live.outputs.clear()
        self._flush_or_forget(live)

    def _flush_or_forget(self, live: LiveJob) -> None:
        if not live.outputs:
            self._forget(live)
        live.sink.flush()

    def _forget(self, live: LiveJob) -> None:
        self._live.pop(live.number, None)
        if self._numbers.get(live.job.id) == live.number:
            del self._numbers[live.job.id]
