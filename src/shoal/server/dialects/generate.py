"""SGLang's /generate: texts or token ids in, a continuation of each out, with token ids and meta_info.

Owns the body's fields and how they become a completion's, the answer's fields, and its streams. Each event of a stream
has the whole text so far; of a long answer they come at intervals that grow with it, so that all together stay linear
in its length. Knows the Preparer and a Call; no HTTP.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from shoal.core.request import Logprobs
from shoal.errors import BadRequest
from shoal.keys.api_key import ApiKey
from shoal.output.logprob_list import LogprobList
from shoal.output.parser import Parsed, content_of
from shoal.output.sample import Sample
from shoal.server.bodies import (
    MOST_BIASES,
    MOST_SALT,
    Ignored,
    Nothing,
    RequestId,
    StructuredOutputs,
    TokenId,
    ignored_fields,
    limits,
    read,
)
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import DONE, encode, reason_of
from shoal.server.dialects.completions import CompletionRequest, prepare_completion
from shoal.server.errors import BadField, HttpError, as_http
from shoal.server.jobs import Call
from shoal.server.known_fields import NULL_ONLY, WHY
from shoal.server.logprobs import TokenNames, TokenRun, finite, triple_pieces
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest

MAX_NEW_TOKENS = 128  # where the body does not say
SMOOTH = 64  # tokens; up to so many each has an event, and later one in so many of what was sent before
WEIGHTS = "default"  # SGLang's name of weights that were never changed
# its names of sampling parameters → ours
NAMES = {
    **{name: name for name in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
        "stop", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens", "no_stop_trim", "json_schema",
        "regex", "ebnf", "logit_bias",
    )},
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
}  # fmt: skip
# our names in errors → its
THEIRS = {ours: f"sampling_params.{theirs}" for theirs, ours in NAMES.items()}
THEIRS |= {"structured_outputs.structural_tag": "sampling_params.structural_tag", "logprobs": "top_logprobs_num"}
THEIRS |= {"prompt_logprobs": "logprob_start_len", "logprob_token_ids": "token_ids_logprob"}


# ---- the body


class GenerateSampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters of /generate."""

    default_only: ClassVar = ("spaces_between_special_tokens",)

    max_new_tokens: Annotated[int, limits("max_tokens")] | None = None  # 128 by default
    min_new_tokens: Annotated[int, limits("min_tokens")] | None = None
    temperature: Annotated[float, limits("temperature")] | None = None
    top_p: Annotated[float, limits("top_p")] | None = None
    top_k: Annotated[int, limits("top_k")] | None = None
    min_p: Annotated[float, limits("min_p")] | None = None
    frequency_penalty: Annotated[float, limits("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, limits("presence_penalty")] | None = None
    repetition_penalty: Annotated[float, limits("repetition_penalty")] | None = None
    sampling_seed: Annotated[int, limits("seed")] | None = None
    n: Annotated[int, limits("n")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # only true
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=MOST_BIASES)] | None = None
    custom_params: Nothing = None
    stream_interval: Ignored = UNSET


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /generate: text or input_ids."""

    refused: ClassVar[dict[str, str]] = {"sampling_params.custom_params": NULL_ONLY["custom_params"]}

    model: str | None = None  # beyond SGLang's fields
    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: none of the prompt
    top_logprobs_num: Annotated[int, limits("logprobs")] | None = None
    token_ids_logprob: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    rid: RequestId | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MOST_SALT)] | None = None
    # without effect
    session_id: Ignored = UNSET
    custom_labels: Ignored = UNSET
    log_metrics: Ignored = UNSET
    no_logs: Ignored = UNSET
    conversation_id: Ignored = UNSET
    routing_key: Ignored = UNSET


def completion_of(body: GenerateRequest) -> CompletionRequest:
    """The same as a completion."""
    if (body.text is None) == (body.input_ids is None):
        raise BadField("text", "give either text or input_ids")
    params = body.sampling_params or GenerateSampling()
    if params.spaces_between_special_tokens is False:
        why = WHY["spaces_between_special_tokens"]
        name = "sampling_params.spaces_between_special_tokens"
        raise BadField(name, f"{name} is not supported: {why}; remove it, or set it to true")
    request = CompletionRequest(
        prompt=body.text if body.text is not None else body.input_ids or [],  # type: ignore[arg-type]
        model=body.model,
        stream=body.stream,
        rid=body.rid,
        priority=body.priority,
        cache_salt=body.cache_salt,
        return_token_ids=True,
    )
    for theirs, ours in NAMES.items():
        setattr(request, ours, getattr(params, theirs))
    if request.max_tokens is None:
        request.max_tokens = MAX_NEW_TOKENS
    if params.structural_tag is not None:
        request.structured_outputs = StructuredOutputs(structural_tag=params.structural_tag)
    if body.return_logprob:
        ask_for_logprobs(body, request)
    return request


def ask_for_logprobs(body: GenerateRequest, request: CompletionRequest) -> None:
    top = body.top_logprobs_num or 0
    if top and body.token_ids_logprob:
        raise BadField(
            "token_ids_logprob", "token_ids_logprob takes the place of top_logprobs_num; leave one of them out"
        )
    if body.stream and (top or body.token_ids_logprob):
        name = "top_logprobs_num" if top else "token_ids_logprob"
        raise BadField(name, f"{name} cannot be streamed; leave stream out")
    request.logprobs, request.logprob_token_ids = top, body.token_ids_logprob or None
    if body.logprob_start_len is not None and body.logprob_start_len >= 0:
        request.prompt_logprobs = top


def own_name(error: BadRequest, body: GenerateRequest) -> Exception:
    """The same with the name that this body has for a completion's field."""
    names = {**THEIRS, "prompt": "input_ids" if body.text is None else "text"}
    answer = as_http(error)
    if answer is None or answer.detail.param not in names:
        return error
    ours, theirs = answer.detail.param, names[answer.detail.param]
    message = re.sub(rf"\b{re.escape(ours)}\b", theirs, answer.detail.message, count=1)
    code = None if answer.detail.code is None else str(answer.detail.code)
    return HttpError(answer.status, message, type=answer.detail.type, param=theirs, code=code)


# ---- the answer


class GenerateFinish(Struct, omit_defaults=True):
    """Why an answer ended. matched: the stop string or token; length: the limit."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class GenerateMeta(Struct):
    """What is known beside the text. Logprobs are [logprob, token id, its text or null]."""

    id: str
    finish_reason: GenerateFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float  # seconds
    prompt_token_ids: list[int] | UnsetType = UNSET
    input_token_logprobs: list[Any] | UnsetType = UNSET
    output_token_logprobs: list[Any] | UnsetType = UNSET
    input_top_logprobs: list[Any] | UnsetType = UNSET
    output_top_logprobs: list[Any] | UnsetType = UNSET
    output_token_ids_logprobs: list[Any] | UnsetType = UNSET


class GenerateAnswer(Struct):
    """POST /generate, for one prompt; a list of these for several, or where n is above 1."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | UnsetType = UNSET  # in a stream of several


# ---- the dialect


@dataclass(frozen=True, kw_only=True)
class PreparedGenerate(PreparedRequest):
    """How its answer is shown."""

    several: bool  # a list of answers
    prompt_from: int | None  # the first token of the prompt whose logprobs are shown; None: none
    by_ids: bool  # logprobs of certain tokens, instead of the likeliest
    with_text: bool  # in logprobs
    prompt_ids: bool


class Generate:
    """SGLang's own API."""

    path = "/generate"
    id_prefix = ""
    operation = Operation(
        "Continue a prompt, as SGLang does",
        GenerateRequest,
        GenerateAnswer,
        GenerateAnswer,
        {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        {},
        also_lists=True,
    )

    def __init__(self, preparer: Preparer, names: TokenNames) -> None:
        self.preparer = preparer
        self.names = names

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedGenerate:
        request = await read(GenerateRequest, body)
        try:
            completion = completion_of(request)
            prepared = await prepare_completion(self.preparer, completion, id, key)
        except BadRequest as error:
            raise own_name(error, request) from None
        own = {one.name: getattr(prepared, one.name) for one in fields(prepared)}
        ignored = ignored_fields(request) + ignored_fields(request.sampling_params or GenerateSampling())
        own["warnings"] = [*prepared.warnings, *ignored]
        one = isinstance(request.text, str) or (request.input_ids and isinstance(request.input_ids[0], int))
        start = request.logprob_start_len
        return PreparedGenerate(
            **own,
            several=not one or prepared.keep > 1,
            prompt_from=start if request.return_logprob and start is not None and start >= 0 else None,
            by_ids=bool(request.token_ids_logprob),
            with_text=bool(request.return_text_in_logprobs),
            prompt_ids=bool(request.return_prompt_token_ids),
        )

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        several = prepared_of(call).several
        yield b"[" if several else b""
        for job, samples in enumerate(call.outputs.samples):
            for sample in samples:
                if sample.index:
                    yield b","
                yield from self._answer(call, id, job, sample)
        yield b"]" if several else b""

    def _answer(self, call: Call, id: str, job: int, sample: Sample) -> Iterator[bytes]:
        prepared = prepared_of(call)
        answer = GenerateAnswer(content_of(sample.parsed), sample.tokens, meta_of(call, id, job, sample))
        if prepared.top is None:
            yield encode(answer)
            return
        yield encode(answer)[:-2]
        names = self.names if prepared.with_text else None
        out = TokenRun(sample.tokens, sample.logprobs, 0)
        skip = prepared.prompt_from
        prompt = prepared.jobs[job].prompt[skip:] if skip is not None else []
        known = call.outputs.prompt_logprobs[job][max(0, (skip or 0) - 1) :] if prompt else []
        into = TokenRun(prompt, LogprobList(known), 0, skipped=1 if skip == 0 else 0)
        for side, run in ((b"input", into), (b"output", out)):
            yield b',"%b_token_logprobs":' % side
            yield from triple_pieces(names, run)
            if prepared.top and not (prepared.by_ids and side == b"input"):
                yield b',"%b_%b_logprobs":' % (side, b"token_ids" if prepared.by_ids else b"top")
                yield from triple_pieces(names, run, prepared.top)
        yield b"}}"

    def stream(self, call: Call, id: str, created: int) -> "GenerateStream":
        return GenerateStream(call, self.names, id)

    def error(self, error: HttpError) -> bytes:
        return error.body()


def prepared_of(call: Call) -> PreparedGenerate:
    assert isinstance(call.prepared, PreparedGenerate)
    return call.prepared


def meta_of(call: Call, id: str, job: int, sample: Sample) -> GenerateMeta:
    prepared, ending = prepared_of(call), sample.ending
    prompt = prepared.jobs[job].prompt
    return GenerateMeta(
        f"{id}_{sample.index}" if prepared.several else id,
        None if ending is None else finish_of(sample, prepared.jobs[job].params.max_tokens),
        len(prompt),
        len(sample.tokens),
        0 if ending is None else ending.cached_tokens,
        WEIGHTS,
        round(time.monotonic() - call.began_s, 6),
        prompt if prepared.prompt_ids else UNSET,
    )


def finish_of(sample: Sample, limit: int | None) -> GenerateFinish:
    reason = reason_of(sample)
    if reason == "stop":
        matched = sample.stop_reason
        if matched is None and sample.ending is not None:
            matched = sample.ending.stop_token  # the model's own end
        return GenerateFinish("stop", matched)
    return GenerateFinish("length", length=limit) if reason == "length" else GenerateFinish("abort", message=reason)


class GenerateStream:
    """The events of one streamed request."""

    opens_on_accept = False

    def __init__(self, call: Call, names: TokenNames, id: str) -> None:
        self.call, self.id = call, id
        self.names = names if prepared_of(call).with_text else None

    def choice(self, job: int, sample: Sample) -> "GenerateEvents":
        return GenerateEvents(self, job, sample)

    def last(self, error: HttpError | None) -> bytes:
        return DONE if error is None else b"data: %b\n\n%b" % (error.body(), DONE)


class GenerateEvents:
    """Writes the events of one sample, each with all that there is so far."""

    def __init__(self, stream: GenerateStream, job: int, sample: Sample) -> None:
        self.stream, self.job, self.sample = stream, job, sample
        self.logprobs: list[Any] = []  # of the tokens so far
        self.sent = 0  # tokens in the last event

    def opening(self) -> bytes:
        return b""

    def delta(self, parsed: Parsed) -> bytes:
        raise AssertionError("tokens are always shown")

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        names = self.stream.names
        self.logprobs += [
            (finite(one.logprob), one.token, None if names is None else names.text_of(one.token)) for one in logprobs
        ]
        count = len(self.sample.tokens)
        if count - self.sent < max(1, self.sent // SMOOTH):
            return b""
        self.sent = count
        return self._event()

    def end(self, parsed: Parsed) -> bytes:
        return self._event()

    def _event(self) -> bytes:
        call, sample = self.stream.call, self.sample
        meta = meta_of(call, self.stream.id, self.job, sample)
        if call.prepared.top is not None:
            meta.input_token_logprobs = []
            meta.output_token_logprobs = self.logprobs[: len(sample.tokens)]
        index = sample.index if prepared_of(call).several else UNSET
        return b"data: %b\n\n" % encode(GenerateAnswer(content_of(sample.parsed), sample.tokens, meta, index))
