"""The engines as a front sees them: jobs go out, their events come back to their sinks.

Owns every job of this front until it has ended: its prompt, parameters and tokens so far. Each job runs on one engine,
which the router chooses, or waits. When an engine dies, its jobs are at once submitted to another one, with their
output so far; when there is no other, they wait for its restart, as do jobs that arrive meanwhile, if the restart
policy lets them. When an engine is about to end, its jobs move in the same way. A token is taken only from the engine
that has the job, and only if its index equals the number of tokens already there, so none is lost or doubled. Knows no
HTTP and no text.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq.asyncio

from shoal.core.clock import Clock, WallClock
from shoal.core.job import Ending, EngineInfo, Job, Refusal, Sink
from shoal.core.live import LiveSink, NoLive
from shoal.core.report import EngineStatus
from shoal.core.request import Reason
from shoal.core.turns import TurnTaker
from shoal.engine import blackbox, wire
from shoal.engine.front_handoffs import FrontHandoffs
from shoal.engine.link import EngineAddress, EngineLink
from shoal.engine.live_job import LiveJob
from shoal.engine.restart_policy import RETRY_S, STARTING, RestartPolicy, WaitForEngine, check_timeout
from shoal.errors import DeadlinePassed, EngineDown
from shoal.routing.router import Router
from shoal.routing.work import Work

log = logging.getLogger(__name__)

PING_S = 1.0
LATE_S = 0.1  # between two looks for jobs whose time is over while they wait for an engine
MOST_RESUMES = 10  # a job is not submitted again once it has seen so many engines die
GIVEN_UP = "the engine died and could not be started again; this server must be restarted"


class ZmqClient:
    """An EngineClient over ZMQ, for one engine or many. Made, started, used and closed on one event loop."""

    def __init__(
        self,
        folder: Path,
        name: str,
        restart: RestartPolicy | None = None,
        clock: Clock | None = None,
        engines: Sequence[EngineAddress] | None = None,
        router: Router | None = None,
    ) -> None:
        """`engines`: by default one, whose socket is in the folder. Others may be added and removed at any time; for
        that, and with any other number, a router is given."""
        self.folder = folder
        self.name = name
        self.restart = restart or WaitForEngine()
        self.clock = clock or WallClock()
        self.router = router or Router()
        self._watch = router is not None
        self.live: LiveSink = NoLive()  # set where passes are kept, before start()
        self._links: dict[int, EngineLink] = {}  # by number
        self.handoffs = FrontHandoffs(self._links, self.router)
        self._given_up = False  # no engine will come back
        self._live: dict[int, LiveJob] = {}  # by number
        self._numbers: dict[str, int] = {}  # by job id
        self._line: deque[LiveJob] | None = None  # jobs that are being submitted to engines that do not have them
        self._count = 0
        self._aborts: dict[EngineLink, list[int]] = {}  # numbers to be sent
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        for address in [EngineAddress.in_folder(folder)] if engines is None else engines:
            self.add_engine(address)

    # ---- for the front --------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        return next((link.info for link in self._links.values() if link.info is not None), None)

    @property
    def last_info(self) -> EngineInfo | None:
        known = (link.last_info for link in self._links.values() if link.last_info is not None)
        return self.info or next(known, None)

    @property
    def engines(self) -> list[EngineStatus]:
        return [
            EngineStatus(link.number, link.info is not None, link.last_info.epoch if link.last_info else 0)
            for _, link in sorted(self._links.items())
        ]

    @property
    def accepting(self) -> bool:
        return self.info is not None or (self.restart.waits and not self._given_up)

    @property
    def trouble(self) -> str:
        return GIVEN_UP if self._given_up else STARTING

    @property
    def jobs(self) -> int:
        return len(self._live)

    def start(self) -> None:
        """Connect as soon as there are engines. Needs a running event loop."""
        self._context = zmq.asyncio.Context()
        for link in self._links.values():
            link.start(self._context)
        self._tasks = [
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
        for link in self._links.values():
            await link.close()
        if self._context is not None:
            self._context.destroy(
                linger=0
            )  # also the socket of a link that was being removed; term() would wait for it

    def add_engine(self, address: EngineAddress) -> None:
        """There is another engine, or there will be; it gets jobs once it is up."""
        assert address.number not in self._links, f"there is an engine {address.number} already"
        self._links[address.number] = link = EngineLink(address, self.name, self, self._watch)
        if self._context is not None:
            link.start(self._context)

    async def remove_engine(self, number: int) -> None:
        """This engine will not come back; what runs there goes elsewhere."""
        link = self._links.pop(number, None)
        if link is not None:
            await link.close()
            await self.lost(link)

    def submit(self, job: Job, sink: Sink) -> None:
        if self._given_up:
            raise EngineDown(GIVEN_UP, RETRY_S)
        self._count += 1
        outputs: dict[int, list[int]] = {sample: [] for sample in range(job.params.n)}
        live = LiveJob(self._count, job, sink, self.clock.now_s(), outputs)
        if self._line is not None:
            self._line.append(live)
        elif not self._place(live, live.job):
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
        """Tell the engine that has the job."""
        if live.link is not None:
            if not self._aborts:  # a request may have a thousand jobs: their numbers go out in one message
                asyncio.get_running_loop().call_soon(self._send_aborts)
            self._aborts.setdefault(live.link, []).append(live.number)

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, {}
        for link, numbers in aborts.items():
            link.send(wire.Abort(numbers))

    def finish_at(self, job_id: str, sample: int, outputs: int) -> None:
        number = self._numbers.get(job_id)
        if number is not None:
            live = self._live[number]
            live.stopped.add(sample)
            if live.link is not None:
                live.link.send(wire.FinishAt(number * wire.SAMPLES + sample, outputs))
            else:
                self._end_stopped(live)

    def _end_stopped(self, live: LiveJob) -> None:
        """End the samples whose stop string was found here: they do not need the next engine."""
        for sample in sorted(live.stopped & live.outputs.keys()):
            del live.outputs[sample]
            self._accept(live)
            live.sink.ended(sample, Ending(Reason.STOP.value))
        self._flush_or_forget(live)

    async def ask(self, what: str, engine: int | None = None) -> Any:
        link = next((one for one in self._links.values() if one.info and engine in (None, one.number)), None)
        if link is None:
            raise EngineDown(self.trouble, RETRY_S)
        return await link.ask(what)

    # ---- to the engines -------------------------------------------------------------------------------------------

    def _place(self, live: LiveJob, job: Job) -> bool:
        """Send a job to the engine that the router chooses; False if there is none."""
        number = self.handoffs.place(live.number, self._work(live), live.waits_for.number if live.waits_for else None)
        if number is None:
            return False
        link = self._links[number]
        leave = self.handoffs.going(live.number, number, live.outputs)
        if not link.send(wire.Submit.of(live.number, job, live.outputs if live.sent else None, leave)):
            self.router.unsent(live.number)
            self.handoffs.end(live.number)
            return False
        live.link, live.sent, live.prefilled, live.waits_for = link, True, False, None
        return True

    def _work(self, live: LiveJob) -> Work:
        return Work.of(live.job, live.outputs, self.router.block_size())

    async def _place_waiting(self, pause: TurnTaker) -> None:
        """Submit the jobs that no engine has, in the order of their arrival, but first those that an engine has had.
        Jobs that arrive meanwhile join the end of the line."""
        waiting = sorted((one for one in self._live.values() if one.link is None), key=lambda one: not one.sent)
        if self._line is not None:  # of another engine, whose task is at it
            known = set(map(id, self._line))
            self._line.extend(one for one in waiting if id(one) not in known)
            return
        self._line = line = deque(waiting)
        try:
            while line and self._any_takes_jobs():
                live = line.popleft()
                if live.number in self._live and live.link is None:
                    self._submit_again(live)
                await pause.if_long()
        finally:
            self._line = None

    def _submit_again(self, live: LiveJob) -> None:
        """To an engine that does not have it."""
        if live.stopped:
            self._end_stopped(live)
            if not live.outputs:
                return
        if live.resumes > MOST_RESUMES:
            self._fail(live, "the engine died several times while it computed this request")
        else:
            self._place(live, replace(live.job, waited_s=max(0.0, self.clock.now_s() - live.begun_s)))

    def _any_takes_jobs(self) -> bool:
        return any(link.takes_jobs for link in self._links.values())

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            for link in self._links.values():
                if link.info is not None:
                    link.send(wire.Ping())
            if self.info is None and not self._given_up and wire.is_given_up(self.folder):
                self._give_up()
            await self._free_suspects()

    async def _free_suspects(self) -> None:
        """An engine that will not come back cannot clear its suspects."""
        waiting = [live for live in self._live.values() if live.waits_for is not None]
        for live in waiting:
            link = live.waits_for
            if link is None or link.number not in self._links or wire.is_given_up(link.address.home):
                live.waits_for = None
        if waiting:
            await self._place_waiting(TurnTaker())

    def _give_up(self) -> None:
        """No engine will come back: end all jobs, however far they are."""
        log.error("the engine will not be restarted; %d jobs are ended", len(self._live))
        self._given_up = True
        for live in list(self._live.values()):
            self._forget(live)
            live.sink.refused(Refusal("EngineDown", GIVEN_UP))
            live.sink.flush()

    # ---- what links say: engines come and go ----------------------------------------------------------------------

    async def up(self, link: EngineLink, pause: TurnTaker) -> None:
        """A new engine, which has none of this front's jobs."""
        assert link.info is not None
        self.handoffs.lost(link.number)
        self._take_from(link, died=True)
        self.router.joined(link.number, link.info.block_size, link.info.role)
        self.live.up(link.number, link.info.epoch)
        if self.live.on:
            link.send(wire.Follow())
        self._leave([one for one in self._links.values() if one.is_leaving])
        await self._place_waiting(pause)

    async def lost(self, link: EngineLink) -> None:
        was_up, expected = link.info is not None, link.is_leaving
        suspects = self._suspects(link)
        link.gone()
        self.router.left(link.number)
        self.live.down(link.number)
        self.handoffs.lost(link.number)
        count = self._take_from(link, died=True)
        for live in suspects:
            live.waits_for = link
        if self._any_takes_jobs():
            if was_up and not expected:
                log.warning("engine %d is down; its %d jobs go on elsewhere", link.number, count)
            await self._place_waiting(TurnTaker())
        elif was_up:
            log.warning("the engine is down; %d jobs wait for its restart", len(self._live))

    def _suspects(self, link: EngineLink) -> list[LiveJob]:
        """Jobs in the last passes of an engine that died of a fault: the same engine finds out which of them it was,
        when it is up again, and no other one dies of it."""
        home, info = link.address.home, link.info
        if home is None or info is None or len(self._links) < 2:
            return []
        ids = blackbox.suspected(home, info.epoch)
        return [
            live
            for live in self._live.values()
            if ids and live.link is link and any(f"{live.job.id}.{sample}" in ids for sample in live.outputs)
        ]

    async def leaving(self, link: EngineLink, pause: TurnTaker) -> None:
        """It takes no more jobs. What runs there moves if another engine is up, and else goes on while it can."""
        self.router.left(link.number)
        if self._any_takes_jobs():
            self._leave([link])
            await self._place_waiting(pause)

    def _take_from(self, link: EngineLink, died: bool) -> int:
        """The jobs of this engine wait for another; returns how many there are. `died`: together with the engine."""
        jobs = [live for live in self._live.values() if live.link is link]
        for live in jobs:
            live.link = None
            live.resumes += died
            self.handoffs.end(live.number)
        return len(jobs)

    def _leave(self, links: Iterable[EngineLink]) -> None:
        """Take all jobs from engines that are about to end."""
        for link in links:
            for live in [one for one in self._live.values() if one.link is link]:
                self._abort(live)
            self._send_aborts()
            count = self._take_from(link, died=False)
            log.info("engine %d is about to end; its %d jobs go on elsewhere", link.number, count)

    def reported(self, link: EngineLink, message: wire.Report) -> None:
        self.router.report(link.number, message.report)
        report = message.report
        if report.service is not None:
            news = wire.Elsewhere(link.number, message.epoch, report.service_number, report.service)
            for other in self._links.values():
                if other is not link and other.info is not None:
                    other.send(news)

    def followed(self, link: EngineLink, message: wire.Passes) -> None:
        self.live.batch(link.number, message.epoch, message.batch)

    # ---- without an engine ----------------------------------------------------------------------------------------

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(LATE_S)
            self._expire()

    def _expire(self) -> None:
        """End the jobs whose time is over, as an engine would."""
        for live in [one for one in self._live.values() if one.link is None]:
            waited_s = self.clock.now_s() - live.begun_s
            try:
                check_timeout(live.job, waited_s)
                if not live.sent:
                    self.restart.check_wait(waited_s)
            except DeadlinePassed as error:
                while live.outputs:
                    self._refused(live, next(iter(live.outputs)), Refusal.of(error))
                self._flush_or_forget(live)

    # ---- what links say: events of jobs ---------------------------------------------------------------------------

    async def passed(self, link: EngineLink, message: wire.Pass, pause: TurnTaker) -> None:
        """Pass everything on to the sinks, in order; a long message lets others have the event loop in between."""
        touched: dict[int, LiveJob] = {}
        for part in message.prompt_logprobs:
            await self._take_prompt_logprobs(link, part, pause)
        await self._take_tokens(link, message, touched, pause)
        for blocks in message.blocks:
            live = self._on(link, blocks.number)
            if live is not None:
                self.handoffs.blocks(link, blocks, self._work(live))
        for key, ending in message.ended:
            await pause.if_long()
            live = self._on(link, key // wire.SAMPLES)
            if live is not None and key % wire.SAMPLES in live.outputs:
                self._ended(live, key % wire.SAMPLES, ending)
                touched[live.number] = live
        for key, refusal in message.refused:
            live = self._on(link, key // wire.SAMPLES)
            if live is not None:
                self._refused(live, key % wire.SAMPLES, refusal)
                touched[live.number] = live
        for live in touched.values():
            self._flush_or_forget(live)

    def _ended(self, live: LiveJob, sample: int, ending: Ending) -> None:
        """A sample has ended, or its prompt is computed and a decode engine goes on with it."""
        if ending.reason == Reason.HANDED.value:
            live.handed.setdefault(sample, ending)
        else:
            del live.outputs[sample]
            self._accept(live)
            live.sink.ended(sample, live.ending(sample, ending))
        if self.handoffs.handed(live.number, sample) and live.outputs:
            self.router.ended(live.number)
            live.link = None
            self._submit_again(live)

    def _on(self, link: EngineLink, number: int) -> LiveJob | None:
        """The job of this number, if this engine has it: late news of one that went elsewhere are not taken."""
        live = self._live.get(number)
        return live if live is not None and live.link is link else None

    async def _take_prompt_logprobs(self, link: EngineLink, part: wire.PromptLogprobs, pause: TurnTaker) -> None:
        live = self._on(link, part.key // wire.SAMPLES)
        if live is None:
            return
        fresh = part.values[live.prompt_logprobs + 1 - part.first :]  # a restarted engine repeats some of them
        live.prompt_logprobs += len(fresh)
        for packed in fresh:
            live.sink.prompt_logprobs([wire.read_logprobs(packed)])
            await pause.if_long()

    async def _take_tokens(
        self, link: EngineLink, message: wire.Pass, touched: dict[int, LiveJob], pause: TurnTaker
    ) -> None:
        """Hot: runs once per token."""
        logprobs = message.logprobs
        for at, (key, token, index) in enumerate(zip(message.keys, message.tokens, message.indexes, strict=True)):
            number, sample = divmod(key, wire.SAMPLES)
            live = self._live.get(number)
            if live is None or live.link is not link:
                continue
            output = live.outputs.get(sample)
            if output is None or len(output) != index:
                continue  # the sample has ended, or a restarted engine repeats a token
            output.append(token)
            if not live.prefilled:
                live.prefilled = True
                self.router.began(number)
                self.handoffs.token(number)
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
        self.handoffs.end(live.number)
        self.router.ended(live.number)
        if self._numbers.get(live.job.id) == live.number:
            del self._numbers[live.job.id]
