"""The parser stage: splits a sample's text into content, reasoning and tool calls.

Owns the interface and the plain parser, for which all text is content. A model family's own format is another class
with this interface. Knows no tokens and no API: the detokenizer stands before it, a dialect behind it.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


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


def content_of(parsed: Parsed) -> str:
    """The content, for an API that shows nothing else.

    >>> content_of("hello"), content_of(ParsedParts("hello", reasoning="be polite"))
    ('hello', 'hello')
    """
    return parsed if isinstance(parsed, str) else parsed.content


class Parser(Protocol):
    """Reads the text of one sample. A new one is made for each sample."""

    def push(self, text: str) -> Parsed:
        """What the next text adds. Text that may still become something else is held back."""

    def finish(self, text: str) -> Parsed:
        """What the last text adds, with all that was held back."""

    def parse(self, text: str) -> Parsed:
        """A whole text at once; does not look at what was pushed."""


class PlainParser:
    """All text is content."""

    __slots__ = ()

    def push(self, text: str) -> str:
        return text

    def finish(self, text: str) -> str:
        return text

    def parse(self, text: str) -> str:
        return text
