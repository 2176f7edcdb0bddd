"""The body of /v1/responses, and how it becomes a chat's.

Owns its fields: which of them have a meaning here, and which are refused by name. The items of an input are in
response_items.py. Knows no HTTP beyond its errors and no store.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct

from shoal.core.params import MAX_LOGPROBS
from shoal.server.bodies import (
    MOST_MESSAGES,
    MOST_SALT,
    ChatMessage,
    Ignored,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    limits,
)
from shoal.server.chat_body import ChatRequest
from shoal.server.errors import BadField
from shoal.server.response_items import InputItem
from shoal.server.tool_choice import (
    MOST_TOOLS,
    AllowedTool,
    AllowedTools,
    FunctionName,
    ToolChoice,
    ToolChoiceBody,
    choice_by_name,
    function_tool,
)

LOGPROBS = "message.output_text.logprobs"
MOST_METADATA = 16
REFUSED = {
    "conversation": "is not supported; use previous_response_id",
    "prompt": "is not supported: there are no stored prompts; send input and instructions",
    "context_management": "is not supported; use truncation",
    "moderation": "is not supported",
}
# Fields that are passed on under the same name.
SAME = (
    *("model", "temperature", "top_p", "stream", "stream_options", "top_k", "min_p", "seed", "stop", "timeout"),
    *("priority", "cache_salt", "tier", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("chat_template_kwargs", "thinking_token_budget", "parallel_tool_calls", "user", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)


class ResponseTool(Struct, omit_defaults=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Struct):
    """One of the tools that may be called."""

    type: Literal["function"]
    name: str


class ResponseToolChoice(Struct, omit_defaults=True):
    """A function that must be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MOST_TOOLS)] | None = None


class TextFormat(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """text: anything; json_object: any JSON object; json_schema: JSON that fits the schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # always treated as true


class TextOptions(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What the text must look like. `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Annotated[str, Meta(max_length=16)] | None = None


class ReasoningOptions(Struct, omit_defaults=True):
    """`effort` is for the chat template; none: no reasoning. Summaries are not made; other fields have no effect."""

    effort: Annotated[str, Meta(max_length=16)] | None = None
    summary: Annotated[str, Meta(max_length=16)] | None = None
    generate_summary: Annotated[str, Meta(max_length=16)] | None = None  # its older name


class InputTokensRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/input_tokens"""

    refused: ClassVar[dict[str, str]] = REFUSED

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MOST_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: None = None


class ResponsesRequest(InputTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses"""

    max_output_tokens: Annotated[int, limits("max_tokens")] | None = None
    max_tool_calls: Annotated[int, Meta(ge=0)] | None = None  # of tools that the server runs: there are none
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, limits("logprobs")] | None = None
    store: bool | None = None  # true by default
    metadata: Annotated[dict[str, str], Meta(max_length=MOST_METADATA)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, limits("temperature")] | None = None
    top_p: Annotated[float, limits("top_p")] | None = None
    # as in /v1/chat/completions
    top_k: Annotated[int, limits("top_k")] | None = None
    min_p: Annotated[float, limits("min_p")] | None = None
    seed: Annotated[int, limits("seed")] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Annotated[float, limits("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, limits("repetition_penalty")] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MOST_SALT)] | None = None
    tier: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    background: bool | None = None  # true: answered at once, and made in the background
    # refused by name
    prompt: None = None
    context_management: None = None
    moderation: None = None
    # without effect
    user: Ignored = UNSET
    service_tier: Ignored = UNSET
    safety_identifier: Ignored = UNSET
    prompt_cache_key: Ignored = UNSET
    prompt_cache_retention: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET


def check_body(body: ResponsesRequest) -> None:
    """Rules across its fields."""
    if body.background and body.store is False:
        raise BadField("background", "background requires store; leave out 'store': false")
    if body.input is None and body.previous_response_id is None:
        raise BadField("input", "input is missing")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
    for key, value in (body.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise BadField("metadata", "metadata has keys of at most 64 characters, and values of at most 512")


def chat_of(body: InputTokensRequest, messages: list[ChatMessage]) -> ChatRequest:
    """The same as a chat with these messages."""
    chat = ChatRequest(
        messages=messages,
        tools=[function_tool(one.name, one.description, one.parameters, one.strict) for one in body.tools or ()]
        or None,
        tool_choice=choice_of(body.tool_choice),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )
    for name in SAME:
        if name in body.__struct_fields__:
            setattr(chat, name, getattr(body, name))
    if body.text is not None and body.text.format is not None:
        chat.response_format = format_of(body.text.format)
    if isinstance(body, ResponsesRequest):
        chat.max_completion_tokens = body.max_output_tokens
        if LOGPROBS in (body.include or ()) or body.top_logprobs:
            chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    return chat


def choice_of(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> ToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function":
        return choice_by_name(choice.name)
    if choice.tools is None:
        raise BadField("tool_choice.tools", "tool_choice.tools is missing: which functions may be called")
    tools = [AllowedTool("function", FunctionName(tool.name)) for tool in choice.tools]
    return ToolChoiceBody("allowed_tools", allowed_tools=AllowedTools(choice.mode or "auto", tools))


def format_of(format: TextFormat) -> ResponseFormat:
    if (format.schema is not None) != (format.type == "json_schema"):
        raise BadField("text.format.schema", "text.format.schema goes with type 'json_schema'")
    if format.schema is None:
        return ResponseFormat(format.type)
    return ResponseFormat(
        "json_schema", JsonSchemaFormat(format.schema, format.name, format.description, format.strict)
    )


def own_names(error: BadField) -> BadField:
    """The same with the names that this body has for a chat's fields."""
    if error.param == "messages":
        return BadField("input", str(error))
    for theirs, ours in (
        ("].function", "]"),
        ("response_format", "text.format"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
    ):
        if theirs in error.param:
            return BadField(error.param.replace(theirs, ours), str(error).replace(theirs, ours))
    return error
