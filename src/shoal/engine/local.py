"""The engine in this process, as an EngineClient: no socket, no event loop, no thread of its own.

Owns the jobs that run here and how the events of a pass reach their sinks. step() computes one pass in the caller's
thread and calls the sinks before it returns. Knows no text: it is given a function that compiles grammars.

EngineThread drives such a client in a thread; other threads hand it work.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core.clock import WallClock
from shoal.core.events import PassEvents
from shoal.core.job import Ending, EngineInfo, Job, Refusal, Sink, requests_of
from shoal.core.ports import MakeGrammar
from shoal.core.report import EngineStatus
from shoal.engine.loop import EngineLoop
from shoal.errors import BadGrammar, EngineDown, ShoalError

log = logging.getLogger(__name__)

IDLE_S = 1.0  # longest sleep of an engine thread with nothing to compute


@dataclass
class LocalJob:
    """A job that has not ended."""

    job: Job
    sink: Sink
    running: dict[int, str]  # sample → request id, for samples that have not ended
    prompt_logprobs: int = 0  # how many of them the sink has
    accepted: bool = False


class LocalClient:
    """An EngineClient over a loop in the same process. Everything happens in the thread that calls step()."""

    def __init__(self, loop: EngineLoop, info: EngineInfo, make_grammar: MakeGrammar | None = None) -> None:
        self.loop = loop
        self.info: EngineInfo | None = info
        self.trouble = "the engine was closed"
        self.make_grammar = make_grammar
        self.now_s = loop.clock.now_s()  # when the last job was submitted or the last pass committed
        self._jobs: dict[str, LocalJob] = {}  # by job id
        self._owners: dict[str, tuple[LocalJob, int]] = {}  # request id → its job and sample
        self._queue_s: dict[str, float] = {}  # request id → time it waited in the queue

    @property
    def last_info(self) -> EngineInfo | None:
        return self.info

    @property
    def engines(self) -> list[EngineStatus]:
        return [EngineStatus(0, self.info is not None, 0)]

    @property
    def accepting(self) -> bool:
        return self.info is not None

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    # ---- for the front --------------------------------------------------------------------------------------------

    def submit(self, job: Job, sink: Sink) -> None:
        """Queue a job. A refusal reaches the sink before this returns."""
        if self.info is None:
            raise EngineDown(self.trouble)
        try:
            requests = requests_of(job, grammars=self._grammars(job))
            self.loop.submit_all(requests)
        except ShoalError as error:
            sink.refused(Refusal.of(error))
            return
        self.now_s = requests[0].arrived_s
        live = LocalJob(job, sink, {request.sample: request.id for request in requests})
        self._jobs[job.id] = live
        for request in requests:
            self._owners[request.id] = (live, request.sample)

    def _grammars(self, job: Job) -> dict[int, Any] | None:
        if job.grammar is None:
            return None
        if self.make_grammar is None:
            raise BadGrammar("this model has no tokenizer, so it cannot follow a grammar")
        return {sample: self.make_grammar(job.grammar, ()) for sample in range(job.params.n)}

    def abort(self, job_id: str) -> None:
        live = self._jobs.pop(job_id, None)
        if live is not None:
            for request_id in live.running.values():
                self._owners.pop(request_id, None)
                self._queue_s.pop(request_id, None)
                self.loop.abort(request_id)

    def finish_at(self, job_id: str, sample: int, outputs: int) -> None:
        live = self._jobs.get(job_id)
        if live is not None and sample in live.running:
            self.loop.finish_at(live.running[sample], outputs)

    async def ask(self, what: str, engine: int | None = None) -> Any:
        """A local engine has no observers to ask."""
        raise EngineDown(f"an engine in the same process does not answer questions about {what}")

    def close(self) -> None:
        """Abort all jobs and give the engine's thread and memory back."""
        for job_id in list(self._jobs):
            self.abort(job_id)
        self.info = None
        self.loop.close()

    # ---- events of jobs -------------------------------------------------------------------------------------------

    def step(self, until_s: float | None = None) -> None:
        """Compute a pass, or wait until there may be one but not beyond `until_s`; then call the sinks."""
        events = self.loop.step(until_s)
        self.now_s = events.committed_s
        touched: dict[str, LocalJob] = {}
        self._take_prompts(events)
        self._take_tokens(events, touched)
        self._take_ends(events, touched)
        for live in touched.values():
            if not live.running:
                self._jobs.pop(live.job.id, None)
            live.sink.flush()

    def _take_prompts(self, events: PassEvents) -> None:
        for admitted in events.admitted:
            if admitted.id in self._owners and not admitted.resumed:
                self._queue_s[admitted.id] = admitted.waited_s
        for id, (first, values) in events.prompt_logprobs.items():
            owner = self._owners.get(id)
            if owner is not None:
                live = owner[0]
                fresh = values[live.prompt_logprobs + 1 - first :]  # a preempted request computes some of them again
                live.prompt_logprobs += len(fresh)
                live.sink.prompt_logprobs(list(fresh))

    def _take_tokens(self, events: PassEvents, touched: dict[str, LocalJob]) -> None:
        """Hot: runs once per token."""
        logprobs = events.logprobs
        for id, token, index in zip(events.owners, events.tokens, events.indexes, strict=True):
            owner = self._owners.get(id)
            if owner is None:
                continue
            live, sample = owner
            self._accept(live)
            live.sink.token(sample, token, logprobs.get((id, index)) if logprobs else None)
            touched[live.job.id] = live

    def _take_ends(self, events: PassEvents, touched: dict[str, LocalJob]) -> None:
        for end in events.finished:
            owner = self._owners.pop(end.id, None)
            queue_s = self._queue_s.pop(end.id, 0.0)
            if owner is None:
                continue
            live, sample = owner
            del live.running[sample]
            self._accept(live)
            live.sink.ended(sample, Ending.of(end, queue_s))
            touched[live.job.id] = live

    def _accept(self, live: LocalJob) -> None:
        if not live.accepted:
            live.accepted = True
            live.sink.accepted()


