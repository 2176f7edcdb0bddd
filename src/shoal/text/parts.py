"""What the text of a sample consists of: content, reasoning and tool calls.

Owns the records that a parser returns and an API writes. Knows no format and no API.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, or the next piece of its arguments. `id` and `name` come with its first piece."""

    index: int  # among the calls of one sample
    arguments: str  # JSON text
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ParsedParts:
    """What some text consists of."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


Parsed: TypeAlias = str | ParsedParts  # a str is content and nothing else: plain text makes no object per token


def parts_of(content: str, calls: Iterable[ToolCall] = (), reasoning: str = "") -> Parsed:
    """A str where there is content alone.

    >>> parts_of("hello")
    'hello'
    """
    found = tuple(calls)
    return ParsedParts(content, reasoning, found) if found or reasoning else content


def joined(pieces: Iterable[Parsed]) -> Parsed:
    """The pieces of one sample as a whole; the pieces of each call become one.

    >>> joined(["a", ParsedParts("b", tool_calls=(ToolCall(0, "{", "x", "f"), ToolCall(0, "}")))])
    ParsedParts(content='ab', reasoning='', tool_calls=(ToolCall(index=0, arguments='{}', id='x', name='f'),))
    """
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
            continue
        content.append(piece.content)
        reasoning.append(piece.reasoning)
        for call in piece.tool_calls:
            calls.setdefault(call.index, call)
            arguments.setdefault(call.index, []).append(call.arguments)
    whole = (replace(call, arguments="".join(arguments[index])) for index, call in sorted(calls.items()))
    return parts_of("".join(content), whole, "".join(reasoning))
