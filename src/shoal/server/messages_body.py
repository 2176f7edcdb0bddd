"""The body of Anthropic's /v1/messages, and how it becomes a chat's.

Owns its fields: which of them have a meaning here, and which are refused by name. Knows no HTTP beyond its errors.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from shoal.server.bodies import (
    MOST_MESSAGES,
    ChatMessage,
    Ignored,
    JsonSchemaFormat,
    Nothing,
    ResponseFormat,
    TextPart,
    limits,
)
from shoal.server.chat_body import ChatRequest
from shoal.server.errors import BadField
from shoal.server.tool_choice import MOST_TOOLS, ToolChoice, choice_by_name, function_tool


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
        tools=[function_tool(one.name, one.description, one.input_schema, one.strict) for one in body.tools or ()]
        or None,
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


def choice_of(choice: MessagesToolChoice | None) -> ToolChoice | None:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        return "required"
    return choice_by_name(choice.name)
