"""An EngineClient without an engine: a script gives the tokens of each sample, one token of each per tick.

It keeps the contract of core/ports.py: sinks are told on the event loop, in order, accepted before the first token, and
nothing after an abort. Ticks come by themselves, or by hand where a test must know what has happened.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.job import Ending, EngineInfo, Job, Refusal, Sink
from shoal.core.report import EngineStatus
from shoal.core.request import Logprobs
from shoal.errors import EngineDown

INFO = EngineInfo(epoch=0, max_model_len=512, vocab_size=422, kv_tokens=4096, dtype="float32", device="cpu")
Script = Callable[[Job, int], Sequence[int]]


def echo(job: Job, sample: int) -> Sequence[int]:
    """Repeats the prompt, rotated by the sample's number."""
    shift = sample % len(job.prompt)
    return job.prompt[shift:] + job.prompt[:shift]


def logprobs_of(token: int, alternatives: int) -> Logprobs:
    """The fake model's logprobs: the higher the id, the less likely; ids below are likelier still."""
    others = tuple(range(alternatives))
    return Logprobs(token, -token / 100, token + 1, others, tuple(-other / 100 for other in others))


@dataclass
class Running:
    job: Job
    sink: Sink
    left: dict[int, list[int]]  # sample → tokens still to come
    counts: dict[int, int] = field(default_factory=dict)
    accepted: bool = False


class FakeClient:
    """Runs every job at once, one token per sample and tick."""

    def __init__(self, script: Script = echo, *, tick_s: float | None = 0.0, cached_tokens: int = 0) -> None:
        self.script = script
        self.tick_s = tick_s  # None: ticks come by hand
        self.cached_tokens = cached_tokens
        self.running: dict[str, Running] = {}
        self.submitted: list[Job] = []
        self.aborted: list[str] = []
        self.finished_at: list[tuple[str, int, int]] = []
        self.refusal: Refusal | None = None
        self.asked: list[str] = []
        self.failure: Ending | None = None  # how every sample ends after its first token
        self.metrics = "shoal_requests_running 0\n"
        self._info: EngineInfo | None = INFO
        self.waits = False  # whether jobs wait while it is down
        self._task: asyncio.Task[None] | None = None

    # ---- EngineClient ---------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def last_info(self) -> EngineInfo | None:
        return self._info or INFO

    @property
    def engines(self) -> list[EngineStatus]:
        return [EngineStatus(0, self._info is not None, INFO.epoch)]

    @property
    def accepting(self) -> bool:
        return self._info is not None or self.waits

    @property
    def trouble(self) -> str:
        return "there is no engine"

    @property
    def jobs(self) -> int:
        return len(self.running)

    def submit(self, job: Job, sink: Sink) -> None:
        if not self.accepting:
            raise EngineDown("there is no engine")
        self.submitted.append(job)
        most = job.params.max_tokens or INFO.max_model_len - len(job.prompt)
        answers = {sample: list(self.script(job, sample))[:most] for sample in range(job.params.n)}
        self.running[job.id] = Running(job, sink, answers)
        if self.tick_s is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def abort(self, job_id: str) -> None:
        if self.running.pop(job_id, None) is not None:
            self.aborted.append(job_id)

    def finish_at(self, job_id: str, sample: int, outputs: int) -> None:
        self.finished_at.append((job_id, sample, outputs))
        one = self.running.get(job_id)
        if one is not None and sample in one.left:
            one.left[sample] = []  # ends with the next tick, as "stop"

    async def ask(self, what: str, engine: int | None = None) -> Any:
        if self._info is None:
            raise EngineDown("there is no engine")
        self.asked.append(what)
        if what == "load":
            return {"running": len(self.running), "waiting": 2}
        if what == "reset_prefix_cache":
            return {"forgotten": 7}
        return self.metrics if what == "metrics" else {"jobs": sorted(self.running)}

    # ---- the script -----------------------------------------------------------------------------------------------

    def go_down(self) -> None:
        self._info = None

    def come_up(self) -> None:
        self._info = INFO

    async def _run(self) -> None:
        assert self.tick_s is not None
        while self.running:
            await asyncio.sleep(self.tick_s)
            self.tick()

    def tick(self) -> None:
        """One pass: a token for every sample, then endings, then one flush for each job. None while it is down."""
        if self._info is None:
            return
        for one in list(self.running.values()):
            if self.refusal is not None:
                del self.running[one.job.id]
                one.sink.refused(self.refusal)
                one.sink.flush()
                continue
            self._pass(one)
            if one.job.id in self.running and not one.left:
                del self.running[one.job.id]
            one.sink.flush()

    def _pass(self, one: Running) -> None:
        params, sink = one.job.params, one.sink
        if not one.accepted:
            one.accepted = True
            sink.accepted()
            if params.prompt_logprobs is not None:
                sink.prompt_logprobs([logprobs_of(token, params.prompt_logprobs) for token in one.job.prompt[1:]])
        for sample in list(one.left):
            if one.job.id not in self.running:
                return
            self._say(one, sample)

    def _say(self, one: Running, sample: int) -> None:
        params, tokens = one.job.params, one.left[sample]
        if tokens:
            token = tokens.pop(0)
            one.counts[sample] = one.counts.get(sample, 0) + 1
            one.sink.token(sample, token, None if params.logprobs is None else logprobs_of(token, params.logprobs))
            ends = token in one.job.stop_ids and one.counts[sample] > params.min_tokens
            if self.failure is not None:
                self._end(one, sample, self.failure)
            elif ends:
                self._end(one, sample, Ending("stop", token, self.cached_tokens))
            elif not tokens and not self._was_cut(one, sample):
                self._end(one, sample, Ending("length", None, self.cached_tokens))
        else:
            self._end(one, sample, Ending("stop", None, self.cached_tokens))

    def _was_cut(self, one: Running, sample: int) -> bool:
        return any((id, number) == (one.job.id, sample) for id, number, _ in self.finished_at)

    def _end(self, one: Running, sample: int, ending: Ending) -> None:
        if one.left.pop(sample, None) is not None and one.job.id in self.running:
            one.sink.ended(sample, ending)


async def until(true: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Let the event loop run until something is true; a hang fails."""
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "this never became true"
        await asyncio.sleep(0.005)