class WakeClock(WallClock):
    """Wall time; a wait ends early when another thread calls wake()."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - self.now_s()
        if left_s > 0:
            self._event.wait(left_s)
        self._event.clear()


class EngineThread:
    """Steps a LocalClient in a thread of its own until close(), and closes it then. Its loop must use `clock`."""

    def __init__(self, client: LocalClient, clock: WakeClock, on_stop: Callable[[Exception | None], None]) -> None:
        self._client = client
        self._clock = clock
        self._on_stop = on_stop  # called in the engine's thread when it stops; with the error, if one stopped it
        self._work: queue.SimpleQueue[Callable[[LocalClient], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = self._stopped = False
        client.loop.open_ended = True  # other threads may always submit more
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[LocalClient], None]) -> None:
        """Run this between two passes, in the engine's thread; at once, with a client that is down, if it stopped."""
        with self._lock:
            if not self._stopped:
                self._work.put(work)
                self._clock.wake()
                return
        work(self._client)

    def call_later(self, work: Callable[[LocalClient], None]) -> None:
        """As call(), for finalizers: takes no lock. An idle engine sees it within IDLE_S, a stopped one never."""
        self._work.put(work)

    def stop(self) -> None:
        """Stop after the pass that is being computed, or within IDLE_S. For finalizers, too: takes no lock."""
        self._closing = True

    def close(self) -> None:
        """Stop after the pass that is being computed; returns when the client is closed."""
        self.stop()
        self._clock.wake()
        self._thread.join()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while not self._closing:
                self._do_work()
                self._client.step(self._client.loop.clock.now_s() + IDLE_S)
        except Exception as caught:
            log.exception("the engine stopped")
            error = caught
            self._client.trouble = f"the engine stopped: {type(error).__name__}: {error}; make a new one"
        with self._lock:
            self._stopped = True
            self._client.info = None
        self._on_stop(error)
        self._do_work()  # work that came too late fails instead of waiting for ever
        self._client.close()

    def _do_work(self) -> None:
        while not self._work.empty():
            self._work.get()(self._client)
