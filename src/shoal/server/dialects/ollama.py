"""Ollama's /api/chat and /api/generate: one JSON object per line, each with a piece of the answer.

Owns the fields of their bodies and how they become a chat's, their answers and errors. What else Ollama serves is in
ollama_routes.py. Knows a Call; no HTTP.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed, ToolCall, calls_of, content_of, reasoning_of
from shoal.output.sample import Sample
from shoal.server.bodies import (
    MOST_MESSAGES,
    SMALL_BODY,
    ChatMessage,
    Ignored,
    JsonSchemaFormat,
    ResponseFormat,
    ignored_fields,
    read,
)
from shoal.server.chat_body import ChatRequest, prepare_chat
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import encode, reason_of
from shoal.server.errors import BadField, HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from shoal.server.tool_choice import ToolList
from shoal.server.workers import PYTHON, off_loop
from shoal.text.parts import ParsedParts, joined

NDJSON = "application/x-ndjson"
# its names of sampling parameters → ours
NAMES = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip

# ---- the bodies


class OllamaOptions(Struct):
    """Sampling parameters. Those of how a model is loaded, such as num_ctx, have no effect."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None  # most tokens; below 0: no limit
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(Struct):
    """A function and its arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct):
    """A tool call."""

    function: OllamaFunction


class OllamaMessage(Struct):
    """One message; images are not supported."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None


class OllamaRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that both have."""

    model: str | None = None
    stream: bool | None = None  # true by default
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    # without effect
    keep_alive: Ignored = UNSET
    truncate: Ignored = UNSET
    shift: Ignored = UNSET


class OllamaChatRequest(OllamaRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    tools: ToolList | None = None


class OllamaGenerateRequest(OllamaRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate"""

    prompt: Annotated[str, Meta(min_length=1)]
    system: str | None = None
    raw: bool | None = None  # true: the prompt as it is, without the chat template
    suffix: Annotated[str, Meta(max_length=0)] | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    template: Ignored = UNSET
    context: Ignored = UNSET


def as_chat_request(body: OllamaRequest, messages: list[ChatMessage], served: Sequence[str]) -> ChatRequest:
    """The same as a chat."""
    options = body.options or OllamaOptions()
    given = {ours: getattr(options, theirs) for theirs, ours in NAMES.items()}
    format: ResponseFormat | None = None
    if body.format == "json":
        format = ResponseFormat("json_object")
    elif isinstance(body.format, dict):
        format = ResponseFormat("json_schema", JsonSchemaFormat(body.format))
    limit = options.num_predict
    return ChatRequest(
        messages=messages,
        model=name_of(body.model, served),
        stream=body.stream is not False,
        max_tokens=None if limit is None or limit < 0 else limit,
        response_format=format,
        include_reasoning=body.think is not False,
        reasoning_effort=body.think if isinstance(body.think, str) else None if body.think is not False else "none",
        tools=body.tools if isinstance(body, OllamaChatRequest) else None,
        **given,
    )


def name_of(name: str | None, served: Sequence[str]) -> str | None:
    """The model's name; a tag that stands for the newest is left out."""
    return name if name is None or name in served else name.removesuffix(":latest")


def message_of(message: OllamaMessage) -> ChatMessage:
    calls = [
        {"type": "function", "function": {"name": one.function.name, "arguments": one.function.arguments}}
        for one in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.tool_name,
        tool_calls=calls or None,
        reasoning_content=message.thinking,
    )


# ---- the answers


