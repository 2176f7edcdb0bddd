"""Structural tags: an answer whose text is free up to certain marks, and constrained between them.

Owns the formats of xgrammar's structural tags, in their newer form (`format`) and their older one (`structures` and
`triggers`), as llguidance's list of grammars. Knows no requests and no tokens beyond marks.

    triggered_tags   free text <function=  get_weather>{"city": "Paris"}</function>  free text
                     └── text ──┘ trigger └ … begin ──┘└──── content ───┘└─ end ──┘
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shoal.core.job import GrammarSpec
from shoal.errors import BadGrammar
from shoal.text.gbnf import is_gbnf, lark_of
from shoal.text.tools.lark import ANY, LarkRules, one_of, pattern, quoted

MOST_DEPTH = 16  # of formats in formats
MOST_FORMATS = 512
FIELDS = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": ("excludes",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def structural(text: str, marks: Mapping[str, int], special: Collection[int]) -> GrammarSpec:
    """The grammar of a structural tag, given as JSON. Raises BadGrammar that says where it is wrong.

    >>> tag = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</n>"}
    >>> made = json.loads(structural(json.dumps({"format": tag}), {}, ()).text)["grammars"]
    >>> print(made[0]["lark_grammar"].splitlines()[0])
    start: "<n>" @g1 "</n>"
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the structural tag is not JSON: {error}; correct it") from error
    if not isinstance(given, dict):
        raise BadGrammar("a structural tag is a JSON object with a format; give one")
    rules = StructuralRules(marks, special)
    start = rules.of(modern(given), "format", 0)
    grammars = [{"name": "main", "lark_grammar": rules.write(start)}, *rules.grammars]
    return GrammarSpec("composed", json.dumps({"grammars": grammars}, ensure_ascii=False))


def modern(given: Mapping[str, Any]) -> Any:
    """The format of a structural tag; the older form becomes triggered tags."""
    if "structures" not in given and "triggers" not in given:
        return given.get("format")
    structures = given.get("structures")
    if not isinstance(structures, list) or not all(isinstance(one, Mapping) for one in structures):
        raise bad("structures", "is a list of objects with begin, schema and end")
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema") or {}},
            "end": one.get("end"),
        }
        for one in structures
    ]
    more = {"at_least_one": given.get("at_least_one") or False}
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags, **more}


