"""Calls in the manner of Python: [get_weather(city="Paris", days=3), now()], as Llama 4 and some of Llama 3.2 write.

Owns that format. Values are JSON, but for True, False and None; the reader turns arguments into a JSON object. Knows no
tokens.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.lark import ANY, LarkRules, one_of, pattern, quoted
from shoal.text.tools.reading import CallReader
from shoal.text.tools.schema import SEPARATORS, flat_properties

WORDS = {"True": "true", "False": "false", "None": "null"}


class Pythonic:
    """A list of calls."""

    name = "pythonic"
    in_template = True
    prefixes = ("[", "<|python_start|>[")
    texts = "<|python_start|>"

    def rules(self, rules: LarkRules, use: ToolUse) -> str:
        return f'"[" {self._calls(rules, use)}'

    def rules_after_text(self, rules: LarkRules, use: ToolUse) -> str:
        for tool in use.tools:
            rules.forbid(pattern(f"[{tool.name}(") + ANY)
        bodies = {tool.name: rules.rule(arguments_of(tool, rules)) for tool in use.tools}
        more = self._more(rules, bodies) if use.parallel else ""
        marked = self.prefixes[1].removesuffix("[") in rules.marks
        heads = self.prefixes if marked else self.prefixes[:1]
        calls = [
            f'{rules.literal(f"{head}{name}(")} {body} ")" {more} "]"'
            for head in heads
            for name, body in bodies.items()
        ]
        return one_of([rules.text(), *calls])

    def reader(self, use: ToolUse) -> CallReader:
        return CallReader(
            opens="",
            heads={f"{head}{tool.name}(": tool.name for head in self.prefixes for tool in use.tools},
            begin="",
            middle="(",
            again=", " if use.parallel else None,
            arguments=lambda name: PythonArguments(),
        )

    def _calls(self, rules: LarkRules, use: ToolUse) -> str:
        bodies = {tool.name: rules.rule(arguments_of(tool, rules)) for tool in use.tools}
        first = rules.rule(one_of(f'{quoted(f"{name}(")} {body} ")"' for name, body in bodies.items()))
        return f'{first} {self._more(rules, bodies) if use.parallel else ""} "]"'

    @staticmethod
    def _more(rules: LarkRules, bodies: Mapping[str, str]) -> str:
        call = rules.rule(one_of(f'{quoted(f", {name}(")} {body} ")"' for name, body in bodies.items()))
        return f"{call}*"


def arguments_of(tool: Tool, rules: LarkRules) -> str:
    """The items between the brackets: the properties in the order of the schema, those that are not required or not
    at all."""
    properties, required, shared = flat_properties(tool.name, tool.parameters)
    first = rest = ""
    for name, one in reversed(list(properties.items())):
        item = f"{quoted(f'{key_of(name)}=')} {value_of(one, shared, rules)}"
        after = rules.rule(rest or '""')
        begun = f"{item} {after}"
        if name in required:
            first, rest = begun, f'", " {begun}'
        else:
            first, rest = one_of([begun, first or '""']), one_of([f'", " {begun}', after])
    return first or '""'


def key_of(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name, ensure_ascii=False)


def value_of(schema: Any, shared: Mapping[str, Any], rules: LarkRules) -> str:
    """The items of one value."""
    if not isinstance(schema, Mapping):
        return rules.json({}, SEPARATORS)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not {"boolean", "null"} & set(map(str, kinds)) or "enum" in schema or "const" in schema:
        return rules.json({**shared, **schema}, SEPARATORS)
    items = [
        quoted(word) for word, kind in (("True", "boolean"), ("False", "boolean"), ("None", "null")) if kind in kinds
    ]
    others = [kind for kind in kinds if kind not in ("boolean", "null")]
    if others:
        items.append(rules.json({**shared, **schema, "type": others}, SEPARATORS))
    return one_of(items)


SIGNS = re.compile(r'["{}\[\](),=]|\\.?', re.DOTALL)


class PythonArguments:
    """Turns city="Paris", days=3) into {"city": "Paris", "days": 3}, piece by piece.

    >>> PythonArguments().feed('city="a, b)", warm=True)]')
    ('{"city": "a, b)", "warm": true}', 24)
    """

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "_key", "_value")

    def __init__(self) -> None:
        self._begun = False
        self._depth = 0  # of brackets in a value
        self._in_string = self._escaped = False
        self._key: str | None = ""  # the part of a key that was read; None: in a value
        self._value = ""  # of a value that is a bare word, as far as it was read

    def feed(self, text: str) -> tuple[str, int | None]:
        out: list[str] = []
        if not self._begun:
            self._begun = True
            out.append("{")
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
            out.append(text[0])
        while at < len(text):
            sign = SIGNS.search(text, at)
            end = len(text) if sign is None else sign.start()
            if end > at:
                self._plain(text[at:end], out)
            if sign is None:
                break
            at = sign.end()
            if self._sign(sign[0], out):
                return "".join(out), at
        return "".join(out), None

    def _plain(self, text: str, out: list[str]) -> None:
        if self._key is not None:
            self._key += text
        elif self._in_string or self._depth:
            out.append(text)
        else:
            self._value += text

    def _sign(self, sign: str, out: list[str]) -> bool:
        """True: the arguments end with it."""
        if self._key is not None and not self._in_string:
            return self._sign_in_key(sign, out)
        if self._key is not None:  # a quoted key
            self._key += sign
            self._in_string = sign != '"'
            return False
        if sign.startswith("\\"):
            out.append(sign)
            self._escaped = len(sign) == 1
        elif sign == '"':
            self._in_string = not self._in_string
            out.append(sign)
        elif self._in_string:
            out.append(sign)
        elif sign in "{[":
            self._depth += 1
            out.append(sign)
        elif sign in "}]":
            self._depth -= 1
            out.append(sign)
        elif self._depth:
            out.append(sign)
        else:
            return self._value_ends(sign, out)
        return False

    def _sign_in_key(self, sign: str, out: list[str]) -> bool:
        assert self._key is not None
        if sign == "=":
            key = self._key.strip()
            out.append(f"{key if key.startswith(chr(34)) else json.dumps(key, ensure_ascii=False)}: ")
            self._key = None
        elif sign == ")":
            out.append("}")
            return True
        else:
            self._in_string = sign == '"'
            self._key += sign
        return False

    def _value_ends(self, sign: str, out: list[str]) -> bool:
        word, self._value = self._value.strip(), ""
        out.append(WORDS.get(word, word))
        if sign == ",":
            out.append(", ")
            self._key = ""
            return False
        out.append("}")
        return True
