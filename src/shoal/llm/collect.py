"""The jobs of one call while they run: the engine's events become chunks, and in the end outputs.

Owns the samples of the call and their times. Everything here happens in the thread that steps the engine. Knows the
local client; no event loop.
"""

from collections import deque
from collections.abc import Callable, Sequence

from shoal.core.job import Ending, Job, Refusal, Sink
from shoal.core.request import Logprobs, Reason
from shoal.engine.local import LocalClient
from shoal.llm.records import Chunk, Completion, RequestMetrics, RequestOutput
from shoal.llm.words import reworded
from shoal.output.outputs import Outputs
from shoal.output.sample import Sample
from shoal.text.tokenizer import Tokenizer


class Collection:
    """What the jobs of one call have produced so far."""

    def __init__(self, jobs: Sequence[Job], tokenizer: Tokenizer | None, streams: bool) -> None:
        self.jobs = jobs
        self.tokenizer = tokenizer
        self.streams = streams  # chunks are kept for a reader
        self.outputs = Outputs(jobs, tokenizer, frozenset())  # no ids apart: an end token is named as stop_reason
        self.chunks: deque[Chunk] = deque()
        self.completions: list[list[Completion]] = [[] for _ in jobs]
        self.error: Exception | None = None  # the call failed as a whole
        self.on_change: Callable[[], None] = lambda: None  # called for each job to which a pass brought something

    @property
    def running(self) -> int:
        """Samples that have not ended."""
        return 0 if self.error is not None else self.outputs.running

    def submit(self, client: LocalClient) -> None:
        """Submit all jobs or, if this raises, none."""
        try:
            for number, job in enumerate(self.jobs):
                client.submit(job, CollectionSink(self, number, client))
                if self.error is not None:
                    raise self.error
        except BaseException:  # Ctrl-C, too
            self.abort(client)
            raise

    def abort(self, client: LocalClient) -> None:
        """End the jobs that still run; what they produced is dropped."""
        for job in self.jobs:
            client.abort(job.id)
        self.outputs.running = 0
        self.chunks.clear()

    def fail(self, error: Exception) -> None:
        """The call as a whole failed: its reader raises this."""
        if self.error is None:
            self.error = reworded(error)
            self.on_change()

    def add_chunk(self, chunk: Chunk) -> None:
        if self.streams:
            self.chunks.append(chunk)

    def results(self) -> list[RequestOutput]:
        """All outputs, in the prompts' order, once every sample has ended."""
        found = []
        for job, completions, prompt_logprobs in zip(
            self.jobs, self.completions, self.outputs.prompt_logprobs, strict=True
        ):
            text = self.tokenizer.decode(job.prompt, skip_special=False) if self.tokenizer else None
            shown = [None, *prompt_logprobs] if job.params.prompt_logprobs is not None else None
            found.append(RequestOutput(text, job.prompt, sorted(completions, key=lambda one: one.index), shown))
        return found


class CollectionSink(Sink):
    """Receives the events of one job of a collection."""

    def __init__(self, collection: Collection, number: int, client: LocalClient) -> None:
        self.collection = collection
        self.number = number  # of the job in the collection
        self.job = collection.jobs[number]
        self.client = client
        self.samples = collection.outputs.samples[number]
        self.submitted_s = client.loop.clock.now_s()
        self.first_token_s: dict[int, float] = {}

    def refused(self, refusal: Refusal) -> None:
        self.collection.fail(refusal.as_error())

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        self.collection.outputs.prompt_logprobs[self.number].extend(values)

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        one = self.samples[sample]
        if one.stopped:
            return
        self.first_token_s.setdefault(sample, self.client.now_s - self.submitted_s)
        try:
            text = one.take(token, logprobs)
        except Exception as error:  # must not reach the client: it has events for other jobs
            self._fail(error)
            return
        if one.stopped:
            self.client.finish_at(self.job.id, sample, len(one.tokens))
        self.collection.add_chunk(Chunk(self.number, sample, text, [token]))

    def ended(self, sample: int, ending: Ending) -> None:
        one = self.samples[sample]
        try:
            rest = self.collection.outputs.end(one, ending)
        except Exception as error:
            self._fail(error)
            return
        reason = one.reason or ending.reason
        self.collection.add_chunk(Chunk(self.number, sample, rest, [], reason, ending.error))
        self.collection.completions[self.number].append(self._completion(one, ending, reason))

    def flush(self) -> None:
        self.collection.on_change()

    def _completion(self, one: Sample, ending: Ending, reason: str) -> Completion:
        metrics = RequestMetrics(
            len(self.job.prompt),
            len(one.tokens),
            ending.cached_tokens,
            ending.preemptions,
            None if reason == Reason.REJECTED.value and not ending.queue_s else ending.queue_s,  # None: never admitted
            self.first_token_s.get(one.number),
            self.client.now_s - self.submitted_s,
        )
        logprobs = list(one.logprobs) if self.job.params.logprobs is not None else None
        return Completion(
            one.number, one.text, one.tokens, reason, one.stop_reason, logprobs, metrics, error=ending.error
        )

    def _fail(self, error: Exception) -> None:
        for job in self.collection.jobs:  # no reader asks for the others any more
            self.client.abort(job.id)
        self.collection.fail(error)