class StructuralRules(LarkRules):
    """The rules of one structural tag, and the grammars that they refer to."""

    def __init__(self, marks: Mapping[str, int], special: Collection[int]) -> None:
        super().__init__(marks, [id for id in marks.values() if id not in special])
        self.grammars: list[dict[str, str]] = []
        self._formats = 0
        self._texts: dict[tuple[str, ...], str] = {}

    def of(self, given: Any, where: str, depth: int, until: str = "") -> str:
        """The items of a format; `until` is the text that ends it, where there is one."""
        kind, one = self._checked(given, where, depth)
        if kind == "const_string":
            return self.literal(text_of(one, "value", where))
        if kind == "any_text":
            return self._free(texts_of(one, "excludes", where, 0), until)
        if kind == "tag":
            return self._tag(one, where, depth)
        if kind == "sequence":
            return self._sequence(list_of(one, "elements", where), where, depth, until)
        if kind == "or":
            elements = list_of(one, "elements", where)
            return one_of(self.of(each, f"{where}.elements[{n}]", depth + 1) for n, each in enumerate(elements))
        if kind in REPEATS:
            return f"({self.of(one.get('content'), f'{where}.content', depth + 1)}){REPEATS[kind]}"
        if kind == "triggered_tags":
            return self._triggered(one, where, depth, until)
        if kind == "tags_with_separator":
            return self._separated(one, where, depth)
        return self._grammar(kind, one, where)

    def _checked(self, given: Any, where: str, depth: int) -> tuple[str, Mapping[str, Any]]:
        self._formats += 1
        if depth > MOST_DEPTH or self._formats > MOST_FORMATS:
            raise bad(
                where, f"is more than {MOST_DEPTH} formats deep, or has more than {MOST_FORMATS}; make it smaller"
            )
        if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
            raise bad(where, "is an object with a type")
        kind = given["type"]
        if kind not in FIELDS:
            raise bad(f"{where}.type", f"{kind[:40]!r} is not supported; known are {', '.join(FIELDS)}")
        for name in given:
            if name != "type" and name not in FIELDS[kind]:
                raise bad(f"{where}.{name[:40]}", f"is no field of {kind!r}, which has {', '.join(FIELDS[kind])}")
        return kind, given

    def _grammar(self, kind: str, one: Mapping[str, Any], where: str) -> str:
        """A format that is a grammar of its own."""
        from llguidance import LLMatcher

        if kind == "json_schema":
            schema = one.get("json_schema")
            if one.get("style", "json") != "json":
                raise bad(f"{where}.style", "may only be 'json'")
            if schema is True:
                schema = {}
            if not isinstance(schema, Mapping):
                raise bad(f"{where}.json_schema", "is a JSON schema, an object")
            return self.json(schema, {})
        source = text_of(one, "pattern" if kind == "regex" else "grammar", where)
        name = f"g{len(self.grammars) + 1}"
        if kind == "regex":
            source = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
        elif is_gbnf(source):
            source = lark_of(source)
        self.grammars.append({"name": name, "lark_grammar": source})
        return f"@{name}"

    # ---- free text --------------------------------------------------------------------------------------------------

    def _without(self, excludes: Sequence[str]) -> str:
        """A terminal: text without any of these."""
        key = tuple(sorted(set(excludes)))
        if key not in self._texts:
            self._texts[key] = name = f"FREE{len(self._texts) + 1}"
            forbidden = "".join(f" & ~/{ANY}{pattern(one)}{ANY}/" for one in key)
            self._rules.append(f"{name}: /{ANY}/{forbidden}")
        return self._texts[key]

    def _free(self, excludes: Sequence[str], until: str = "") -> str:
        """Text without any of `excludes`; one that is followed by a fixed text has that at its end."""
        if until:
            return self._up_to(until, excludes)
        text = self._without(excludes)
        return f"{text} ({self._free_marks()} {text})*" if self.free else text

    def _up_to(self, end: str, excludes: Sequence[str]) -> str:
        """Free text up to a fixed text, and that one."""
        mark = self._mark.search(end) if self._mark is not None else None
        first = end if mark is None else end[: mark.start()]
        before = self._without([*excludes, end])
        free = f"({before} {self._free_marks()})* " if self.free else ""
        if not first:
            return f"{free}{before} {self.literal(end)}"
        rest = f" {self.literal(end[len(first) :])}" if len(first) < len(end) else ""
        return free + self.rule(f"{self._without(excludes)} {quoted(first)}", "[lazy]") + rest

    # ---- formats of several parts -----------------------------------------------------------------------------------

    def _tag(self, one: Mapping[str, Any], where: str, depth: int, trigger: str = "") -> str:
        """From its beginning on, or from behind the trigger."""
        begin = text_of(one, "begin", where).removeprefix(trigger)
        ends = one.get("end")
        texts = [ends] if isinstance(ends, str) else ends
        if not isinstance(texts, list) or not texts or not all(isinstance(end, str) for end in texts):
            raise bad(f"{where}.end", "is a text, or a list of them")
        content, inner = one.get("content"), f"{where}.content"
        start = f"{self.literal(begin)} " if begin else ""
        if takes_end(content):
            return start + one_of(self.of(content, inner, depth + 1, end) for end in texts)
        closing = one_of(self.literal(end) for end in texts) if len(texts) > 1 else self.literal(texts[0])
        return f"{start}{self.of(content, inner, depth + 1)}{f' {closing}' if texts != [''] else ''}"

    def _sequence(self, elements: Sequence[Any], where: str, depth: int, until: str) -> str:
        parts, skipped = [], False
        for number, each in enumerate(elements):
            place = f"{where}.elements[{number}]"
            following = elements[number + 1] if number + 1 < len(elements) else None
            if skipped:  # the text before it has taken its beginning
                skipped = False
                if each["type"] == "tag":
                    parts.append(self._tag(each, place, depth + 1, trigger=each["begin"]))
                continue
            if not takes_end(each) or following is None:
                parts.append(self.of(each, place, depth + 1, until if following is None else ""))
                continue
            end = beginning(following)
            if not end:
                raise bad(place, "is free text, which must be last or be followed by a const_string or a tag")
            parts.append(self.of(each, place, depth + 1, end))
            skipped = True
        return " ".join(parts)

    def _triggered(self, one: Mapping[str, Any], where: str, depth: int, until: str) -> str:
        triggers = texts_of(one, "triggers", where)
        tags = [
            self._checked(tag, f"{where}.tags[{n}]", depth + 1)[1] for n, tag in enumerate(list_of(one, "tags", where))
        ]
        free = [*texts_of(one, "excludes", where, 0), *triggers]
        ways = []
        for trigger in triggers:
            opened = [(n, tag) for n, tag in enumerate(tags) if str(tag.get("begin", "")).startswith(trigger)]
            if not opened:
                raise bad(f"{where}.triggers", f"{trigger[:40]!r} begins none of the tags; leave it out")
            bodies = [self._tag(tag, f"{where}.tags[{n}]", depth + 1, trigger) for n, tag in opened]
            ways.append(
                f"{self._up_to(trigger, [other for other in free if other != trigger])} {self.rule(one_of(bodies))}"
            )
        for n, tag in enumerate(tags):
            if not any(str(tag.get("begin", "")).startswith(trigger) for trigger in triggers):
                raise bad(f"{where}.tags[{n}].begin", "begins with none of the triggers; add one")
        after = self.rule(one_of(ways))
        first = one_of(self._tag(tag, f"{where}.tags[{n}]", depth + 1) for n, tag in enumerate(tags))
        begins, once = one.get("at_least_one"), one.get("stop_after_first")
        rest = self._free(free, until)
        if once:
            closing = f" {self.literal(until)}" if until else ""
            return f"{first}{closing}" if begins else one_of([f"{after}{closing}", rest])
        return f"{first} {after}* {rest}" if begins else f"{after}* {rest}"

    def _separated(self, one: Mapping[str, Any], where: str, depth: int) -> str:
        tags = list_of(one, "tags", where)
        tag = self.rule(one_of(self.of(each, f"{where}.tags[{n}]", depth + 1) for n, each in enumerate(tags)))
        separator = one.get("separator", "")
        if not isinstance(separator, str):
            raise bad(f"{where}.separator", "is a text")
        more = (
            "" if one.get("stop_after_first") else f" ({self.literal(separator)} {tag})*" if separator else f" {tag}*"
        )
        return f"{tag}{more}" if one.get("at_least_one") else f"({tag}{more})?"


