"""Harmony: what the grammar of a whole answer allows, what the reader makes of it, and what the template is given."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shoal.core.job import GrammarSpec, ThinkingLimit
from shoal.text.grammar import Grammars, source_of
from shoal.text.parts import Parsed, ParsedParts, joined
from shoal.text.reasoning import REASONING, reasoning_for, thought_after
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.compose import composed
from shoal.text.tools.formats import FORMATS
from shoal.text.tools.harmony import Harmony, HarmonyReader, channel_messages
from shoal.text.tools.schema import prepared
from tests.text import tiny

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = tuple(Tool(name, prepared(schema, True)[0]) for name, schema in (("get", CITY), ("get_x", None)))
ANALYSIS = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
REMARK = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city":"Paris"}'
FINAL = "<|channel|>final<|message|>Noon."


@cache
def grammars() -> Grammars:
    backend = Backend.from_str(tiny.byte_level().backend.to_str())
    backend.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    made = Tokenizer(backend, special=tiny.byte_level().special)
    ends = [backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>")]
    return Grammars(made, made.vocab_size, ends)


def grammar(use: ToolUse | None, **more: Any) -> GrammarSpec:
    tokenizer = grammars().tokenizer
    return composed(tokenizer.marks, tokenizer.pieces.special_ids, use=use, format=FORMATS["harmony"], **more)


def fits(spec: GrammarSpec, text: str) -> bool | None:
    """Whether an answer may be this text, and end; None: it may go on like this."""
    known = grammars()
    matcher, mask = known.make(spec), np.zeros_like(known._ends)
    for token in known.tokenizer.backend.encode(text, add_special_tokens=False).ids:
        matcher.fill(mask)
        assert not matcher.error, matcher.error
        if not mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return False
        matcher.accept(token)
    matcher.fill(mask)
    assert not matcher.error, matcher.error
    return True if (mask & known._ends).any() else None


def facts(parsed: Parsed) -> tuple[str, str, list[tuple[str, str]]]:
    if isinstance(parsed, str):
        return "", parsed, []
    return parsed.reasoning, parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


@pytest.mark.parametrize("before", ["", ANALYSIS, REMARK, ANALYSIS + REMARK])
@pytest.mark.parametrize("required", [False, True])
def test_a_call_may_follow_reasoning_and_a_remark(before: str, required: bool) -> None:
    spec = grammar(ToolUse(TOOLS, required))
    grammars().check(spec)
    if required and REMARK in before:
        assert fits(spec, before) is False, "a remark is no call"
        return
    assert fits(spec, before + CALL) is True
    for other in (" json", "<|constrain|>json", ""):
        assert fits(spec, before + CALL.replace(" <|constrain|>json", other)) is True
    turned = ' to=functions.get<|channel|>commentary json<|message|>{"city": "Paris"}'
    assert fits(spec, before + turned) is True
    assert fits(spec, before + CALL.replace("get", "got")) is False
    assert fits(spec, before + CALL.replace("city", "town")) is False
    assert fits(spec, before + CALL.replace("functions.", "")) is False
    assert fits(spec, before + FINAL) is (not required)
    assert fits(spec, before) is None, "reasoning alone is no answer"


def test_the_final_channel_is_held_to_a_format_and_the_others_are_not() -> None:
    answer = source_of(GrammarSpec("json", '{"type": "integer"}'))
    spec = grammar(None, answer=answer, thought=thought_after(REASONING["harmony"], "<|start|>assistant"))
    assert fits(spec, f"{ANALYSIS}<|channel|>final<|message|>12") is True
    assert fits(spec, f"{ANALYSIS}<|channel|>final <|constrain|>json<|message|>12") is True
    assert fits(spec, f"{ANALYSIS}{FINAL}") is False
    both = grammar(ToolUse(TOOLS), answer=answer)
    assert fits(both, "<|channel|>final<|message|>12") is True
    assert fits(both, CALL) is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, ("Look it up.", "Noon.", [])),
        (FINAL, ("", "Noon.", [])),
        ("<|channel|>analysis<|message|>\n a \n\n b \n<|end|><|start|>assistant" + FINAL, ("a \n\n b", "Noon.", [])),
        (ANALYSIS + CALL, ("Look it up.", "", [("get", '{"city":"Paris"}')])),
        (ANALYSIS + REMARK + CALL, ("Look it up.", "One moment.", [("get", '{"city":"Paris"}')])),
        (REMARK + FINAL, ("", "One moment.\n\nNoon.", [])),
        (ANALYSIS + ANALYSIS + FINAL, ("Look it up.\nLook it up.", "Noon.", [])),
        (' to=functions.get_x<|channel|>commentary json<|message|>{"a": "<|end|> }"}<|call|>',
         ("", "", [("get_x", '{"a": "<|end|> }"}')])),
        (CALL.replace("functions.get", "functions.other"), ("", '{"city":"Paris"}', [])),
        ("Noon.", ("", "Noon.", [])),
        (f"{FINAL}<|return|>", ("", "Noon.", [])),
        (FINAL + " < <| <|en", ("", "Noon. < <| <|en", [])),
        ("<|channel|>anal", ("", "", [])),
        ("", ("", "", [])),
    ],
)  # fmt: skip
def test_channels_are_told_apart_wherever_the_text_is_cut(text: str, expected: Any) -> None:
    names = ["get", "get_x"]
    assert facts(HarmonyReader(names).parse(text)) == expected
    assert facts(HarmonyReader(names, shown=False).parse(text)) == ("", *expected[1:])
    draw = random.Random(7)
    for _ in range(30):
        cuts = sorted(draw.choices(range(len(text) + 1), k=9))
        reader = HarmonyReader(names)
        pieces = [reader.push(text[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        pieces.append(reader.finish(text[cuts[-1] :]))
        assert facts(joined(pieces)) == expected
        called = [call for piece in pieces if isinstance(piece, ParsedParts) for call in piece.tool_calls if call.name]
        assert [call.name for call in called] == [name for name, _ in expected[2]], "a name comes once, with an id"


def test_text_is_shown_as_it_comes() -> None:
    reader = HarmonyReader(["get"])
    assert reader.push("<|channel|>final<|message|>") == ""
    assert reader.push("No") == "No"
    assert reader.push("on <") == "on "
    assert reader.push("b") == "<b"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [0, 5])
def test_any_output_that_the_grammar_allows_is_a_call(seed: int, tokens: int) -> None:
    """Any allowed token is as likely as another; the budget ends the reasoning."""
    known = grammars()
    spec = grammar(ToolUse(TOOLS[1:], required=True))
    marks = REASONING["harmony"]
    assert marks is not None
    limited = GrammarSpec(spec.kind, spec.text, ThinkingLimit(tokens, marks.opens, marks.closes, False))
    matcher, draw, mask = known.make(limited), np.random.default_rng(seed), np.zeros_like(known._ends)
    output: list[int] = []
    while len(output) < 3000 and not matcher.ended:
        matcher.fill(mask)
        assert not matcher.error, matcher.error
        output.append(int(draw.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))
        assert matcher.accept(output[-1])
    text = known.tokenizer.decode(output, skip_special=False)
    assert matcher.ended
    reasoning, content, ((name, arguments),) = facts(FORMATS["harmony"].reader(ToolUse(TOOLS)).parse(text))
    assert (name, json.loads(arguments), content) == ("get_x", {}, "")
    assert len(reasoning) <= 12 * tokens


def test_a_template_speaks_of_it() -> None:
    template = "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
    assert reasoning_for(template) == REASONING["harmony"]
    assert reasoning_for("<|user|>{{ message.content }}<|end|>") is None, "others end a message like this, too"
    assert thought_after(REASONING["harmony"], "<|end|><|start|>assistant") is not None
    assert thought_after(REASONING["harmony"], "assistant<|channel|>final<|message|>Once") is None, "it is continued"
    assert isinstance(FORMATS["harmony"], Harmony)


def test_the_template_gets_one_call_in_a_message_with_its_result_after_it() -> None:
    calls = [{"id": id, "type": "function", "function": {"name": id, "arguments": {}}} for id in "ab"]
    told = channel_messages(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm", "tool_calls": calls},
            {"role": "tool", "content": "1", "tool_call_id": "a"},
            {"role": "tool", "content": "2", "tool_call_id": "b"},
            {"role": "assistant", "content": "Done.", "reasoning_content": "Well"},
        ]
    )
    assert [one["role"] for one in told] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert told[1] == {"role": "assistant", "content": "", "thinking": "Hm\nWait.", "tool_calls": calls[:1]}
    assert told[3] == {"role": "assistant", "content": "", "tool_calls": calls[1:]}
    assert [told[2]["content"], told[4]["content"]] == ["1", "2"]
    assert told[5] == {"role": "assistant", "content": "Done.", "thinking": "Well"}
