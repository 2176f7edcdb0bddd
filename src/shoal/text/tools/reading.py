"""Reads tool calls back from the text of a sample, piece by piece, in time linear in the text.

Owns the states of that. A grammar has held the text to its format, so there is nothing to guess; text that does not
fit (a call cut before its name) is dropped if it belongs to a call, and content otherwise.

    text ──opens──► name ──middle──► arguments ──end, again──► name …
                                          └────end───────────► over
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

from shoal.text.parts import Parsed, ToolCall, joined, parts_of

HELD_SPACE = 64  # characters of white space held back before a call that may follow
MOST_HEAD = 4096  # characters between what opens a call and its arguments
SHORT_ID = string.ascii_letters + string.digits
IN_STRING, OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')


class Arguments(Protocol):
    """Finds where the arguments of one call end."""

    def feed(self, text: str) -> tuple[str, int | None]:
        """(the JSON that this text adds, where in it the arguments end or None)."""


class JsonArguments:
    """Arguments that are JSON already: an object.

    >>> JsonArguments().feed('{"a": "}"}}')
    ('{"a": "}"}', 10)
    """

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> tuple[str, int | None]:
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while True:
            found = (IN_STRING if self._in_string else OUTSIDE).search(text, at)
            if found is None:
                return text, None
            at, sign = found.end(), found[0]
            if sign == "\\":
                if at == len(text):
                    self._escaped = True
                    return text, None
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return text[:at], at


class ReadState(Enum):
    TEXT = 0  # free text; a call may follow
    NAME = 1
    ARGUMENTS = 2
    END = 3  # of one call; another may follow
    OVER = 4  # no call follows


class CallReader:
    """Reads one sample. `heads`: what opens a call at the very start, and the tool it names; `opens` does anywhere."""

    def __init__(
        self,
        *,
        opens: str,
        heads: Mapping[str, str],
        begin: str,
        middle: str,
        again: str | None,
        arguments: Callable[[str], Arguments],  # by the tool's name
        short_ids: bool = False,
    ) -> None:
        self._opens, self._heads, self._begin, self._middle, self._again = opens, heads, begin, middle, again
        self._make_arguments, self._short_ids = arguments, short_ids
        self._state = ReadState.TEXT
        self._held = ""  # text that is not understood yet
        self._calls = 0
        self._arguments = arguments("")

    def push(self, text: str) -> Parsed:
        if self._state is ReadState.ARGUMENTS and not self._held:  # most of a call's text
            json, end = self._arguments.feed(text)
            if end is None:
                return parts_of("", [self._piece(json)] if json else [])
            self._state, self._held = ReadState.END, text[end:]
            calls = [self._piece(json)]
            return parts_of(self._read(calls), calls)
        self._held += text
        found: list[ToolCall] = []
        return parts_of(self._read(found), found)

    def finish(self, text: str) -> Parsed:
        last = self.push(text)
        if self._state is ReadState.TEXT and not self._begins_call(self._held):
            last = joined([last, self._held])
        self._held = ""
        return last

    def parse(self, text: str) -> Parsed:
        fresh = CallReader(
            opens=self._opens, heads=self._heads, begin=self._begin, middle=self._middle, again=self._again,
            arguments=self._make_arguments, short_ids=self._short_ids,
        )  # fmt: skip
        return joined([fresh.push(text), fresh.finish("")])

    # ---- states -----------------------------------------------------------------------------------------------------

    def _read(self, calls: list[ToolCall]) -> str:
        """Go on as far as the held text allows; returns content, and adds to `calls`."""
        content = ""
        while True:
            before = self._state
            if before is ReadState.TEXT:
                content += self._text(calls)
            elif before is ReadState.NAME:
                self._name(calls)
            elif before is ReadState.ARGUMENTS:
                json, end = self._arguments.feed(self._held)
                calls += [self._piece(json)] if json else []
                self._held = "" if end is None else self._held[end:]
                self._state = before if end is None else ReadState.END
            elif before is ReadState.END:
                self._end()
            else:
                return content + self._rest()
            if self._state is before:
                return content

    def _text(self, calls: list[ToolCall]) -> str:
        held = self._held
        if self._heads:
            return self._anchored(calls)
        at = held.find(self._opens)
        if at >= 0:
            self._state, self._held = ReadState.NAME, held[at + len(self._opens) :]
            return held[:at].rstrip()
        keep = partial_end(held, self._opens)
        shown = held[: len(held) - keep]
        space = len(shown) - len(shown.rstrip())
        if space > HELD_SPACE:
            space = 0
        border = len(shown) - space
        self._held = held[border:]
        return held[:border]

    def _anchored(self, calls: list[ToolCall]) -> str:
        held = self._held
        if any(head.startswith(held) for head in self._heads):
            return ""  # it may still become a call
        for head, name in self._heads.items():
            if held.startswith(head):
                self._held = held[len(head) :]
                self._open(name, calls)
                return ""
        self._state = ReadState.OVER
        return ""

    def _begins_call(self, held: str) -> bool:
        """Whether text that was held to the last is the beginning of a call, and not of text."""
        return bool(self._heads) and len(held) > 1 and any(head.startswith(held) for head in self._heads)

    def _name(self, calls: list[ToolCall]) -> None:
        begin, held = self._begin, self._held
        at = held.find(self._middle, len(begin))
        if at >= 0 and held.startswith(begin):
            self._held = held[at + len(self._middle) :]
            self._open(held[len(begin) : at], calls)
        elif len(held) > MOST_HEAD:
            self._state = ReadState.OVER

    def _open(self, name: str, calls: list[ToolCall]) -> None:
        calls.append(ToolCall(self._calls, "", self._new_id(), name))
        self._calls += 1
        self._arguments = self._make_arguments(name)
        self._state = ReadState.ARGUMENTS

    def _end(self) -> None:
        again, held = self._again, self._held
        if again is not None and held.startswith(again):
            self._state, self._held, self._begin = ReadState.NAME, held[len(again) :], ""
        elif again is None or not again.startswith(held):
            self._state, self._held = ReadState.OVER, ""

    def _rest(self) -> str:
        """Text after the last call belongs to it; text that was never a call is content."""
        text, self._held = self._held, ""
        return "" if self._calls else text

    def _piece(self, json: str) -> ToolCall:
        return ToolCall(self._calls - 1, json)

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(SHORT_ID) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def partial_end(text: str, wanted: str) -> int:
    """How many characters at the end of a text are the beginning of another.

    >>> partial_end("a <to", "<tool>"), partial_end("a", "<tool>")
    (3, 0)
    """
    for size in range(min(len(text), len(wanted) - 1), 0, -1):
        if text.endswith(wanted[:size]):
            return size
    return 0