# ---- reading the fields


def takes_end(content: Any) -> bool:
    """Whether a format is free text at its end, and so has to know what follows it."""
    kind = content.get("type") if isinstance(content, Mapping) else None
    if kind == "sequence" and isinstance(content.get("elements"), list) and content["elements"]:
        return takes_end(content["elements"][-1])
    return kind in ("any_text", "triggered_tags")


def beginning(given: Any) -> str:
    """The fixed text that a format begins with; empty if there is none."""
    found = None
    if isinstance(given, Mapping):
        found = {"const_string": given.get("value"), "tag": given.get("begin")}.get(str(given.get("type")))
    return found if isinstance(found, str) else ""


def text_of(one: Mapping[str, Any], name: str, where: str) -> str:
    value = one.get(name)
    if not isinstance(value, str) or not value:
        raise bad(f"{where}.{name}", "is a text that is not empty")
    return value


def list_of(one: Mapping[str, Any], name: str, where: str) -> list[Any]:
    return _listed(one, name, where, lambda value: True, "is a list that is not empty")


def texts_of(one: Mapping[str, Any], name: str, where: str, least: int = 1) -> list[str]:
    if one.get(name) is None and not least:
        return []
    what = "is a list of texts that are not empty"
    return _listed(one, name, where, lambda value: isinstance(value, str) and bool(value), what, least)


def _listed(
    one: Mapping[str, Any], name: str, where: str, fits: Callable[[Any], bool], what: str, least: int = 1
) -> list[Any]:
    value = one.get(name)
    if not isinstance(value, list) or len(value) < least or not all(map(fits, value)):
        raise bad(f"{where}.{name}", what)
    return value


def bad(where: str, why: str) -> BadGrammar:
    return BadGrammar(f"the structural tag cannot be used: {where} {why}")
