"""Calls whose arguments are elements, as Qwen3-Coder writes them.

Owns that format. A text without further rules stands as it is; every other value is JSON. The reader turns the elements
into a JSON object. Knows no tokens.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>
"""

import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import BadGrammar
from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.lark import LarkRules, one_of, quoted
from shoal.text.tools.reading import CallReader, partial_end
from shoal.text.tools.schema import SEPARATORS, flat_properties

OPENS, BEGIN, PARAMETER = "<tool_call>", "\n<function=", "<parameter="
AFTER = ">\n"  # a name
VALUE_ENDS, ENDS = "\n</parameter>\n", "</function>"
LAST = f"{ENDS}\n</tool_call>"
AGAIN = f"\n</tool_call>\n{OPENS}{BEGIN}"  # between two calls
WORDS = frozenset({"type", "title", "description", "default", "examples", "deprecated"})  # which say nothing of a text


class XmlCalls:
    """The format."""

    name = "qwen3-coder"
    in_template = True
    texts = f"{OPENS}{BEGIN}{PARAMETER}{VALUE_ENDS}{LAST}"

    def rules(self, rules: LarkRules, use: ToolUse) -> str:
        return f"{rules.literal(OPENS + BEGIN)} {self._calls(rules, use)}"

    def rules_after_text(self, rules: LarkRules, use: ToolUse) -> str:
        opened = rules.text_until(OPENS)
        return one_of([rules.text(), f"{opened} {rules.literal(BEGIN)} {self._calls(rules, use)}"])

    def reader(self, use: ToolUse) -> CallReader:
        plain = {tool.name: frozenset(plain_texts(tool)) for tool in use.tools}
        return CallReader(
            opens=OPENS,
            heads={},
            begin=BEGIN,
            middle=AFTER,
            again=AGAIN if use.parallel else None,
            arguments=lambda name: XmlArguments(plain.get(name, frozenset())),
        )

    @staticmethod
    def _calls(rules: LarkRules, use: ToolUse) -> str:
        """From the first call's name to the end."""
        call = rules.rule(one_of(f"{rules.literal(tool.name + AFTER)} {elements(tool, rules)}" for tool in use.tools))
        if use.parallel:
            call += f" ({rules.literal(ENDS + AGAIN)} {call})*"
        return f"{call} {rules.literal(LAST)}"


def elements(tool: Tool, rules: LarkRules) -> str:
    """The items of all arguments, in the order of the schema; those that are not required may be left out."""
    properties, required, shared = flat_properties(tool.name, tool.parameters)
    plain, items = plain_texts(tool), ['""']
    for name, schema in properties.items():
        if ">" in name or "\n" in name or not name:
            raise BadGrammar(f"{tool.name!r} has a property {name[:40]!r}, which this format cannot name; rename it")
        head = rules.literal(f"{PARAMETER}{name}{AFTER}")
        if name in plain:
            item = f"{head} {text_of(schema, rules)}"
        else:
            whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
            item = f"{head} {rules.json(whole, SEPARATORS)} {rules.literal(VALUE_ENDS)}"
        items.append(item if name in required else f"({item})?")
    return " ".join(items)


def text_of(schema: Mapping[str, Any], rules: LarkRules) -> str:
    """A text that stands as it is, with what ends it."""
    if "enum" in schema:
        return f"{one_of(map(quoted, schema['enum']))} {rules.literal(VALUE_ENDS)}"
    return rules.text_until(VALUE_ENDS)


def plain_texts(tool: Tool) -> list[str]:
    """The properties that stand as they are: any text, or one of some."""
    found = []
    for name, schema in (tool.parameters.get("properties") or {}).items():
        if not isinstance(schema, Mapping) or schema.get("type") != "string":
            continue
        choices = schema.get("enum")
        if set(schema) <= WORDS or (
            set(schema) <= WORDS | {"enum"}
            and isinstance(choices, list)
            and choices
            and all(isinstance(one, str) and one and VALUE_ENDS not in f"{one}\n" for one in choices)
        ):
            found.append(name)
    return found


class XmlArguments:
    """Turns the elements of one call into a JSON object, piece by piece. `plain`: which of them are texts.

    >>> XmlArguments(frozenset({"a"})).feed('<parameter=a>\\nx "y"\\n</parameter>\\n</function>\\n')
    ('{"a": "x \\\\"y\\\\""}', 44)
    """

    __slots__ = ("_begun", "_held", "_is_plain", "_names", "_plain")

    def __init__(self, plain: frozenset[str]) -> None:
        self._plain = plain
        self._begun = False
        self._names = 0  # arguments that have begun
        self._is_plain: bool | None = None  # the value that is open; None: none is
        self._held = ""  # text that is not understood yet

    def feed(self, text: str) -> tuple[str, int | None]:
        before = len(self._held)  # of the text that came earlier
        held, out = self._held + text, [] if self._begun else ["{"]
        self._begun, at = True, 0
        while True:
            if self._is_plain is not None:
                at, done = self._value(held, at, out)
                if not done:
                    break
            elif held.startswith(ENDS, at):
                self._held = ""
                out.append("}")
                return "".join(out), at + len(ENDS) - before
            else:
                end = held.find(AFTER, at)
                if end < 0 or not held.startswith(PARAMETER, at):
                    break
                name = held[at + len(PARAMETER) : end]
                self._is_plain, at = name in self._plain, end + 2
                quote = '"' if self._is_plain else ""
                comma, self._names = ", " if self._names else "", self._names + 1
                out.append(f"{comma}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._held = held[at:]
        return "".join(out), None

    def _value(self, held: str, at: int, out: list[str]) -> tuple[int, bool]:
        """(where the text that is understood ends, whether the value ends there)."""
        end = held.find(VALUE_ENDS, at)
        to = end if end >= 0 else len(held) - partial_end(held[at:], VALUE_ENDS)
        value = held[at:to]
        out.append(json.dumps(value, ensure_ascii=False)[1:-1] if self._is_plain else value)
        if end < 0:
            return to, False
        out.append('"' if self._is_plain else "")
        self._is_plain = None
        return end + len(VALUE_ENDS), True