class OllamaAnswerMessage(Struct):
    """The assistant's message, or a piece of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaFigures(Struct, kw_only=True):
    """What the last line adds; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatAnswer(OllamaFigures, kw_only=True):
    """A line of /api/chat, or its whole answer."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaFigures, kw_only=True):
    """A line of /api/generate, or its whole answer."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaError(Struct):
    """The body of an error."""

    error: str


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def figures(call: Call, sample: Sample) -> dict[str, Any]:
    """What is known at the end."""
    end_s = time.monotonic()
    first_s = call.first_token_s or end_s
    return {
        "done": True,
        "done_reason": "stop" if reason_of(sample) == "stop" else "length",
        "total_duration": int((end_s - call.began_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": call.outputs.prompt_tokens,
        "prompt_eval_duration": int((first_s - call.began_s) * 1e9),
        "eval_count": call.outputs.output_tokens,
        "eval_duration": int((end_s - first_s) * 1e9),
    }


def call_of(call: ToolCall) -> OllamaCall:
    try:
        arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:  # it was cut
        arguments = {}
    return OllamaCall(OllamaFunction(call.name, arguments))


def answer_of(path: str, model: str, parsed: Parsed, more: dict[str, Any]) -> OllamaFigures:
    common = {"model": model, "created_at": now(), **more}
    thinking = reasoning_of(parsed) or UNSET
    if path == OllamaGenerate.path:
        return OllamaGenerateAnswer(response=content_of(parsed), thinking=thinking, **common)
    calls = [call_of(call) for call in calls_of(parsed)]
    return OllamaChatAnswer(
        message=OllamaAnswerMessage("assistant", content_of(parsed), thinking, calls or UNSET), **common
    )


# ---- the dialects


class OllamaDialect:
    """What both have in common."""

    path = ""
    id_prefix = ""

    def __init__(self, preparer: Preparer, names: TokenNames) -> None:
        self.preparer = preparer

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        sample = call.outputs.samples[0][0]
        yield encode(answer_of(self.path, call.prepared.model, sample.parsed, figures(call, sample)))

    def stream(self, call: Call, id: str, created: int) -> "OllamaStream":
        return OllamaStream(call, self.path)

    @staticmethod
    def error(error: HttpError) -> bytes:
        return encode(OllamaError(error.detail.message))


class OllamaChat(OllamaDialect):
    """Messages in."""

    path = "/api/chat"
    operation = Operation(
        "Answer a chat, as Ollama does",
        OllamaChatRequest,
        OllamaChatAnswer,
        OllamaChatAnswer,
        {"messages": [{"role": "user", "content": "Say hello."}], "options": {"num_predict": 16}},
        {},
        OllamaError,
        NDJSON,
        "the last with `done`",
    )

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        request = await read(OllamaChatRequest, body)
        served = self.preparer.settings.models

        def as_chat() -> ChatRequest:
            return as_chat_request(request, [message_of(message) for message in request.messages], served)

        chat = await off_loop(len(body), as_chat, PYTHON, SMALL_BODY)
        prepared = await prepare_chat(self.preparer, chat, len(body), id, key)
        prepared.warnings.extend(ignored_fields(request))
        return prepared


class OllamaGenerate(OllamaDialect):
    """A prompt in."""

    path = "/api/generate"
    operation = Operation(
        "Answer a prompt, as Ollama does",
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        OllamaGenerateAnswer,
        {"prompt": "Say hello.", "options": {"num_predict": 16}},
        {},
        OllamaError,
        NDJSON,
        "the last with `done`",
    )

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        request, preparer = await read(OllamaGenerateRequest, body), self.preparer
        messages = [ChatMessage(role="system", content=request.system)] if request.system else []
        messages.append(ChatMessage(role="user", content=request.prompt))
        chat = as_chat_request(request, messages, preparer.settings.models)
        if not request.raw:
            prepared = await prepare_chat(preparer, chat, len(body), id, key)
            prepared.warnings.extend(ignored_fields(request))
            return prepared
        if request.system:
            raise BadField("system", "system cannot be used with raw: there is no template to put it into; remove it")
        model = preparer.check_model(chat.model)
        params = preparer.params(chat, n=1, max_tokens=chat.max_tokens)
        prompts = await preparer.encode([request.prompt])
        prepared = await preparer.request(chat, id, key, prompts, params, model=model, keep=1, top=None)
        prepared.warnings.extend(ignored_fields(request))
        return prepared


class OllamaStream:
    """The lines of one streamed answer."""

    opens_on_accept = False

    def __init__(self, call: Call, path: str) -> None:
        self.call = call
        self.path = path

    def choice(self, job: int, sample: Sample) -> "OllamaLines":
        return OllamaLines(self, sample)

    def last(self, error: HttpError | None) -> bytes:
        return b"" if error is None else OllamaDialect.error(error) + b"\n"


class OllamaLines:
    """Writes a line for each piece; a tool call is written when it is complete."""

    def __init__(self, stream: OllamaStream, sample: Sample) -> None:
        self.stream, self.sample = stream, sample
        self.pieces: list[ToolCall] = []  # of the call that is being read

    def opening(self) -> bytes:
        return b""

    def delta(self, parsed: Parsed) -> bytes:
        if isinstance(parsed, str):
            return self._line(parsed)
        out = b""
        if parsed.content or parsed.reasoning:
            out += self._line(ParsedParts(parsed.content, parsed.reasoning))
        for piece in parsed.tool_calls:
            if piece.name:
                out += self._call()
            self.pieces.append(piece)
        return out

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        return self.delta(parsed) if parsed else b""

    def end(self, parsed: Parsed) -> bytes:
        out = self.delta(parsed) if parsed else b""
        call = self.stream.call
        return out + self._call() + self._line("", figures(call, self.sample))

    def _call(self) -> bytes:
        if not self.pieces:
            return b""
        whole = joined([ParsedParts(tool_calls=tuple(self.pieces))])
        self.pieces = []
        return self._line(whole)

    def _line(self, parsed: Parsed, more: dict[str, Any] | None = None) -> bytes:
        model = self.stream.call.prepared.model
        return encode(answer_of(self.stream.path, model, parsed, more or {"done": False})) + b"\n"
