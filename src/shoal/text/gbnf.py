"""GBNF, the grammars of llama.cpp (and xgrammar's EBNF), as Lark grammars for llguidance.

Owns the syntax: rules `name ::= …`, literals, character classes, groups, repetitions and comments. Every character is a
terminal of its own, since llguidance's lexer takes the longest terminal and GBNF has no lexer; a grammar without
recursion becomes one terminal, which is exact and quicker. Errors have line numbers. Knows no vocabulary.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.errors import BadGrammar

ROOT = "root"
MOST_DEPTH = 64  # of groups in groups
MOST_REPEATS = 10_000
RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<rule>[A-Za-z0-9_-]+\s*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<special><[^<>\s]+>)
    |(?P<times>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[().|])""",
    re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
PLAIN = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", **{one: one for one in "\\\"'[]-^/."}}


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF; Lark writes `name: …`.

    >>> is_gbnf('root ::= "a"'), is_gbnf('start: "a ::= b"')
    (True, False)
    """
    return RULE.search(text) is not None


def lark_of(text: str) -> str:
    """The same grammar in Lark. Raises BadGrammar that names the line.

    >>> print(lark_of('root ::= "a" [0-9]+'))
    start: ROOT
    ROOT: "a" /[0-9]/+
    """
    rules = GbnfReader(text).rules()
    reached, recursive = used(rules)
    if not recursive:
        names = {name: f"T{number}" if name != ROOT else "ROOT" for number, name in enumerate(rules)}
        lines = [f"{names[name]}: {written(rules[name].body, names, whole=True)}" for name in reversed(reached)]
        return "\n".join(["start: ROOT", *lines])
    names = {name: f"r{number}" if name != ROOT else "start" for number, name in enumerate(rules)}
    return "\n".join(f"{names[name]}: {written(rules[name].body, names, whole=False)}" for name in reached)


@dataclass
class Item:
    """A part of a rule: a literal, a set, the name of a rule, a special token, or a group of alternatives."""

    kind: str
    text: str
    line: int
    times: str = ""
    ways: "list[list[Item]]" = field(default_factory=list)


@dataclass
class Rule:
    """name ::= ways"""

    line: int
    body: list[list[Item]]


class GbnfReader:
    """Reads the rules of one grammar, token by token."""

    def __init__(self, text: str) -> None:
        self._tokens = tuple(tokens(text))
        self._at = 0

    def rules(self) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        while self._at < len(self._tokens):
            kind, text, line = self._next()
            if kind != "rule":
                raise bad(line, f"expected a rule, 'name ::= …', not {text!r}")
            name = text.removesuffix("::=").strip()
            if name in found:
                raise bad(line, f"the rule {name!r} is defined twice, first on line {found[name].line}")
            found[name] = Rule(line, self._ways(0))
        if ROOT not in found:
            raise BadGrammar(f"the GBNF grammar has no rule {ROOT!r}, where it begins; add one")
        for rule in found.values():
            check_names(rule.body, found)
        return found

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at][:2] if self._at < len(self._tokens) else ("rule", "")

    def _next(self) -> tuple[str, str, int]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _ways(self, depth: int) -> list[list[Item]]:
        """Alternatives, up to the end of the rule or of the group."""
        ways: list[list[Item]] = [[]]
        while True:
            kind, text = self._peek()
            if kind == "rule" or text == ")":
                return ways
            kind, text, line = self._next()
            if text == "|":
                ways.append([])
            elif kind == "times":
                self._repeat(ways[-1], text, line)
            elif text == "(":
                ways[-1].append(self._group(line, depth + 1))
            else:
                ways[-1].append(Item(kind, text, line))

    def _group(self, line: int, depth: int) -> Item:
        if depth > MOST_DEPTH:
            raise bad(line, f"groups are nested more than {MOST_DEPTH} deep; make it flatter")
        ways = self._ways(depth)
        if self._peek()[1] != ")":
            raise bad(line, "this '(' is not closed")
        self._next()
        return Item("group", "", line, ways=ways)

    @staticmethod
    def _repeat(items: list[Item], text: str, line: int) -> None:
        if not items:
            raise bad(line, f"{text!r} repeats nothing; put something before it")
        one = items[-1]
        if one.times:
            items[-1] = one = Item("group", "", one.line, ways=[[one]])
        one.times = times_of(text, line)


def tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, line) of each token, without spaces and comments."""
    at, line = 0, 1
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            what = text[at : at + 20].splitlines()[0]
            hint = {'"': "; a literal ends with a quote on the same line", "[": "; a set ends with ']'"}
            raise bad(line, f"{what!r} cannot be read{hint.get(text[at], '')}")
        kind = found.lastgroup or ""
        if kind != "space":
            yield kind, found[0], line
        line += found[0].count("\n")
        at = found.end()


