"""Anthropic's /v1/messages: turns of content blocks in, one message of content blocks out.

Owns the fields of its body and how they become a chat's, its answer, its events and its errors. Knows a Call; no HTTP.

    message_start · content_block_start · content_block_delta … · content_block_stop · … · message_delta · message_stop
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shoal.core.params import PARAMS
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
    Nothing,
    ResponseFormat,
    TextPart,
    ignored_fields,
    limits,
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
from shoal.server.tool_choice import MOST_TOOLS, FunctionBody, FunctionName, ToolBody, ToolChoice, ToolChoiceBody
from shoal.server.workers import PYTHON, off_loop

# ---- the body


class Block(Struct):
    """A block of content: text, a tool's call or result, or reasoning. Other fields of it, such as cache_control, have
    no effect."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    thinking: str | None = None


class Turn(Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct):
    """A tool; only those that the client runs are supported."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(Struct):
    """any: some tool must be called; tool: the one with this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Whether the model reasons first, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class OutputFormat(Struct):
    """The form of the answer: JSON that fits a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """The form of the answer, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: Annotated[str, Meta(max_length=16)] | None = None  # for the chat template


class CountTokensRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MOST_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    # without effect
    cache_control: Ignored = UNSET
    context_management: Ignored = UNSET
    diagnostics: Ignored = UNSET
    inference_geo: Ignored = UNSET
    speed: Ignored = UNSET
    user_profile_id: Ignored = UNSET
    workspace_id: Ignored = UNSET


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, limits("max_tokens")]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, limits("temperature")] | None = None
    top_p: Annotated[float, limits("top_p")] | None = None
    top_k: Annotated[int, limits("top_k")] | None = None
    thread: dict[str, Any] | None = None  # refused as Anthropic's servers do: clients then send the whole history
    container: Nothing = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    metadata: Ignored = UNSET
    service_tier: Ignored = UNSET


