"""OpenAI's /v1/completions: one or more prompts in, a continuation of each out.

Owns the body's fields, the answer's fields and the chunks of a stream. Knows the Preparer and a Call; no HTTP.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from msgspec import UNSET, Struct, UnsetType

from shoal.core.params import MAX_SAMPLES
from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed, content_of
from shoal.output.sample import Sample
from shoal.server.bodies import GenerationBody, Nothing, TokenId, limits, read
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import (
    ChunkFrame,
    ChunkStream,
    FinishReason,
    Usage,
    answer_pieces,
    choice_pieces,
    encode,
    filled,
    reason_of,
    shown_ids,
    usage_of,
)
from shoal.server.errors import BadField, HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import (
    LegacyLogprobs,
    PromptLogprobs,
    TokenNames,
    TokenRun,
    completion_logprobs,
    completion_pieces,
    mean_logprob,
    prompt_pieces,
)
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from shoal.server.prompt_reader import NO_TOKENIZER

IDS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": IDS_SCHEMA},
    ],
    "description": "A text, several texts, the token ids of one prompt, or those of several.",
}


# ---- the body


class CompletionRequest(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | TokenId | list[TokenId]]  # ids cannot be mixed with other things; see prompts()
    best_of: Annotated[int, limits("n")] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, limits("logprobs")] | None = None
    suffix: Nothing = None

    def prompts(self) -> list[str | list[int]] | None:
        """One or more prompts, each a text or token ids; None where the list mixes ids with other things.

        >>> CompletionRequest(prompt=[1, 2]).prompts(), CompletionRequest(prompt=["a", [3]]).prompts()
        ([[1, 2]], ['a', [3]])
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))  # quick: there may be half a million ids
        if int not in kinds:
            return cast("list[str | list[int]]", self.prompt)
        return [cast("list[int]", self.prompt)] if len(kinds) == 1 else None


def samples_of(body: CompletionRequest) -> tuple[int, int]:
    """(answers shown, answers sampled) for each prompt."""
    keep = 1 if body.n is None else body.n
    if body.best_of is None or body.best_of == keep:
        return keep, keep
    if not 1 <= body.best_of <= MAX_SAMPLES:
        raise BadField("best_of", f"best_of must be between 1 and {MAX_SAMPLES}, not {body.best_of}")
    if body.best_of < keep:
        raise BadField("best_of", f"best_of is {body.best_of}, less than n, which is {keep}; raise it")
    if body.stream:
        raise BadField("best_of", "best_of above n cannot be streamed: the best is known only at the end")
    if keep < 1:
        raise BadField("n", f"n must be at least 1, not {keep}")
    return keep, body.best_of


# ---- the answer


class CompletionChoice(Struct):
    """One answer. stop_reason: the stop string or stop token id that ended it, null for an end token."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(Struct):
    """POST /v1/completions, when not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct):
    """One event of a streamed /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# ---- the dialect


class Completions:
    """OpenAI's completions."""

    path = "/v1/completions"
    id_prefix = "cmpl-"
    operation = Operation(
        "Continue a prompt",
        CompletionRequest,
        CompletionAnswer,
        CompletionChunk,
        {"prompt": "Once upon a time", "max_tokens": 16},
        {"prompt": PROMPT_SCHEMA},
    )

    def __init__(self, preparer: Preparer, names: TokenNames) -> None:
        self.preparer = preparer
        self.names = names

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        return await prepare_completion(self.preparer, await read(CompletionRequest, body), id, key)

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        prepared = call.prepared
        choices = (
            self._choice(call, job, sample, job * prepared.keep + rank)
            for job in range(len(prepared.jobs))
            for rank, sample in enumerate(best_of(call.outputs.samples[job], prepared.keep))
        )
        answer = CompletionAnswer(id, "text_completion", created, prepared.model, [], usage_of(call))
        return answer_pieces(answer, choices)

    def _choice(self, call: Call, job: int, sample: Sample, index: int) -> Iterator[bytes]:
        prepared = call.prepared
        of_prompt = prepared.prompt_top
        choice = CompletionChoice(
            index,
            echo_of(prepared, job) + content_of(sample.parsed),
            None,
            reason_of(sample),
            sample.stop_reason,
            shown_ids(prepared, sample.tokens),
            shown_ids(prepared, prepared.jobs[job].prompt),
            UNSET if of_prompt is None else None,
        )
        logprobs = None if prepared.top is None else self._logprobs(call, job, sample, prepared.top)
        pieces = choice_pieces(choice, logprobs)
        if of_prompt is None:
            return pieces
        known = call.outputs.prompt_logprobs[job]
        names = self.names.written(prepared.tokens_as_ids)
        return filled(pieces, b'"prompt_logprobs":null', prompt_pieces(names, known, of_prompt))

    def _logprobs(self, call: Call, job: int, sample: Sample, top: int) -> Iterator[bytes]:
        prepared = call.prepared
        runs = [TokenRun(sample.tokens, sample.logprobs, len(echo_of(prepared, job)))]
        if prepared.echo is not None:
            runs.insert(0, TokenRun(prepared.jobs[job].prompt, call.outputs.prompt_logprobs[job], 0, skipped=1))
        return completion_pieces(self.names.written(prepared.tokens_as_ids), runs, top, prepared.skip_special)

    def stream(self, call: Call, id: str, created: int) -> "CompletionChunkStream":
        return CompletionChunkStream(call, self.names.written(call.prepared.tokens_as_ids), id, created)

    def error(self, error: HttpError) -> bytes:
        return error.body()


