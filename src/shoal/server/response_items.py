"""Items of /v1/responses: messages, reasoning, function calls and their results.

Owns the items of an input and how they become a chat's messages, and the records of the items of an answer. Knows no
HTTP beyond its errors, no store and no tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shoal.server.bodies import ChatMessage, TextPart
from shoal.server.errors import BadField
from shoal.server.logprobs import TokenLogprob

ROLES = ("user", "assistant", "system", "developer")
ItemStatus = Literal["in_progress", "completed", "incomplete"]

# ---- what is sent


class ContentPart(Struct):
    """A part of an item's content; only text is supported. Other fields of it have no effect."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None

    def words(self, where: str) -> str:
        found = self.refusal if self.type == "refusal" else self.text
        if found is None:
            raise BadField(where, f"{where} has no text; give one")
        return found


class InputItem(Struct, omit_defaults=True):
    """One item: a message (with or without its type), a call of a function, its result, reasoning, or a reference to an
    item of a stored response. Other fields of it have no effect."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    status: str | None = None

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        return "message" if self.role is not None or self.id is None else "item_reference"


Source = tuple[InputItem, str]  # an item and where it comes from, for errors


def messages_of(items: Iterable[Source], developer: str) -> list[ChatMessage]:
    """The same as a chat: reasoning, text and calls that follow each other are one message of the assistant.
    `developer`: the role that stands for developer in this model's chat template."""
    found: list[ChatMessage] = []
    reasoning: list[str] = []
    for item, where in items:
        kind = item.kind
        if kind == "reasoning":
            reasoning += [part.words(where) for part in (parts(item.content) or item.summary or [])]
            continue
        if kind == "function_call_output":
            output = item.output if isinstance(item.output, str) else texts(item.output, f"{where}.output")
            found.append(ChatMessage(role="tool", content=output, tool_call_id=needed(item.call_id, where, "call_id")))
            continue
        last = found[-1] if found and found[-1].role == "assistant" and not reasoning else None
        if kind == "function_call":
            last = last or added(found, ChatMessage(role="assistant"))
            last.tool_calls = [*(last.tool_calls or ()), call_of(item, where)]
        else:
            last = added(found, message_of(item, where, developer))
        if reasoning and last.role == "assistant":
            last.reasoning_content, reasoning = "\n".join(reasoning), []
    return joined_first(found)


def added(found: list[ChatMessage], one: ChatMessage) -> ChatMessage:
    found.append(one)
    return one


def joined_first(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The system's first messages as one: most templates take one, and only at the beginning."""
    count = next((n for n, one in enumerate(messages) if one.role != "system"), len(messages))
    if count < 2:
        return messages
    content = "\n\n".join(text_of(one.content) for one in messages[:count])
    return [ChatMessage(role="system", content=content), *messages[count:]]


def message_of(item: InputItem, where: str, developer: str) -> ChatMessage:
    role = needed(item.role, where, "role")
    if role not in ROLES:
        raise BadField(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}")
    content = item.content if isinstance(item.content, str) else texts(item.content, f"{where}.content")
    return ChatMessage(role=developer if role == "developer" else role, content=content)


def call_of(item: InputItem, where: str) -> dict[str, Any]:
    function = {"name": needed(item.name, where, "name"), "arguments": needed(item.arguments, where, "arguments")}
    return {"id": needed(item.call_id, where, "call_id"), "type": "function", "function": function}


def parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    return [ContentPart("text", content)] if isinstance(content, str) else content or []


def texts(content: list[ContentPart] | None, where: str) -> list[TextPart]:
    if content is None:
        raise BadField(where, f"{where} is missing")
    return [TextPart("text", part.words(f"{where}[{number}]")) for number, part in enumerate(content)]


def text_of(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def needed(value: str | None, where: str, field: str) -> str:
    if value is None:
        raise BadField(f"{where}.{field}", f"{where}.{field} is missing")
    return value


def stored_items(items: Sequence[InputItem], uid: str) -> list[dict[str, Any]]:
    """As they are listed later: each with an id, a type and its content in parts."""
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        kind = item.kind
        plain: dict[str, Any] = msgspec.to_builtins(item)
        prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}.get(kind, "rs")
        plain |= {"id": item.id or f"{prefix}_{uid}i{number}", "type": kind}
        if kind == "message":
            part = "output_text" if item.role == "assistant" else "input_text"
            plain["content"] = [written(one, part) for one in parts(item.content)]
        elif kind == "reasoning":
            plain |= {"summary": plain.get("summary", [])}
            if isinstance(item.content, str):
                plain["content"] = [{"type": "reasoning_text", "text": item.content}]
        if kind != "reasoning":
            plain["status"] = item.status or "completed"
        found.append(plain)
    return found


def written(part: ContentPart, kind: str) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal or ""}
    own: dict[str, Any] = {"type": kind, "text": part.text or ""}
    return own | ({"annotations": []} if kind == "output_text" else {})


# ---- what is answered


class OutputText(Struct):
    """The text of a message. Logprobs come where `include` asks for them."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(Struct):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class ReasoningText(Struct):
    """Reasoning in the model's own words."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(Struct):
    """What the model wrote before its answer. It is not summarized and not encrypted."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    encrypted_content: None = None


class FunctionCallItem(Struct):
    """A call of a function. Its result comes back in an item of the type function_call_output with its call_id."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"] = "function_call"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class ResponseEvent(Struct):
    """One event of a streamed /v1/responses; what else it has depends on its type."""

    type: str
    sequence_number: int
    response: dict[str, Any] | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
