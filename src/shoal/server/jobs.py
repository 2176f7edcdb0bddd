"""A call: all jobs of one HTTP request while they run, and the text made of their tokens.

Owns the detokenizers, the stop strings found in them, and who waits for what. Everything here happens on the event
loop. Knows no HTTP and no JSON; stream.py writes events, compose.py whole answers.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from shoal.core.job import Ending, Job, Refusal, Sink
from shoal.core.ports import EngineClient
from shoal.core.request import Logprobs, Reason
from shoal.errors import DeadlinePassed, EngineError
from shoal.server.errors import as_error
from shoal.server.prepare import PreparedRequest
from shoal.text.detok import Detokenizer
from shoal.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Sample:
    """One answer on its way: tokens in, text out. Cut where a stop string ends it, as in llm.py."""

    __slots__ = (
        "detok",
        "ending",
        "include_stop",
        "index",
        "logprobs",
        "min_tokens",
        "number",
        "reason",
        "stop_ids",
        "stop_reason",
        "tokens",
    )  # fmt: skip

    def __init__(self, job: Job, number: int, index: int, detok: Detokenizer | None) -> None:
        self.number = number  # among the samples of its job
        self.index = index  # among all answers of the HTTP request
        self.detok = detok
        self.stop_ids = job.stop_ids
        self.min_tokens = job.params.min_tokens
        self.include_stop = job.params.include_stop_str_in_output
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.ending: Ending | None = None
        self.reason: str | None = None  # why it ended, as the client is told
        self.stop_reason: str | int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; tokens that still come are too late."""
        return self.detok is not None and self.detok.stopped is not None

    def take(self, token: int, logprobs: Logprobs | None) -> str:
        """The next token; the text that may be shown now."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        detok = self.detok
        if detok is None:
            return ""
        if token in self.stop_ids and len(self.tokens) > self.min_tokens and not self.include_stop:
            return ""  # it ends here, and its last token is not shown
        text = detok.push(token)
        if detok.stop_at is not None:
            self._cut(detok.stop_at)
        return text

    def end(self, ending: Ending, eos: bool) -> str:
        """No more tokens; the text that was held back."""
        rest = ""
        if self.detok is not None and not self.stopped:
            rest = self.detok.finish()
            if self.detok.stop_at is not None:  # found only now, in text that was held back
                self._cut(self.detok.stop_at)
        self.ending = ending
        self.reason, self.stop_reason = ending.reason, None if eos else ending.stop_token
        if self.stopped and self.detok and ending.reason in (Reason.STOP.value, Reason.LENGTH.value):
            self.reason, self.stop_reason = Reason.STOP.value, self.detok.stopped
        return rest

    def _cut(self, at: int) -> None:
        del self.tokens[at:], self.logprobs[at:]


class Call:
    """All jobs of one HTTP request: submitted together, given up together."""

    def __init__(
        self, client: EngineClient, prepared: PreparedRequest, tokenizer: Tokenizer | None, eos: frozenset[int]
    ) -> None:
        self.client = client
        self.prepared = prepared
        self.eos = eos
        self.began_s = time.monotonic()
        self.first_token_s = 0.0
        self.gone = False  # the client went away
        self.error: Exception | None = None
        self.undecided = len(prepared.jobs)  # jobs neither accepted nor refused
        self.left = sum(job.params.n for job in prepared.jobs)  # samples that have not ended
        self._waiter: asyncio.Future[None] | None = None
        self.samples: list[list[Sample]] = []  # of each job
        index = 0
        for job in prepared.jobs:
            self.samples.append([Sample(job, n, index + n, _detok(tokenizer, job)) for n in range(job.params.n)])
            index += job.params.n
        self.prompt_logprobs: list[list[Logprobs | None]] = [[None] for _ in prepared.jobs]  # the first token has none

    # ---- by the HTTP side -----------------------------------------------------------------------------------------

    def submit(self, sinks: Sequence[Sink]) -> None:
        """Ask for all jobs; raises what the engine client raises, and then none of them runs."""
        try:
            for job, sink in zip(self.prepared.jobs, sinks, strict=True):
                self.client.submit(job, sink)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End whatever still runs."""
        for job in self.prepared.jobs:
            self.client.abort(job.id)

    def leave(self) -> None:
        """The client went away: nobody waits for these jobs any more."""
        if not self.gone:
            self.gone = True
            self.abort()
            self.wake()

    def fail(self, error: Exception) -> None:
        """One part failed: the answer is this error, and the other parts are of no use."""
        if self.error is None:
            self.error = error
            self.abort()
            self.wake()

    @property
    def over(self) -> bool:
        return self.left == 0 or self.gone or self.error is not None

    @property
    def decided(self) -> bool:
        return self.undecided == 0 or self.gone or self.error is not None

    async def change(self) -> None:
        """Wait until something has happened; at most one waits."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- by the sinks ---------------------------------------------------------------------------------------------

    def accepted(self) -> None:
        self.undecided -= 1
        if self.undecided == 0:
            self.wake()

    def refused(self, refusal: Refusal) -> None:
        self.fail(as_error(refusal))

    def token(self, job: int, sample: Sample, token: int, logprobs: Logprobs | None) -> str:
        if not self.first_token_s:
            self.first_token_s = time.monotonic()
        return sample.take(token, logprobs)

    def ended(self, sample: Sample, ending: Ending) -> str:
        """The rest of its text. An answer that could not be made fails the whole request."""
        if ending.reason == Reason.ERROR.value:
            self.fail(EngineError(ending.error or "the engine failed on this request"))
            return ""
        rest = sample.end(ending, eos=ending.stop_token in self.eos)
        self.left -= 1
        late = ending.reason in (Reason.TIMEOUT.value, Reason.REJECTED.value)
        if late and self.left == 0 and not self.output_tokens:
            self.fail(DeadlinePassed("the request's time was over before its first token; raise timeout or ask later"))
        return rest

    # ---- what it took ---------------------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.prepared.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(len(one.tokens) for samples in self.samples for one in samples)

    @property
    def cached_tokens(self) -> int:
        """Of each prompt, what was there before: later samples also find what the first one has computed."""
        return sum(
            min((one.ending.cached_tokens for one in samples if one.ending), default=0) for samples in self.samples
        )

    @property
    def queue_s(self) -> float:
        endings = [one.ending for samples in self.samples for one in samples if one.ending]
        return max((ending.queue_s for ending in endings), default=0.0)


def _detok(tokenizer: Tokenizer | None, job: Job) -> Detokenizer | None:
    if tokenizer is None:
        return None
    params = job.params
    return Detokenizer(
        tokenizer,
        job.prompt,
        tuple(params.stop),
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.min_tokens,
    )


class CollectSink(Sink):
    """One job of a request that is answered as a whole, at the end."""

    def __init__(self, call: Call, number: int) -> None:
        self.call = call
        self.number = number
        self.job_id = call.prepared.jobs[number].id
        self.samples = call.samples[number]

    def refused(self, refusal: Refusal) -> None:
        self.call.refused(refusal)

    def accepted(self) -> None:
        self.call.accepted()

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        self.call.prompt_logprobs[self.number] += values

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        one = self.samples[sample]
        if one.stopped:
            return
        try:
            self.call.token(self.number, one, token, logprobs)
        except Exception as error:  # must not reach the engine client: it has other jobs to tell
            self.call.fail(error)
            return
        if one.stopped:
            self.call.client.finish_at(self.job_id, sample, len(one.tokens))

    def ended(self, sample: int, ending: Ending) -> None:
        try:
            self.call.ended(self.samples[sample], ending)
        except Exception as error:
            self.call.fail(error)

    def flush(self) -> None:
        if self.call.over:
            self.call.wake()
