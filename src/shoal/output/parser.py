"""The parser stage: splits a sample's text into content, reasoning and tool calls.

Owns the interface and the plain parser, for which all text is content. A model family's own format is another class
with this interface (text/tools). Knows no tokens and no API: the detokenizer stands before it, a dialect behind it.
"""

from typing import Protocol

from shoal.text.parts import Parsed, ParsedParts, ToolCall

__all__ = ["Parsed", "ParsedParts", "Parser", "PlainParser", "ToolCall", "calls_of", "content_of", "reasoning_of"]


def content_of(parsed: Parsed) -> str:
    """The content, for an API that shows nothing else.

    >>> content_of("hello"), content_of(ParsedParts("hello", reasoning="be polite"))
    ('hello', 'hello')
    """
    return parsed if isinstance(parsed, str) else parsed.content


def reasoning_of(parsed: Parsed) -> str:
    return "" if isinstance(parsed, str) else parsed.reasoning


def calls_of(parsed: Parsed) -> tuple[ToolCall, ...]:
    return () if isinstance(parsed, str) else parsed.tool_calls


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
