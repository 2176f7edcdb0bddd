"""LarkRules of a grammar in Lark, as llguidance reads it, in which special tokens are written by their ids.

Owns the quoting. `marks` are the added tokens that llguidance never matches as text, such as <tool_call> of Qwen; the
same text is a literal for a model without that token. Knows no tools.

    text   free text; what opens a call ends it
    TEXT   free text without marks
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

ANY = r"(.|\n)*"


class LarkRules:
    """A grammar under construction. `free`: ids of the marks that free text may hold.

    >>> rules = LarkRules({"<call>": 7})
    >>> rules.literal("<call>[")
    '<[7]> "["'
    """

    def __init__(self, marks: Mapping[str, int], free: Collection[int] = ()) -> None:
        self.marks = marks
        self.free = sorted(free)
        self._rules: list[str] = []
        self._names = 0
        self._not: list[str] = []  # regexes of what TEXT never is
        ordered = sorted(marks, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def literal(self, text: str) -> str:
        """A fixed text."""
        if self._mark is None:
            return quoted(text)
        items, at = [], 0
        for found in self._mark.finditer(text):
            items += [quoted(text[at : found.start()])] if found.start() > at else []
            items.append(f"<[{self.marks[found[0]]}]>")
            at = found.end()
        return " ".join([*items, quoted(text[at:])] if at < len(text) or not items else items)

    def rule(self, body: str, attributes: str = "") -> str:
        """A new rule; returns its name."""
        self._names += 1
        name = f"r{self._names}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """JSON that fits a schema."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': dict(options)})}")

    def forbid(self, regex: str) -> None:
        """Free text is never all of this."""
        self._not.append(regex)

    def text(self) -> str:
        """Free text."""
        return f"TEXT ({self._free_marks()} TEXT)*" if self.free else "TEXT"

    def text_until(self, end: str) -> str:
        """Free text up to a fixed text, and that one."""
        before = f"(TEXT {self._free_marks()})* " if self.free else ""
        if end in self.marks:
            self.forbid(f"{ANY}{pattern(end)}{ANY}")  # spelled in other tokens it would not be noticed
            return f"{before}TEXT {self.literal(end)}"
        return before + self.rule(f"TEXT {quoted(end)}", "[lazy]")

    def write(self, start: str) -> str:
        text = f"/{ANY}/" + "".join(f" & ~/{regex}/" for regex in dict.fromkeys(self._not))
        return "\n".join([f"start: {start}", *self._rules, f"TEXT: {text}", ""])

    def _free_marks(self) -> str:
        return f"<[{','.join(map(str, self.free))}]>"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """A regex that matches a text alone.

    >>> pattern("[a/b]")
    '\\\\[a\\\\/b\\\\]'
    """
    special = set("\\^$.|?*+()[]{}/")
    return "".join(f"\\{one}" if one in special else r"\n" if one == "\n" else one for one in text)


def one_of(items: Iterable[str]) -> str:
    """One of these."""
    return f"({' | '.join(items)})"