def chat_of(body: CountTokensRequest) -> ChatRequest:
    """The same as a chat."""
    messages = [ChatMessage(role="system", content=parts_of(body.system, "system"))] if body.system else []
    for number, turn in enumerate(body.messages):
        messages += messages_of(turn, f"messages[{number}]")
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    choice, output = body.tool_choice, body.output_config or OutputConfig()
    request = ChatRequest(
        messages=messages,
        model=body.model,
        chat_template_kwargs={"enable_thinking": thinks, "thinking": thinks},
        include_reasoning=thinks,
        thinking_token_budget=body.thinking.budget_tokens if thinks and body.thinking else None,
        tools=[ToolBody("function", function_of(tool)) for tool in body.tools or ()] or None,
        tool_choice=choice_of(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        reasoning_effort=output.effort,
        response_format=format_of(output.format or body.output_format),
    )
    if isinstance(body, MessagesRequest):
        request.max_tokens, request.stream = body.max_tokens, body.stream
        for ours, theirs in (("stop", "stop_sequences"), ("temperature", "temperature"), ("top_p", "top_p")):
            setattr(request, ours, getattr(body, theirs))
        request.top_k = body.top_k  # type: ignore[attr-defined]
        request.metadata, request.service_tier = body.metadata, body.service_tier
    return request


def format_of(format: OutputFormat | None) -> ResponseFormat | None:
    return None if format is None else ResponseFormat("json_schema", JsonSchemaFormat(format.schema))


def messages_of(turn: Turn, where: str) -> list[ChatMessage]:
    """Results of tools are messages of their own, before the rest."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    results, texts, calls, thinking = list[ChatMessage](), list[TextPart](), list[dict[str, Any]](), list[str]()
    for number, block in enumerate(turn.content):
        place = f"{where}.content[{number}]"
        if block.type == "text":
            texts += parts_of([block], place)
        elif block.type == "tool_result":
            content = parts_of(block.content or "", f"{place}.content")
            results.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
        elif block.type == "tool_use":
            function = {"name": needed(block.name, f"{place}.name"), "arguments": block.input or {}}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.thinking:
            thinking.append(block.thinking)
    if texts or calls or not results:
        message = ChatMessage(role=turn.role, content=texts or None if calls else texts, tool_calls=calls or None)
        message.reasoning_content = "\n".join(thinking) or None
        results.append(message)
    return results


def parts_of(content: str | list[Block], where: str) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart("text", content)]
    for number, block in enumerate(content):
        if block.type != "text":
            raise BadField(f"{where}[{number}].type", f"{where}[{number}] must be a block of text, not {block.type}")
    return [TextPart("text", needed(block.text, f"{where}[{n}].text")) for n, block in enumerate(content)]


def needed(value: str | None, where: str) -> str:
    if value is None:
        raise BadField(where, f"{where} is missing")
    return value


def function_of(tool: MessagesTool) -> FunctionBody:
    return FunctionBody(tool.name, tool.description, tool.input_schema, tool.strict)


def choice_of(choice: MessagesToolChoice | None) -> ToolChoice | None:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        return "required"
    return ToolChoiceBody("function", FunctionName(needed(choice.name, "tool_choice.name")))


# ---- the answer


class TextBlock(Struct):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Struct):
    """Reasoning. The signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct):
    """A call of a tool. Where it was cut, its input is empty."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Struct):
    """Tokens. Those found in the prefix cache are counted apart from the other input."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(Struct):
    """POST /v1/messages, when not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Any]  # TextBlock, ThinkingBlock, ToolUseBlock
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(Struct):
    """One event of a streamed /v1/messages; what else it has depends on its type."""

    type: str
    index: int | UnsetType = UNSET
    message: MessagesAnswer | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class MessagesErrorDetail(Struct):
    """What went wrong; `param` is the field to change."""

    type: str
    message: str
    param: str | None = None
    details: dict[str, Any] | UnsetType = UNSET  # for programs


class MessagesError(Struct):
    """The body of an error."""

    type: Literal["error"]
    error: MessagesErrorDetail


class CountTokensAnswer(Struct):
    """POST /v1/messages/count_tokens"""

    input_tokens: int


NO_THREADS = "thread_unsupported_request"  # at which Anthropic's client goes on without a thread
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def stop_reason(sample: Sample, called: bool) -> tuple[StopReason, str | None]:
    """(why it ended, the stop sequence that ended it)."""
    if reason_of(sample) != "stop":
        return "max_tokens", None
    if isinstance(sample.stop_reason, str):
        return "stop_sequence", sample.stop_reason
    return ("tool_use" if called else "end_turn"), None


def usage_of(call: Call) -> MessagesUsage:
    outputs = call.outputs
    cached = outputs.cached_tokens
    return MessagesUsage(outputs.prompt_tokens - cached, outputs.output_tokens, cached)


def blocks_of(parsed: Parsed) -> list[Struct]:
    found: list[Struct] = []
    if reasoning_of(parsed):
        found.append(ThinkingBlock("thinking", reasoning_of(parsed)))
    if content_of(parsed):
        found.append(TextBlock("text", content_of(parsed)))
    return found + [ToolUseBlock("tool_use", call.id, call.name, input_of(call)) for call in calls_of(parsed)]


def input_of(call: ToolCall) -> dict[str, Any]:
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:  # it was cut
        return {}


# ---- the dialect


class Messages:
    """Anthropic's messages."""

    path = "/v1/messages"
    id_prefix = "msg_"
    operation = Operation(
        "Answer a chat, as Anthropic does",
        MessagesRequest,
        MessagesAnswer,
        MessagesEvent,
        {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
        {},
        MessagesError,
        ends_with="then `message_stop`",
    )

    def __init__(self, preparer: Preparer, names: TokenNames) -> None:
        self.preparer = preparer

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        request = await read(MessagesRequest, body)
        if request.thread is not None:
            raise BadField("thread", "thread is not supported: no conversation is kept here; send all messages")
        if request.max_tokens < PARAMS["max_tokens"].low:
            raise BadField("max_tokens", f"max_tokens must be at least 1, not {request.max_tokens}")
        chat = await off_loop(len(body), lambda: chat_of(request), PYTHON, SMALL_BODY)
        prepared = await prepare_chat(self.preparer, chat, len(body), id, key)
        prepared.warnings.extend(name for name in ignored_fields(request) if name not in prepared.warnings)
        return prepared

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        sample = call.outputs.samples[0][0]
        parsed = sample.parsed
        why, sequence = stop_reason(sample, bool(calls_of(parsed)))
        usage, model = usage_of(call), call.prepared.model
        yield encode(MessagesAnswer(id, "message", "assistant", model, blocks_of(parsed), why, sequence, usage))

    def stream(self, call: Call, id: str, created: int) -> "MessageStream":
        return MessageStream(call, id)

    @staticmethod
    def error(error: HttpError) -> bytes:
        detail = error.detail
        kind = ERROR_TYPES.get(error.status, "invalid_request_error")
        known = {"error_code": NO_THREADS, "unsupported": ["thread"]} if detail.param == "thread" else UNSET
        return encode(MessagesError("error", MessagesErrorDetail(kind, detail.message, detail.param, known)))


def event(kind: str, body: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


def written(one: MessagesEvent) -> bytes:
    return event(one.type, encode(one))


class MessageStream:
    """The events of one streamed message."""

    opens_on_accept = True

    def __init__(self, call: Call, id: str) -> None:
        self.call = call
        self.id = id

    def choice(self, job: int, sample: Sample) -> "MessageEvents":
        return MessageEvents(self, sample)

    def last(self, error: HttpError | None) -> bytes:
        return event("error", Messages.error(error)) if error is not None else written(MessagesEvent("message_stop"))


class MessageEvents:
    """Writes the blocks of a message one after the other: reasoning, text, calls."""

    def __init__(self, stream: MessageStream, sample: Sample) -> None:
        self.stream, self.sample = stream, sample
        self.index = -1
        self.kind = ""  # of the block that is open
        self.called = False

    def opening(self) -> bytes:
        call = self.stream.call
        usage = MessagesUsage(call.outputs.prompt_tokens, 0)
        message = MessagesAnswer(
            self.stream.id, "message", "assistant", call.prepared.model, [], None, None, usage
        )  # fmt: skip
        return written(MessagesEvent("message_start", message=message))

    def delta(self, parsed: Parsed) -> bytes:
        if isinstance(parsed, str):
            return self._text("text", parsed)
        out = self._text("thinking", parsed.reasoning) if parsed.reasoning else b""
        if parsed.content:
            out += self._text("text", parsed.content)
        for call in parsed.tool_calls:
            if call.name:
                self.called = True
                out += self._open("tool_use", {"id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                out += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return out

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        return self.delta(parsed) if parsed else b""

    def end(self, parsed: Parsed) -> bytes:
        out = self.delta(parsed) if parsed else b""
        if self.index < 0:
            out += self._open("text", {"text": ""})
        why, sequence = stop_reason(self.sample, self.called)
        delta = {"stop_reason": why, "stop_sequence": sequence}
        ending = MessagesEvent("message_delta", delta=delta, usage=usage_of(self.stream.call))
        return out + self._close() + written(ending)

    def _text(self, kind: str, text: str) -> bytes:
        opened = b""
        if self.kind != kind:
            opened = self._open(kind, {"text": ""} if kind == "text" else {"thinking": "", "signature": ""})
        return opened + self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return written(MessagesEvent("content_block_delta", index=self.index, delta=delta))

    def _open(self, kind: str, fields: dict[str, Any]) -> bytes:
        closed = self._close()
        self.index += 1
        self.kind = kind
        block = {"type": kind, **fields}
        return closed + written(MessagesEvent("content_block_start", index=self.index, content_block=block))

    def _close(self) -> bytes:
        if not self.kind:
            return b""
        self.kind = ""
        return written(MessagesEvent("content_block_stop", index=self.index))
