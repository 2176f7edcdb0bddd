"""Beam search: the likeliest continuations of a prompt, found in a front with requests of one token each.

Owns the search. A beam's tokens are in the prefix cache but for its last block, so that a step computes few of them
again. To a Call it is an EngineClient whose jobs come back whole: the n best beams of each, the best first. Everything
happens on the event loop. Knows no HTTP.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any

from shoal.core.job import Ending, EngineInfo, Job, Refusal, Sink
from shoal.core.params import MAX_LOGPROBS
from shoal.core.ports import EngineClient
from shoal.core.report import EngineStatus
from shoal.core.request import Logprobs, Reason
from shoal.errors import EngineError, ShoalError

log = logging.getLogger(__name__)

MOST_BEAMS = MAX_LOGPROBS // 2  # each is continued in twice as many ways


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens of an answer so far, and how likely they are together."""

    logprob: float = 0.0
    tokens: tuple[int, ...] = ()
    known: tuple[Logprobs, ...] = ()
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        length = len(self.tokens) - self.ended
        return self.logprob / float(max(1, length) ** length_penalty)


class StepSink(Sink):
    """One beam's next token."""

    def __init__(self) -> None:
        self.logprobs: Logprobs | None = None
        self.done: asyncio.Future[Logprobs | None] = asyncio.get_running_loop().create_future()

    def refused(self, refusal: Refusal) -> None:
        self._fail(refusal.as_error())

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        self.logprobs = logprobs

    def ended(self, sample: int, ending: Ending) -> None:
        if ending.reason == Reason.ERROR.value:
            self._fail(ending.as_error())
        elif not self.done.done():
            self.done.set_result(self.logprobs)

    def _fail(self, error: ShoalError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def accepted(self) -> None: ...

    def prompt_logprobs(self, values: list[Logprobs]) -> None: ...

    def flush(self) -> None: ...


class BeamClient:
    """Submits the steps of beam searches to an engine client."""

    def __init__(self, client: EngineClient, length_penalty: float) -> None:
        self._client, self._length_penalty = client, length_penalty
        self._searches: dict[str, asyncio.Task[None]] = {}
        self._steps: dict[str, list[str]] = {}  # job → the jobs of its current step

    # ---- EngineClient, as a Call uses it ----------------------------------------------------------------------------

    def submit(self, job: Job, sink: Sink) -> None:
        self._searches[job.id] = asyncio.create_task(self._run(job, sink))

    def abort(self, job_id: str) -> None:
        search = self._searches.pop(job_id, None)
        if search is not None and search is not asyncio.current_task():
            search.cancel()
        for step in self._steps.pop(job_id, ()):
            self._client.abort(step)

    def finish_at(self, job_id: str, sample: int, outputs: int) -> None: ...

    @property
    def info(self) -> EngineInfo | None:
        return self._client.info

    @property
    def last_info(self) -> EngineInfo | None:
        return self._client.last_info

    @property
    def engines(self) -> Sequence[EngineStatus]:
        return self._client.engines

    @property
    def accepting(self) -> bool:
        return self._client.accepting

    @property
    def trouble(self) -> str:
        return self._client.trouble

    @property
    def jobs(self) -> int:
        return self._client.jobs

    async def ask(self, what: str, engine: int | None = None) -> Any:
        return await self._client.ask(what, engine)

    # ---- the search -------------------------------------------------------------------------------------------------

    async def _run(self, job: Job, sink: Sink) -> None:
        try:
            beams = await self._search(job)
        except Exception as error:  # nothing else waits for this task
            if not isinstance(error, ShoalError):
                log.exception("a beam search failed")
                error = EngineError("the beam search failed")
            sink.refused(Refusal.of(error))
            sink.flush()
            return
        finally:
            self._steps.pop(job.id, None)
            self._searches.pop(job.id, None)
        sink.accepted()
        for sample, beam in enumerate(beams):
            for token, known in zip(beam.tokens, beam.known, strict=True):
                sink.token(sample, token, None if job.params.logprobs is None else cut(known, job.params.logprobs))
            reason = Reason.STOP if beam.ended else Reason.LENGTH
            sink.ended(sample, Ending(reason.value, beam.tokens[-1] if beam.ended else None))
        sink.flush()

    async def _search(self, job: Job) -> list[Beam]:
        """The n best beams."""
        width, info = job.params.n, self._client.last_info
        most = job.params.max_tokens or (1 if info is None else info.max_model_len - len(job.prompt))
        beams, done = [Beam()], list[Beam]()
        for step in range(most):
            found = await self._step(job, step, beams)
            ways = [way for beam, known in zip(beams, found, strict=True) if known for way in ways_on(beam, known)]
            done += [longer(way, True) for way in ways if way[2] in job.stop_ids]
            done = sorted(done, key=lambda beam: -beam.score(self._length_penalty))[:width]
            going_on = nlargest(width, (way for way in ways if way[2] not in job.stop_ids), key=lambda way: way[0])
            if not going_on:
                break
            beams = [longer(way, False) for way in going_on]
            if self._is_over(done, beams[0], width, most):
                break
        best = sorted([*done, *beams], key=lambda beam: -beam.score(self._length_penalty))[:width]
        return best + [best[-1]] * (width - len(best))  # a vocabulary may have fewer ways

    def _is_over(self, done: list[Beam], best: Beam, width: int, most: int) -> bool:
        """Whether no beam that goes on can become one of the best: it only gets less likely."""
        if len(done) < width:
            return False
        return done[-1].score(self._length_penalty) >= best.logprob / float(most ** max(0.0, self._length_penalty))

    async def _step(self, job: Job, step: int, beams: Sequence[Beam]) -> list[Logprobs | None]:
        """The likeliest next tokens of each beam."""
        ways = min(MAX_LOGPROBS, 2 * job.params.n)
        params = replace(job.params, n=1, max_tokens=1, min_tokens=0, logprobs=ways, prompt_logprobs=None)
        sinks = []
        self._steps[job.id] = []
        for number, beam in enumerate(beams):
            id, sink = f"{job.id}.{step}.{number}", StepSink()
            one = replace(job, id=id, prompt=[*job.prompt, *beam.tokens], params=params, stop_ids=frozenset())
            self._client.submit(one, sink)
            self._steps[job.id].append(id)
            sinks.append(sink)
        return list(await asyncio.gather(*(sink.done for sink in sinks)))


Way = tuple[float, Beam, int, int, Logprobs]
"""(the logprob of all tokens, the beam, its next token, the rank of that one, what is known of it)"""


def ways_on(beam: Beam, known: Logprobs) -> list[Way]:
    """The likeliest ways to continue a beam. There are thousands of them in a step, so they copy nothing."""
    pairs = zip(known.top_tokens, known.top_logprobs, strict=True)
    return [(beam.logprob + logprob, beam, token, rank, known) for rank, (token, logprob) in enumerate(pairs, 1)]


def longer(way: Way, ended: bool) -> Beam:
    """The beam with its next token."""
    logprob, beam, token, rank, known = way
    one = Logprobs(token, known.top_logprobs[rank - 1], rank, known.top_tokens, known.top_logprobs)
    return Beam(logprob, (*beam.tokens, token), (*beam.known, one), ended)


def cut(known: Logprobs, count: int) -> Logprobs:
    """With so many alternatives."""
    return replace(known, top_tokens=known.top_tokens[:count], top_logprobs=known.top_logprobs[:count])