async def prepare_completion(
    preparer: Preparer, request: CompletionRequest, id: str, key: ApiKey | None
) -> PreparedRequest:
    model = preparer.check_model(request.model)
    prompts = request.prompts()
    if prompts is None:
        raise BadField("prompt", "prompt mixes token ids with other things; put each list of ids into a list")
    if not prompts:
        raise BadField("prompt", "prompt is an empty list; give at least one prompt")
    keep, sampled = samples_of(request)
    limit = request.max_tokens
    prompt_only = limit == 0 and (bool(request.echo) or request.prompt_logprobs is not None)
    if prompt_only:  # the prompt's logprobs need a pass, and a pass draws a token
        limit = 1
    params = preparer.params(
        request,
        n=sampled,
        max_tokens=limit if limit is not None else preparer.settings.default_max_tokens,
        logprobs=request.logprobs if sampled == keep else request.logprobs or 0,  # best_of ranks by them
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    if prompt_only:
        params = replace(params, ignore_eos=True, stop_token_ids=())
    preparer.check_count(len(prompts), sampled, "n" if sampled == keep else "best_of")
    if request.echo and preparer.tokenizer is None:
        raise BadField("echo", f"echo cannot be used: {NO_TOKENIZER}")
    if request.echo and request.stream and request.logprobs is not None and sampled > 1:
        raise BadField("echo", "echo with logprobs and n above 1 cannot be streamed; leave one of them out")
    ids = await preparer.encode(
        prompts, request.add_special_tokens is not False, preparer.token_cut(request, params.max_tokens)
    )
    if request.echo and request.truncate_prompt_tokens is not None:
        prompts = [*ids]
    echo = await preparer.texts(prompts, params) if request.echo else None
    return await preparer.request(
        request,
        id,
        key,
        ids,
        params,
        model=model,
        keep=keep,
        top=None if request.logprobs is None else params.logprobs,
        echo=echo,
        prompt_only=prompt_only,
    )


def best_of(samples: list[Sample], keep: int) -> list[Sample]:
    """The samples that are shown: all, or the likeliest per token, the best first."""
    if keep == len(samples):
        return samples
    return sorted(samples, key=lambda sample: -mean_logprob(sample.logprobs))[:keep]


def echo_of(prepared: PreparedRequest, job: int) -> str:
    return "" if prepared.echo is None else prepared.echo[job]


def prompt_logprobs(call: Call, names: TokenNames, job: int) -> LegacyLogprobs:
    prepared = call.prepared
    known = [None, *call.outputs.prompt_logprobs[job]]  # a first token has none
    return completion_logprobs(names, prepared.jobs[job].prompt, known, prepared.top or 0, 0, prepared.skip_special)


class CompletionChunkStream(ChunkStream):
    """The events of one streamed completion; an echoed prompt waits for its logprobs, which come with the tokens."""

    opens_on_accept = False

    def __init__(self, call: Call, names: TokenNames, id: str, created: int) -> None:
        super().__init__(call, "text_completion", id, created)
        self.names = names

    def choice(self, job: int, sample: Sample) -> "CompletionChunks":
        return CompletionChunks(self, job, sample)


class CompletionChunks(ChunkFrame):
    """The events of one sample."""

    __slots__ = ("call", "job", "names", "offset", "prepared")

    def __init__(self, stream: CompletionChunkStream, job: int, sample: Sample) -> None:
        super().__init__(stream, sample, b'"text":', b"")
        self.call = stream.call
        self.names = stream.names
        self.prepared = stream.call.prepared
        self.job = job
        self.offset = 0  # where in the text the next token begins, for logprobs

    def opening(self) -> bytes:
        prepared = self.prepared
        if prepared.echo is None and not prepared.token_ids:
            return b""
        shown = b"null"
        if prepared.echo is not None and prepared.top is not None:
            self.offset = len(prepared.echo[self.job])
            shown = encode(prompt_logprobs(self.call, self.names, self.job))
        first = self.sample.index == self.job * prepared.keep  # the other samples have the same prompt
        ids = b""
        if prepared.token_ids and first:
            ids = b',"prompt_token_ids":%b' % encode(prepared.jobs[self.job].prompt)
        return self.full(echo_of(prepared, self.job), shown, ids)

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        top, skip, shown = self.prepared.top, self.prepared.skip_special, b"null"
        if top is not None and logprobs:
            shown = encode(completion_logprobs(self.names, tokens, logprobs, top, self.offset, skip))
            self.offset += sum(self.names.length_of(token, skip) for token in tokens)
        ids = b',"token_ids":%b' % encode(tokens) if self.prepared.token_ids else b""
        return self.full(parsed, shown, ids)

    def end(self, parsed: Parsed) -> bytes:
        return self.last(self.field(parsed), self.prepared.token_ids)
