"""Anthropic's /v1/messages: turns of content blocks in, one message of content blocks out.

Owns its answer, its events and its errors. The fields of the body are in messages_body.py. Knows a Call; no HTTP.

    message_start · content_block_start · content_block_delta … · content_block_stop · … · message_delta · message_stop
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shoal.core.params import PARAMS
from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed, ToolCall, calls_of, content_of, reasoning_of
from shoal.output.sample import Sample
from shoal.server.bodies import (
    SMALL_BODY,
    ignored_fields,
    read,
)
from shoal.server.chat_body import prepare_chat
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import encode, reason_of
from shoal.server.errors import BadField, HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames
from shoal.server.messages_body import MessagesRequest, chat_of
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from shoal.server.workers import PYTHON, off_loop

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
