"""A call: all jobs of one HTTP request while they run.

Owns what ends the call early (a refusal, a failure, a client that disconnects) and the one task that waits for it; the
tokens, text and logprobs are in output/. Everything here happens on the event loop. Knows no HTTP and no JSON.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from shoal.core.job import Ending, Refusal, Sink
from shoal.core.ports import EngineClient
from shoal.core.request import Logprobs, Reason
from shoal.core.turns import TurnTaker
from shoal.errors import DeadlinePassed
from shoal.keys.ledger_client import Reservation
from shoal.output.outputs import Outputs
from shoal.output.sample import Sample
from shoal.server.prepared import PreparedRequest
from shoal.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def uncounted(entries: int) -> None:
    """More logprobs are kept, and they are not counted."""


class Call:
    """All jobs of one HTTP request: submitted together, aborted together."""

    def __init__(
        self,
        client: EngineClient,
        prepared: PreparedRequest,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        reservation: Reservation | None = None,
    ) -> None:
        self.client = client
        self.prepared = prepared
        self.outputs = Outputs(prepared.jobs, tokenizer, eos, prepared.make_parser)
        self.began_s = time.monotonic()
        self.first_token_s = 0.0
        self.gone = False  # the client disconnected
        self.error: Exception | None = None
        self.submitted = False
        self.undecided = len(prepared.jobs)  # jobs neither accepted nor refused
        self.on_logprobs: Callable[[int], None] = uncounted  # called as more of them are kept
        self.reservation = reservation or Reservation()  # of its key's limits
        self.reservation.follow(self._used)
        self._waiter: asyncio.Future[None] | None = None

    # ---- called by the HTTP side ------------------------------------------------------------------------------------

    async def submit(self, sinks: Sequence[Sink]) -> None:
        """Submit all jobs; raises what the engine client raises, and then none of them runs."""
        self.submitted = True
        pause = TurnTaker()
        await pause.turn()  # there may be a thousand of them, and preparing them has taken a while
        try:
            for job, sink in zip(self.prepared.jobs, sinks, strict=True):
                if self.gone or self.error is not None:
                    return
                self.client.submit(job, sink)
                await pause.if_long()
        except BaseException:
            self.submitted = False
            self.abort()
            self.settle()
            raise

    def abort(self) -> None:
        """Abort the jobs that still run."""
        for job in self.prepared.jobs:
            self.client.abort(job.id)

    def disconnected(self) -> None:
        """The client disconnected: its jobs are no longer needed."""
        if not self.gone:
            self.gone = True
            self.abort()
            self.settle()
            self.wake()

    def fail(self, error: Exception) -> None:
        """One job failed: the answer is this error, and the other jobs are aborted."""
        if self.error is None:
            self.error = error
            self.abort()
            self.settle()
            self.wake()

    def settle(self) -> None:
        """It has ended: its key is charged for what it used. Before the client can know, which may ask again at once.

        What was refused costs nothing. A client that disconnects, or whose own timeout passed, pays for its prompt,
        even if it still waited: the engine may have computed it.
        """
        too_late = isinstance(self.error, DeadlinePassed) and self.prepared.jobs[0].timeout_s is not None
        refused = not self._begun and not too_late and (self.error is not None or not self.submitted)
        self.reservation.settle(0 if refused else self.outputs.prompt_tokens + self.outputs.output_tokens)

    @property
    def _begun(self) -> bool:
        """Whether a job was accepted: its first token has come."""
        return self.undecided < len(self.prepared.jobs)

    def _used(self) -> int:
        """Tokens so far, for the key's limits."""
        return self.outputs.prompt_tokens + self.outputs.output_tokens if self._begun else 0

    @property
    def over(self) -> bool:
        return self.outputs.running == 0 or self.gone or self.error is not None

    @property
    def decided(self) -> bool:
        return self.undecided == 0 or self.gone or self.error is not None

    async def change(self) -> None:
        """Wait for the next wake(); at most one task waits."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- called by the sinks ----------------------------------------------------------------------------------------

    def accepted(self) -> None:
        self.undecided -= 1
        if self.undecided == 0:
            self.wake()

    def refused(self, refusal: Refusal) -> None:
        self.fail(refusal.as_error())

    def first_token(self) -> None:
        self.first_token_s = time.monotonic()

    def ended(self, sample: Sample, ending: Ending) -> str:
        """Returns the rest of its text. A sample that failed fails the whole request."""
        if ending.reason == Reason.ERROR.value:
            self.fail(ending.as_error())
            return ""
        rest = self.outputs.end(sample, ending)
        if self.outputs.running == 0:
            self.settle()
        late = ending.reason in (Reason.TIMEOUT.value, Reason.REJECTED.value)
        if late and self.outputs.running == 0 and not self.outputs.output_tokens:
            self.fail(DeadlinePassed("the request timed out before its first token; raise timeout or retry later"))
        return rest


class CollectSink(Sink):
    """One job of a request that is answered at the end, as a whole."""

    def __init__(self, call: Call, number: int) -> None:
        self.call = call
        self.number = number
        self.job_id = call.prepared.jobs[number].id
        self.samples = call.outputs.samples[number]

    def refused(self, refusal: Refusal) -> None:
        self.call.refused(refusal)

    def accepted(self) -> None:
        self.call.accepted()

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        self.call.outputs.prompt_logprobs[self.number].extend(values)
        self.call.on_logprobs(sum(1 + len(one.top_tokens) for one in values))

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        one = self.samples[sample]
        if one.stopped:
            return
        if not self.call.first_token_s:
            self.call.first_token()
        if self.call.prepared.prompt_only:
            return
        try:
            one.take(token, logprobs)
        except Exception as error:  # must not reach the engine client, which serves other jobs too
            self.call.fail(error)
            return
        if logprobs is not None:
            self.call.on_logprobs(1 + len(logprobs.top_tokens))
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
