"""Calls with elements, as Qwen3-Coder writes them: texts as they are, other values as JSON, read back as one object."""

import json
import random
from typing import Any

import numpy as np
import pytest

from shoal.errors import BadGrammar
from shoal.text.parts import joined
from shoal.text.tools.calls import ToolUse
from shoal.text.tools.formats import FORMATS
from tests.text.tools.test_tool_formats import facts, fits, grammar, grammars, tool

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Anything."},
        "unit": {"type": "string", "enum": ["°C", "two\nlines"]},
        "day": {"type": "string", "format": "date"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "deep": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    "required": ["text", "day"],
}
USE = ToolUse((tool("write", SCHEMA, strict=False),), required=True)
FORMAT = FORMATS["qwen3-coder"]


def call(**values: str) -> str:
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    "text",
    ["a", "", "\n", 'say "hi"\\n\t</parameter> </function>\n<tool_call', "def f():\n    return 1\n", "été 日本\u2028"],
)
def test_a_text_stands_as_it_is(text: str, marked: bool) -> None:
    written = call(text=text, day='"2026-01-02"')
    assert fits(grammar("qwen3-coder", USE, marked), written, marked) is True
    (found,) = facts(FORMAT.reader(USE).parse(written))[1]
    assert json.loads(found[1]) == {"text": text, "day": "2026-01-02"}
    for end in range(len(written)):
        assert facts(joined([(read := FORMAT.reader(USE)).push(written[:end]), read.finish(written[end:])]))[1] == [
            found
        ]


@pytest.mark.parametrize(
    ("values", "good"),
    [
        ({"text": "a", "unit": "two\nlines", "day": '"2026-01-02"', "maybe": "null", "deep": '[{"a": 1}]'}, True),
        ({"text": "a", "day": '"2026-01-02"', "maybe": '"b"'}, True),
        ({"text": "a"}, False),
        ({"text": "a", "day": "soon"}, False),
        ({"text": "a", "unit": "K", "day": '"2026-01-02"'}, False),
        ({"text": "a", "day": '"2026-01-02"', "deep": '[{"a": "x"}]'}, False),
        ({"text": "a", "day": '"2026-01-02"', "other": "x"}, False),
    ],
)
def test_values_are_held_to_their_schemas(values: dict[str, str], good: bool) -> None:
    written = call(**values)
    assert (fits(grammar("qwen3-coder", USE), written) is True) == good
    if good:
        plain = {name: value if name in ("text", "unit") else json.loads(value) for name, value in values.items()}
        (found,) = facts(FORMAT.reader(USE).parse(written))[1]
        assert json.loads(found[1]) == plain


def test_any_output_that_the_grammar_allows_can_be_read() -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    use = ToolUse((tool("f", schema),), required=True)
    known, spec = grammars(True), grammar("qwen3-coder", use, True)
    ended = 0
    for seed in range(5):
        matcher, draw, mask = known.make(spec), np.random.default_rng(seed), np.zeros_like(known._ends)
        output: list[int] = []
        ending = known.tokenizer.encode("\n</parameter>\n", add_special=False)
        while len(output) < 400 and not matcher.ended:
            matcher.fill(mask)
            assert not matcher.error, matcher.error
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            wanted = (
                ending if len(output) > 30 and matcher.allows(ending) == len(ending) else [int(draw.choice(allowed))]
            )
            for token in wanted:  # a text that has become long is ended
                assert matcher.accept(token)
            output += wanted
        ((name, arguments),) = facts(FORMAT.reader(use).parse(known.tokenizer.decode(output, skip_special=False)))[1]
        ended += matcher.ended
        assert name == "f"
        if matcher.ended:
            values: dict[str, Any] = json.loads(arguments)
            assert isinstance(values["a"], str)
            assert isinstance(values["b"], bool)
    assert ended >= 4


def test_pieces_of_a_text_are_escaped_each_by_itself() -> None:
    written = call(text='"\\\n' * 20, day='"2026-01-02"')
    whole = facts(FORMAT.reader(USE).parse(written))
    draw = random.Random(3)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(written) + 1), 9))
        reader = FORMAT.reader(USE)
        pieces = [reader.push(written[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        assert facts(joined([*pieces, reader.finish(written[cuts[-1] :])])) == whole


@pytest.mark.parametrize(
    "schema", [{"properties": {"a>b": {}}}, {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}]
)
def test_what_cannot_be_written_is_refused(schema: Any) -> None:
    with pytest.raises(BadGrammar, match="'f'"):
        grammar("qwen3-coder", ToolUse((tool("f", schema),)))
