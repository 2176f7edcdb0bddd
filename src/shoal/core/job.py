"""A job: what a front asks of an engine, and what it is told about it.

Owns the words that cross the border between processes. A job is one prompt and n samples of its continuation. Knows
nothing of how they travel, of HTTP, of text or of scheduling.
"""

from dataclasses import dataclass

from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs

GRAMMARS = ("json_object", "json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like: any JSON object, a JSON schema, a regex, a choice (a JSON list) or a Lark grammar.

    >>> GrammarSpec("regex", "[0-9]+").kind
    'regex'
    """

    kind: str  # one of GRAMMARS
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be continued params.n times. Parameters are resolved: no None where the model has a default."""

    id: str  # unique among all jobs alive
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()  # ids that end a sample
    tenant: str = ""  # whose limits it counts against
    salt: str = ""  # shares cached prefixes only with jobs of the same salt
    priority: int = 0  # lower goes first, where the order policy looks at it
    tier: str = ""  # the name of what it is promised; "" for the usual
    timeout_s: float | None = None  # from its arrival to its last token
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job was not taken. `kind` is the name of a class in shoal.errors."""

    kind: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How one sample ended; nothing more will be said about it."""

    reason: str  # a value of core.request.Reason
    stop_token: int | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What fronts must know about an engine that is up."""

    epoch: int  # how many times it was started before
    max_model_len: int
    vocab_size: int
    kv_tokens: int
    dtype: str
    device: str


class Sink:
    """What becomes of a job, told by the engine client on the event loop, in order. Subclass what you need.

    Either refused() and nothing else, or accepted(), then tokens, then ended() once for each sample; refused() may also
    come in between, and ends it, when there will never be an engine again. flush() comes after all that one message of
    the engine said about this job, so that a reader is woken once per pass.
    """

    def refused(self, refusal: Refusal) -> None: ...

    def accepted(self) -> None: ...

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        """Of prompt tokens 1, 2, …; the first has none. May come in several parts."""

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None: ...

    def ended(self, sample: int, ending: Ending) -> None: ...

    def flush(self) -> None: ...
