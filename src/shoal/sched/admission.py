"""Admission: accept a request, or refuse it with the reason.

What can never work is a BadRequest. What could be served, but not while so many wait, is refused as QueueFull with the
time after which it is worth another try. (Limits on waiting are in deadlines.py; those of API keys are the ledger's, in
keys/, and are met before a request comes here.)
Knows limits and how many wait; moves nothing, so a refusal leaves no trace.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.request import Request
from shoal.errors import BadParameter, BadRequest, EmptyPrompt, PromptTooLong, QueueFull

LONGEST_TIMEOUT_S = 1e8  # three years; for no limit the timeout is left out


@dataclass(frozen=True)
class Limits:
    """What this engine can hold at once."""

    max_model_len: int  # tokens of one sequence, prompt and output together
    max_num_seqs: int  # requests in one pass
    max_num_batched_tokens: int  # positions in one pass
    vocab_size: int

    @property
    def rows(self) -> int:
        """Rows of the runner's tables: twice as many as requests, so that a row which a late pass still reads delays
        no request."""
        return 2 * self.max_num_seqs


@dataclass(frozen=True)
class Rules:
    """What is refused although it could be served (by default nothing), and how often a request may be preempted."""

    max_queue: int = 0  # requests that wait and have never run; 0: any number
    max_wait_s: float | None = None  # from arrival to the start
    max_preemptions: int = 8  # after so many a request starts only with every block it can need, and keeps them


class Pace:
    """How fast requests have been ending lately.

    >>> pace = Pace()
    >>> for second in range(10):
    ...     pace.note(2, now_s=second)
    >>> pace.wait_s(requests=8, now_s=9)  # two a second
    4.0
    """

    REMEMBERED = 64  # records in which a request ended
    LATELY_S = 60.0
    SHORTEST_S, LONGEST_S = 1.0, 60.0

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=self.REMEMBERED)  # (when, how many)

    def note(self, ended: int, now_s: float) -> None:
        self._ends.append((now_s, ended))

    def wait_s(self, requests: int, now_s: float) -> float:
        """How long until so many more requests have ended; the shortest time while that is not known."""
        while self._ends and self._ends[0][0] < now_s - self.LATELY_S:
            self._ends.popleft()
        ended = sum(count for _, count in self._ends) - (self._ends[0][1] if self._ends else 0)  # since the first
        if not ended:
            return self.SHORTEST_S
        wait_s = requests * (now_s - self._ends[0][0]) / ended
        return min(max(wait_s, self.SHORTEST_S), self.LONGEST_S)


class Admission:
    """Checks requests against the limits. Changes neither them nor anything else."""

    def __init__(self, limits: Limits, kv_tokens: int, max_queue: int = 0) -> None:
        self.limits = limits
        self.kv_tokens = kv_tokens  # positions that fit into the whole KV cache
        self.max_queue = max_queue
        self.pace = Pace()

    def check_queue(self, waiting: int, coming: int, now_s: float) -> None:
        """Raise QueueFull if so many more would be too many."""
        most = self.max_queue
        check_room(most, waiting, coming, lambda: self.pace.wait_s(waiting + coming - most, now_s))

    def check(self, request: Request) -> int:
        """Its max_tokens. Raises BadRequest if it can never be served."""
        self._check_tokens(request)
        _check_timeout(request.timeout_s)
        max_tokens = self._check_length(request)
        if request.params.min_tokens > max_tokens:
            raise BadParameter(
                f"min_tokens is {request.params.min_tokens}, but only {max_tokens} tokens fit after this prompt"
            )
        _check_goes_on(request, max_tokens)
        return max_tokens

    def _check_length(self, request: Request) -> int:
        prompt, asked = request.prompt_len, request.params.max_tokens
        context = self.limits.max_model_len
        if prompt >= context:
            raise PromptTooLong(
                f"prompt has {prompt} tokens; the limit is {context} for prompt and output together; "
                f"shorten it to at most {context - 1} or raise --max-model-len"
            )
        if asked is not None and prompt + asked > context:
            raise PromptTooLong(
                f"prompt has {prompt} tokens and max_tokens is {asked}: {prompt + asked} together, limit {context}; "
                f"lower max_tokens to {context - prompt} or raise --max-model-len"
            )
        most = min(context, self.kv_tokens + 1) - prompt  # the last token of all is never stored
        if most < 1 or (asked is not None and asked > most):
            total = prompt + (asked or 1)
            raise PromptTooLong(
                f"prompt has {prompt} tokens, with its output {total}; the whole KV cache holds {self.kv_tokens}; "
                f"shorten it, lower max_tokens or raise --kv-memory"
            )
        return asked if asked is not None else most

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt_len:
            raise EmptyPrompt("the prompt has no tokens; give at least one (a BOS token will do)")
        vocab = self.limits.vocab_size
        own = request.ids(0, len(request.tokens))
        for token in (min(own), max(own)) if own else ():
            if not 0 <= token < vocab:
                raise BadParameter(f"token id {token} is not in the vocabulary; ids run from 0 to {vocab - 1}")
        for name, ids in (
            ("logit_bias", request.params.logit_bias or ()),
            ("stop_token_ids", request.params.stop_token_ids),
            ("allowed_token_ids", request.params.allowed_token_ids or ()),
            ("logprob_token_ids", request.params.logprob_token_ids or ()),
        ):
            for token in (min(ids), max(ids)) if ids else ():
                if not 0 <= token < vocab:
                    raise BadParameter(f"{name} names token {token}; ids run from 0 to {vocab - 1}")


def check_room(max_queue: int, waiting: int, coming: int, after_s: Callable[[], float]) -> None:
    """Raise QueueFull if so many more would be too many to wait; 0: any number may. `after_s`: when to try again."""
    if not max_queue or waiting + coming <= max_queue:
        return
    if coming > max_queue:
        raise BadParameter(f"n is {coming}, but only {max_queue} requests may wait; lower n or raise --max-queue")
    retry_s = after_s()
    raise QueueFull(
        f"{waiting} requests wait already, and at most {max_queue} may; try again in {retry_s:.0f} s, "
        f"or raise --max-queue",
        retry_s,
    )


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise BadParameter(f"timeout must be a number of seconds, not {timeout_s!r}")
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:  # nor NaN
        raise BadParameter(
            f"timeout must be above 0 and at most {LONGEST_TIMEOUT_S:.0f} seconds, not {timeout_s!r}; "
            f"leave it out for none"
        )


def _check_goes_on(request: Request, max_tokens: int) -> None:
    """A request that brings output tokens from an earlier engine must not have ended."""
    outputs = request.outputs
    if outputs >= max_tokens:
        raise BadRequest(f"it has {outputs} output tokens already and max_tokens is {max_tokens}: it has ended")
    grammar = request.grammar
    may_stop = outputs > request.params.min_tokens or (outputs > 0 and grammar is not None)
    if may_stop and request.tokens[-1] in request.stop_ids:
        raise BadRequest(f"its last token {request.tokens[-1]} is a stop token: it has ended")
    if grammar is not None and grammar.ended:
        raise BadRequest("its grammar allows no further token: it has ended")
