"""What clients are answered: the shapes of answers, of their chunks, and of everything small.

Owns field names and their order, as OpenAI has them. Knows no tokens, no streams and no HTTP.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

FinishReason = Annotated[
    Literal["stop", "length", "timeout", "abort"],
    Meta(description="timeout: its `timeout` was over, and this is what it had; abort: the server stopped it."),
]


class PromptDetails(Struct):
    """Of the prompt tokens, how many were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens read and written. With best_of, those of dropped samples too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class LegacyLogprobs(Struct):
    """What the model thought of each token, in the manner of /v1/completions. The first prompt token has nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TopLogprob(Struct):
    """A token that could have come. `bytes` are exact, also where a token is half a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token that came, and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """What the model thought of each token, in the manner of /v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(Struct):
    """One answer. stop_reason: the stop string or stop token id that ended it, null for an end token."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(Struct):
    """POST /v1/completions, when not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerMessage(Struct):
    """What the assistant says."""

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


class CompletionChunk(Struct):
    """One event of a streamed /v1/completions. It is written by stream.py without this class."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Delta(Struct):
    """The next piece of what the assistant says."""

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
    """One event of a streamed /v1/chat/completions. It is written by stream.py without this class."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct):
    """A name the model answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the name it calls itself
    max_model_len: int | None  # null while the engine is down


class ModelList(Struct):
    """GET /v1/models"""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Struct):
    """POST /tokenize"""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizeAnswer(Struct):
    """POST /detokenize"""

    prompt: str


class Health(Struct):
    """GET /health"""

    status: Literal["ok", "down", "draining"]


class Version(Struct):
    """GET /version"""

    version: str
