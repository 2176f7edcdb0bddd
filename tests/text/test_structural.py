"""Structural tags: text is free up to a trigger, and constrained between the marks."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from shoal.errors import BadGrammar
from shoal.text.structural import structural

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
DIGIT = {"type": "regex", "pattern": "[0-9/]"}
ANY_TEXT = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def outcome(given: dict[str, Any], text: str) -> str:
    """`fits`, `goes on` where more must come, or the rest that did not fit."""
    matcher = LLMatcher(LLTokenizer("byte"), structural(json.dumps(given), {}, ()).text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for place, byte in enumerate(text.encode()):
        if not matcher.consume_token(byte):
            return text[place:]
    return "fits" if matcher.is_accepting() else "goes on"


LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": POINT, "end": "</function>"},
        {"begin": "<function=g>", "schema": POINT, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
THOUGHT = {
    "type": "sequence",
    "elements": [
        tag("<think>", ANY_TEXT, "</think>"),
        {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [tag("<f1>", {"type": "json_schema", "json_schema": POINT}, "</f>")],
            "stop_after_first": True,
        },
    ],
}
LIST = {
    "type": "tags_with_separator",
    "separator": "; ",
    "tags": [tag("[", {"type": "grammar", "grammar": 'root ::= "a" root?'}, "]"), tag("(", ANY_TEXT, [")", "!)"])],
    "at_least_one": True,
}


@pytest.mark.parametrize(
    ("given", "text", "expected"),
    [
        (LEGACY, "free < text", "fits"),
        (LEGACY, 'a <function=f>{"x": 1}</function> b <function=g>{"x":2}</function>', "fits"),
        (LEGACY, "a <function=h", "h"),
        (LEGACY, 'a <function=f>{"y', "y"),
        (LEGACY, 'a <function=f>{"x": 1}', "goes on"),
        ({**LEGACY, "at_least_one": True}, "free", "free"),
        ({"format": THOUGHT}, '<think>hm <f2> </think>so <f1>{"x":1}</f>', "fits"),
        ({"format": THOUGHT}, "<think>hm</think>so", "fits"),
        ({"format": THOUGHT}, "<think>hm", "goes on"),
        ({"format": THOUGHT}, "so", "so"),
        ({"format": THOUGHT}, '<think></think><f1>{"x":1}</f>more', "more"),
        ({"format": LIST}, "[aa]; (text! )", "fits"),
        ({"format": LIST}, "(x!); [a]", "fits"),
        ({"format": LIST}, "", "goes on"),
        ({"format": {**LIST, "at_least_one": False}}, "", "fits"),
        ({"format": {**LIST, "stop_after_first": True}}, "[a]; ", "; "),
        ({"format": {"type": "or", "elements": [DIGIT, {"type": "const_string", "value": "yes"}]}}, "/", "fits"),
        ({"format": {"type": "plus", "content": DIGIT}}, "1/2x", "x"),
        ({"format": {"type": "optional", "content": DIGIT}}, "", "fits"),
        ({"format": {**ANY_TEXT, "excludes": ["bad"]}}, "a bat, a bad", "d"),
        (
            {"format": {"type": "sequence", "elements": [ANY_TEXT, {"type": "const_string", "value": "END"}, DIGIT]}},
            "some text END7",
            "fits",
        ),
    ],
)  # fmt: skip
def test_what_fits(given: dict[str, Any], text: str, expected: str) -> None:
    assert outcome(given, text) == expected


def test_marks_are_tokens() -> None:
    """A trigger that is a token of its own is matched as that token, not as text."""
    given = {"format": {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag("<t>", DIGIT, "</t>")]}}
    made = structural(json.dumps(given), {"<t>": 7, "</t>": 8}, ()).text
    assert "<[7]>" in made
    assert "<[8]>" in made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "format is an object with a type"),
        ({"format": {"type": "token"}}, "'token' is not supported; known are const_string"),
        ({"format": {"type": "const_string", "valu": "x"}}, "format.valu is no field of 'const_string'"),
        ({"format": {"type": "const_string", "value": ""}}, "format.value is a text"),
        ({"format": {"type": "tag", "begin": "a", "content": ANY_TEXT}}, "format.end is a text"),
        ({"format": {"type": "sequence", "elements": [ANY_TEXT, DIGIT]}}, "must be last or be followed by"),
        ({"structures": LEGACY["structures"], "triggers": ["<x"]}, "begins none of the tags"),
        ({"structures": LEGACY["structures"], "triggers": []}, "format.triggers is a list"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "line 1: there is no rule 'x'"),
        ({"format": {"type": "triggered_tags", "triggers": ["a"], "tags": [tag("a", DIGIT, "b"), tag("b", DIGIT, "")]}},
         r"tags\[1\].begin begins with none of the triggers"),
    ],
)  # fmt: skip
def test_errors_say_where(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadGrammar, match=words):
        structural(json.dumps(given), {}, ())


def test_formats_within_formats_are_limited() -> None:
    deep: dict[str, Any] = DIGIT
    for _ in range(20):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(BadGrammar, match="make it smaller"):
        structural(json.dumps({"format": deep}), {}, ())
    wide = {"type": "or", "elements": [DIGIT] * 600}
    with pytest.raises(BadGrammar, match="make it smaller"):
        structural(json.dumps({"format": wide}), {}, ())
