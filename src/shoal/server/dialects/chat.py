"""OpenAI's /v1/chat/completions: messages in, one assistant message per sample out.

Owns the answer's fields and the chunks of a stream; the body's are in chat_body.py. Knows a Call; no HTTP.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed, ToolCall, calls_of, content_of, reasoning_of
from shoal.output.sample import Sample
from shoal.server.bodies import read
from shoal.server.chat_body import ChatRequest, prepare_chat
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
from shoal.server.errors import HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TokenNames,
    chat_logprobs,
    chat_pieces,
    prompt_pieces,
)
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from shoal.text.parts import joined

ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'


# ---- the answer


class CalledFunction(Struct):
    """The function that is called. `arguments` is JSON text."""

    name: str
    arguments: str


class CallOfTool(Struct):
    """A tool call. Its result comes back in a message of the role `tool` with its id."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[CallOfTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET  # the older form, for a body with `functions`
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same under its newer name


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct):
    """POST /v1/chat/completions, when not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    """The next piece of a function's arguments; its name comes with the first."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Struct):
    """The next piece of a tool call; its id and type come with the first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(Struct):
    """The next piece of the assistant's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChunkChoice(Struct):
    """The next piece of one answer; finish_reason is set on its last."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- the dialect


class Chat:
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    operation = Operation(
        "Answer a chat",
        ChatRequest,
        ChatAnswer,
        ChatChunk,
        {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
        {},
    )

    def __init__(self, preparer: Preparer, names: TokenNames) -> None:
        self.preparer = preparer
        self.names = names

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        request = await read(ChatRequest, body)
        return await prepare_chat(self.preparer, request, len(body), id, key)

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        prepared = call.prepared
        ids = shown_ids(prepared, prepared.jobs[0].prompt)
        top = prepared.prompt_top
        hole = UNSET if top is None else None
        answer = ChatAnswer(id, "chat.completion", created, prepared.model, [], usage_of(call), ids, hole)
        pieces = answer_pieces(answer, (self._choice(prepared, sample) for sample in call.outputs.samples[0]))
        if top is None:
            return pieces
        names, known = self.names.written(prepared.tokens_as_ids), call.outputs.prompt_logprobs[0]
        return filled(pieces, b'"prompt_logprobs":null', prompt_pieces(names, known, top))

    def _choice(self, prepared: PreparedRequest, sample: Sample) -> Iterator[bytes]:
        parsed = sample.parsed
        choice = ChatChoice(
            sample.index,
            message_of(parsed, prepared.tools.legacy, prepared.prefix),
            None,
            finish_reason(sample, bool(calls_of(parsed)), prepared),
            sample.stop_reason,
            shown_ids(prepared, sample.tokens),
        )
        top, names = prepared.top, self.names.written(prepared.tokens_as_ids)
        return choice_pieces(choice, None if top is None else chat_pieces(names, sample.logprobs, top))

    def stream(self, call: Call, id: str, created: int) -> "ChatChunkStream":
        return ChatChunkStream(call, self.names.written(call.prepared.tokens_as_ids), id, created)

    def error(self, error: HttpError) -> bytes:
        return error.body()


def finish_reason(sample: Sample, called: bool, prepared: PreparedRequest) -> FinishReason:
    """As OpenAI has it: a call that was not left to the model ends as `stop`. An incomplete one is no tool call."""
    reason, tools = reason_of(sample), prepared.tools
    if not called or tools.named or reason != "stop" or sample.stop_reason is not None:
        return reason
    return "function_call" if tools.legacy else "tool_calls"


def message_of(parsed: Parsed, legacy: bool, prefix: str = "") -> AnswerMessage:
    """`prefix`: text that is repeated before it."""
    calls, reasoning = calls_of(parsed), reasoning_of(parsed) or UNSET
    message = AnswerMessage("assistant", prefix + content_of(parsed) or (None if calls or reasoning else ""))
    message.reasoning = message.reasoning_content = reasoning
    functions = [CalledFunction(call.name, call.arguments) for call in calls]
    if functions and legacy:
        message.function_call = functions[0]
    elif functions:
        message.tool_calls = [CallOfTool(call.id, "function", one) for call, one in zip(calls, functions, strict=True)]
    return message


def delta_of(parsed: Parsed, legacy: bool) -> Delta:
    content, calls, reasoning = content_of(parsed), calls_of(parsed), reasoning_of(parsed) or UNSET
    delta = Delta(content=content or UNSET, reasoning_content=reasoning, reasoning=reasoning)
    if calls and legacy:
        delta.function_call = function_delta(calls[0])
    elif calls:
        delta.tool_calls = [call_delta(call) for call in calls]
    return delta


def call_delta(call: ToolCall) -> CallDelta:
    if call.name:
        return CallDelta(call.index, call.id, "function", function_delta(call))
    return CallDelta(call.index, function=function_delta(call))


def function_delta(call: ToolCall) -> FunctionDelta:
    return FunctionDelta(call.name or UNSET, call.arguments)


class ChatChunkStream(ChunkStream):
    """The events of one streamed chat; the role goes out before the first token is there."""

    opens_on_accept = True

    def __init__(self, call: Call, names: TokenNames, id: str, created: int) -> None:
        super().__init__(call, "chat.completion.chunk", id, created)
        self.names = names

    def choice(self, job: int, sample: Sample) -> "ChatChunks":
        return ChatChunks(self, sample)


class ChatChunks(ChunkFrame):
    """The events of one sample."""

    __slots__ = ("called", "names", "prepared", "shows_prompt_ids")

    def __init__(self, stream: ChatChunkStream, sample: Sample) -> None:
        super().__init__(stream, sample, b'"delta":{"content":', b"}")
        self.names = stream.names
        self.prepared = stream.call.prepared
        self.shows_prompt_ids = self.prepared.token_ids and sample.index == 0  # the others have the same prompt
        self.called = False  # a tool call has begun

    def opening(self) -> bytes:
        prepared = self.prepared
        ids = b',"prompt_token_ids":%b' % encode(prepared.jobs[0].prompt) if self.shows_prompt_ids else b""
        opened = self.start(ids) + ROLE + self.stream.close()
        return opened + self.full(prepared.prefix) if prepared.prefix else opened

    def field(self, parsed: Parsed) -> bytes:
        if isinstance(parsed, str):
            return super().field(parsed)
        self.called |= bool(parsed.tool_calls)
        return b'"delta":%b' % encode(delta_of(joined([parsed]), self.prepared.tools.legacy))

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        top, shown = self.prepared.top, b"null"
        if top is not None and logprobs:
            shown = encode(chat_logprobs(self.names, logprobs, top))
        ids = b',"token_ids":%b' % encode(tokens) if self.prepared.token_ids else b""
        return self.full(parsed, shown, ids)

    def end(self, parsed: Parsed) -> bytes:
        field = self.field(parsed) if parsed else b'"delta":{}'
        return self.last(field, self.prepared.token_ids, finish_reason(self.sample, self.called, self.prepared))
