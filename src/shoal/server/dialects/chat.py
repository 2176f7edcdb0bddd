"""OpenAI's /v1/chat/completions: messages in, one assistant message per sample out.

Owns the body's fields, the answer's fields and the chunks of a stream. Knows the Preparer and a Call; no HTTP.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from shoal.core.params import MAX_LOGPROBS
from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed, content_of
from shoal.output.sample import Sample
from shoal.server.bodies import MOST_MESSAGES, ChatMessage, GenerationBody, Nothing, limits, read
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import (
    ChunkFrame,
    ChunkStream,
    FinishReason,
    Usage,
    answer_pieces,
    choice_pieces,
    encode,
    reason_of,
    shown_ids,
    usage_of,
)
from shoal.server.errors import BadField
from shoal.server.jobs import Call
from shoal.server.logprobs import ChatLogprobs, TokenNames, chat_logprobs, chat_pieces
from shoal.server.prepare import PreparedRequest, Preparer

ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'


# ---- the body


class ChatRequest(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, limits("max_tokens")] | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, limits("logprobs")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables for the chat template, such as enable_thinking
    tools: Annotated[list[Any], Meta(max_length=0, description="Refused by name unless empty.")] | None = None
    tool_choice: Literal["none"] | None = None
    functions: Nothing = None
    function_call: Nothing = None
    audio: Nothing = None
    modalities: list[Literal["text"]] | None = None
    chat_template: Nothing = None


def top_logprobs_of(body: ChatRequest) -> int | None:
    """How many alternatives to show for each token; None: no logprobs at all."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs", "top_logprobs requires logprobs to be true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
    return (body.top_logprobs or 0) if body.logprobs else None


def max_tokens_of(body: ChatRequest) -> int | None:
    """The limit, under its newer or its older name."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and new < 1:
        raise BadField("max_completion_tokens", f"max_completion_tokens must be at least 1, not {new}")
    if new is not None and old is not None and new != old:
        raise BadField(
            "max_completion_tokens", f"max_completion_tokens is {new} but max_tokens is {old}; give one of them"
        )
    return old if new is None else new


# ---- the answer


class AnswerMessage(Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


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


class Delta(Struct):
    """The next piece of the assistant's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
        request, preparer = await read(ChatRequest, body), self.preparer
        model = preparer.check_model(request.model)
        top = top_logprobs_of(request)
        limit = max_tokens_of(request)
        params = preparer.params(
            request,
            n=1 if request.n is None else request.n,
            max_tokens=limit if limit is not None else preparer.settings.default_chat_max_tokens,
            logprobs=top,
        )
        preparer.check_count(1, params.n, "n")
        ids = await preparer.chat_ids(request.messages, True, request.chat_template_kwargs)
        preparer.check_ids(ids, "messages")
        return await preparer.request(request, id, key, [ids], params, model=model, keep=params.n, top=top)

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        prepared = call.prepared
        ids = shown_ids(prepared, prepared.jobs[0].prompt)
        answer = ChatAnswer(id, "chat.completion", created, prepared.model, [], usage_of(call), ids)
        return answer_pieces(answer, (self._choice(prepared, sample) for sample in call.outputs.samples[0]))

    def _choice(self, prepared: PreparedRequest, sample: Sample) -> Iterator[bytes]:
        choice = ChatChoice(
            sample.index,
            AnswerMessage("assistant", content_of(sample.parsed)),
            None,
            reason_of(sample),
            sample.stop_reason,
            shown_ids(prepared, sample.tokens),
        )
        top = prepared.top
        return choice_pieces(choice, None if top is None else chat_pieces(self.names, sample.logprobs, top))

    def stream(self, call: Call, id: str, created: int) -> "ChatChunkStream":
        return ChatChunkStream(call, self.names, id, created)


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

    __slots__ = ("names", "prepared", "shows_prompt_ids")

    def __init__(self, stream: ChatChunkStream, sample: Sample) -> None:
        super().__init__(stream, sample, b'"delta":{"content":', b"}")
        self.names = stream.names
        self.prepared = stream.call.prepared
        self.shows_prompt_ids = self.prepared.token_ids and sample.index == 0  # the others have the same prompt

    def opening(self) -> bytes:
        prepared = self.prepared
        ids = b',"prompt_token_ids":%b' % encode(prepared.jobs[0].prompt) if self.shows_prompt_ids else b""
        return self.start(ids) + ROLE + self.closing

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        top, shown = self.prepared.top, b"null"
        if top is not None and logprobs:
            shown = encode(chat_logprobs(self.names, logprobs, top))
        ids = b',"token_ids":%b' % encode(tokens) if self.prepared.token_ids else b""
        return self.full(content_of(parsed), shown, ids)

    def end(self, parsed: Parsed) -> bytes:
        text = content_of(parsed)
        field = self.before + encode(text) + self.after if text else b'"delta":{}'
        return self.last(field, self.prepared.token_ids)