def times_of(text: str, line: int) -> str:
    """A repetition as Lark has it.

    >>> times_of("{2,}", 1), times_of("{ 3 }", 1), times_of("*", 1)
    ('{2,}', '{3}', '*')
    """
    if not text.startswith("{"):
        return text
    least, comma, most = (part.strip() for part in text[1:-1].partition(","))
    if not comma and not least:
        raise bad(line, "{} has no number; write {3}, {3,} or {3,5}")
    low, high = int(least or 0), int(most or least or 0)
    if max(low, high) > MOST_REPEATS:
        raise bad(line, f"{text} repeats more than {MOST_REPEATS} times; lower it")
    if most and low > high:
        raise bad(line, f"{text} ends before it begins; swap the numbers")
    if not comma:
        return f"{{{low}}}"
    return f"{{{low},{most}}}"


def check_names(body: list[list[Item]], known: Mapping[str, Rule]) -> None:
    for way in body:
        for item in way:
            if item.kind == "name" and item.text not in known:
                raise bad(item.line, f"there is no rule {item.text!r}; define it, or correct the name")
            check_names(item.ways, known)


def used(rules: Mapping[str, Rule]) -> tuple[list[str], bool]:
    """(the rules that the root needs, it first; whether one of them needs itself). Without recursion each comes before
    those that it needs."""
    left: dict[str, Iterator[str]] = {ROOT: names_in(rules[ROOT].body)}  # rules being followed: each needs the next
    done: dict[str, None] = {}  # in the order in which they were left
    recursive = False
    while left:
        name = next(reversed(left))
        needed = next((one for one in left[name] if one not in done), None)
        if needed is None:
            done[name] = None
            del left[name]
        elif needed in left:
            recursive = True
        else:
            left[needed] = names_in(rules[needed].body)
    special = any(has_special(rules[name].body) for name in done)  # no part of a terminal
    return [*reversed(done)], recursive or special


def names_in(body: list[list[Item]]) -> Iterator[str]:
    for way in body:
        for item in way:
            if item.kind == "name":
                yield item.text
            yield from names_in(item.ways)


def has_special(body: list[list[Item]]) -> bool:
    return any(item.kind == "special" or has_special(item.ways) for way in body for item in way)


# ---- writing Lark


def written(body: list[list[Item]], names: Mapping[str, str], whole: bool) -> str:
    """`whole`: literals stay whole, else they become one terminal for each character."""
    ways = [" ".join(item_of(item, names, whole) for item in way) or '""' for way in body]
    return " | ".join(ways)


def item_of(item: Item, names: Mapping[str, str], whole: bool) -> str:
    if item.kind == "name":
        text = names[item.text]
    elif item.kind == "group":
        text = f"({written(item.ways, names, whole)})"
    elif item.kind == "literal":
        text = literal_of(item, whole)
    elif item.kind == "set":
        text = set_of(item)
    else:
        text = r"/(.|\n)/" if item.text == "." else item.text
    return text + item.times


def literal_of(item: Item, whole: bool) -> str:
    value = unescaped(item.text[1:-1], item.line)
    if whole or len(value) <= 1:
        return json.dumps(value, ensure_ascii=False)
    parts = " ".join(json.dumps(one, ensure_ascii=False) for one in value)
    return f"({parts})"


def set_of(item: Item) -> str:
    """A set of characters as a regex."""
    inner = item.text[1:-1]
    inverted = inner.startswith("^")
    found, at = [], int(inverted)
    while at < len(inner):
        first, at = character(inner, at, item.line)
        if inner[at : at + 1] == "-" and at + 1 < len(inner):
            last, at = character(inner, at + 1, item.line)
            if ord(last) < ord(first):
                raise bad(item.line, f"the range {first!r} to {last!r} in {item.text[:40]} is empty; swap its ends")
            found.append(f"{in_set(first)}-{in_set(last)}")
        else:
            found.append(in_set(first))
    if not found:
        if inverted:
            return r"/(.|\n)/"
        raise bad(item.line, "[] has no characters; put some into it")
    return f"/[{'^' if inverted else ''}{''.join(found)}]/"


def in_set(one: str) -> str:
    return one if one.isalnum() and one.isascii() else f"\\u{{{ord(one):x}}}"


def character(text: str, at: int, line: int) -> tuple[str, int]:
    """(the character at this place, where the next begins)."""
    if text[at] != "\\":
        return text[at], at + 1
    found = ESCAPE.match(text, at)
    assert found is not None, "the tokenizer takes a backslash only with what follows it"
    return one_escaped(found, line), found.end()


def unescaped(text: str, line: int) -> str:
    return ESCAPE.sub(lambda found: one_escaped(found, line), text)


def one_escaped(found: "re.Match[str]", line: int) -> str:
    code = found[1] or found[2] or found[3]
    if code is None and found[4] in PLAIN:
        return PLAIN[found[4]]
    number = -1 if code is None else int(code, 16)
    if not 0 <= number < 0x110000 or 0xD800 <= number < 0xE000:
        raise bad(line, f"{found[0]!r} stands for no character; write \\\\, \\n, \\xHH or \\uHHHH")
    return chr(number)


def bad(line: int, why: str) -> BadGrammar:
    return BadGrammar(f"the GBNF grammar cannot be read, line {line}: {why}")
