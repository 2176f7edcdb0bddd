"""A job: one prompt and n samples of its continuation, as a front submits it, and what comes back.

Owns the records that cross the border between a front and an engine, and how a job becomes the engine's requests.
Knows nothing of how the records travel, of HTTP, of text or of scheduling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal import errors
from shoal.core.events import Finished
from shoal.core.grammar import Grammar
from shoal.core.params import SamplingParams
from shoal.core.request import Group, Logprobs, Request
from shoal.core.token_rules import TokenRules, TokenSets
from shoal.errors import EngineError, Rejected, ShoalError

GRAMMARS = ("json_object", "json", "regex", "choice", "grammar", "structural_tag", "composed")


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Most tokens of reasoning, and the texts before and after it. `begun`: the prompt ends inside it."""

    tokens: int
    opens: str
    closes: str
    begun: bool


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The form of an answer: any JSON object, a JSON schema, a regex, a choice (a JSON list), a grammar in Lark or
    GBNF, a structural tag (which becomes the next), or one composed of several (text/tools/compose.py).

    >>> GrammarSpec("regex", "[0-9]+").kind
    'regex'
    """

    kind: str  # one of GRAMMARS
    text: str = ""
    thinking: ThinkingLimit | None = None  # the reasoning before it is closed after so many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be continued params.n times. Parameters are resolved: no None where the model has a default.

    A field for every request goes here and into requests_of(); the wire takes it from here.
    """

    id: str  # unique among all jobs that have not ended
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()  # ids that end a sample
    tenant: str = ""  # the key that it came with
    salt: str = ""  # prefix-cache blocks are shared only among jobs of the same salt
    priority: int = 0  # lower goes first, if the order policy uses it
    tier: str = ""  # the name of its promise; "": the default tier
    timeout_s: float | None = None  # from its arrival to its last token
    waited_s: float = 0.0  # between its arrival and this submission, while there was no engine or an earlier one
    grammar: GrammarSpec | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # the tokens of params.bad_words


def requests_of(
    job: Job, outputs: Mapping[int, Sequence[int]] | None = None, grammars: Mapping[int, Grammar] | None = None
) -> list[Request]:
    """The job's samples as requests of the engine, one each.

    `outputs`: sample → tokens it has already, for a job that goes on; only the samples in it are made. `grammars`: the
    compiled grammar of each sample, if the job has one.

    >>> job = Job(id="a", prompt=[1, 2], params=SamplingParams(n=2), seed=7)
    >>> [request.id for request in requests_of(job)]
    ['a.0', 'a.1']
    """
    if outputs is None:
        outputs = dict.fromkeys(range(job.params.n), ())
    group = Group(job.id) if len(outputs) > 1 else None
    sets = token_sets(job)
    return [
        Request(
            f"{job.id}.{sample}",
            job.prompt,
            job.params,
            seed=job.seed,
            sample=sample,
            stop_ids=job.stop_ids,
            group=group,
            tenant=job.tenant,
            salt=job.salt,
            output=output,
            priority=job.priority,
            tier=job.tier,
            timeout_s=job.timeout_s,
            waited_s=job.waited_s,
            grammar=ruled(sets, grammars[sample] if grammars else None, output),
        )
        for sample, output in outputs.items()
    ]


def token_sets(job: Job) -> TokenSets | None:
    """What the job's samples may draw, beside their grammar; None: anything."""
    allowed = job.params.allowed_token_ids
    if allowed is None and not job.bad_words:
        return None
    least = job.params.min_tokens if job.grammar is None else 0  # a grammar may end before
    return TokenSets(allowed, job.bad_words, job.stop_ids, least)


def ruled(sets: TokenSets | None, grammar: Grammar | None, output: Sequence[int]) -> Grammar | None:
    """What a sample with this output may draw: its grammar, within these rules."""
    return grammar if sets is None else TokenRules(sets, grammar, output)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job was refused. `kind` is the name of a class in shoal.errors."""

    kind: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: ShoalError) -> "Refusal":
        """
        >>> from shoal.errors import QueueFull
        >>> Refusal.of(QueueFull("the queue is full", retry_after_s=2.0)).kind
        'QueueFull'
        """
        return cls(type(error).__name__, str(error), error.retry_after_s if isinstance(error, Rejected) else None)

    def as_error(self) -> ShoalError:
        """The exception it was made of; EngineError for a kind that is not known."""
        kind = getattr(errors, self.kind, None)
        if not isinstance(kind, type) or not issubclass(kind, ShoalError):
            return EngineError(f"{self.kind}: {self.message}")
        return kind(self.message, self.retry_after_s) if issubclass(kind, Rejected) else kind(self.message)


@dataclass(frozen=True, slots=True)
class Ending:
    """How one sample ended; nothing more comes for it."""

    reason: str  # a value of core.request.Reason
    stop_token: int | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    error: str = ""
    kind: str = ""  # of the error: the name of a class in shoal.errors, where the engine is not to blame

    @classmethod
    def of(cls, end: Finished, queue_s: float) -> "Ending":
        """As the engine recorded it. `queue_s`: how long it waited."""
        return cls(end.reason.value, end.stop_token, end.cached_tokens, end.preemptions, queue_s, end.error, end.kind)

    def as_error(self) -> ShoalError:
        """The exception of a sample that failed."""
        if self.kind:
            return Refusal(self.kind, self.error).as_error()
        return EngineError(self.error or "the engine failed on this request")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What fronts need to know of an engine that is up."""

    epoch: int  # number of starts before this one
    max_model_len: int
    vocab_size: int
    kv_tokens: int
    dtype: str
    device: str
    block_size: int = 0  # tokens of a KV block that later requests can hit; 0: none can
    role: str = ""  # prefill or decode; "": both
    outbox: str = ""  # where decode engines find the blocks that a prefill engine has computed


class Sink:
    """Receives the events of one job, in order, in the thread that runs the engine client; subclass what you need.

    Either refused() and nothing else, or accepted(), then tokens, then ended() once for each sample. refused() may also
    come in between and ends the job, when no engine will come back. flush() follows the events of one message of the
    engine, so that a reader wakes up once per pass.
    """

    def refused(self, refusal: Refusal) -> None: ...

    def accepted(self) -> None: ...

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        """Of prompt tokens 1, 2, …; token 0 has none. May come in several parts."""

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None: ...

    def ended(self, sample: int, ending: Ending) -> None: ...

    def flush(self) -> None: ...
