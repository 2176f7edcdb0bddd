"""Formats of tool calls: what the grammar allows, what the reader makes of it, and which template speaks of which."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shoal.config.serve import TOOL_FORMATS
from shoal.core.job import GrammarSpec
from shoal.errors import BadGrammar
from shoal.text.grammar import Grammars, source_of
from shoal.text.parts import Parsed, ParsedParts, joined
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.compose import Thought, composed
from shoal.text.tools.formats import FORMATS, format_for
from shoal.text.tools.prompt import with_tools
from shoal.text.tools.schema import prepared
from tests.text import tiny

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "</think>")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
ONE = '{"city": "Paris", "days": 3}'
# format → an answer with one call of get, and one with a second of get_x
ANSWERS = {
    "hermes": (
        f'<tool_call>\n{{"name": "get", "arguments": {ONE}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "get_x", "arguments": {}}\n</tool_call>',
    ),
    "llama3": (f'{{"name": "get", "parameters": {ONE}}}', None),
    "pythonic": ('[get(city="Paris", days=3)]', '[get(city="Paris", days=3), get_x()]'),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "get", "arguments": {ONE}}}]',
        f'[TOOL_CALLS][{{"name": "get", "arguments": {ONE}}}, {{"name": "get_x", "arguments": {{}}}}]',
    ),
    "mistral-args": (f"[TOOL_CALLS]get[ARGS]{ONE}", f"[TOOL_CALLS]get[ARGS]{ONE}[TOOL_CALLS]get_x[ARGS]{{}}"),
}
ANSWERS["hermes"] = (ANSWERS["hermes"][0], ANSWERS["hermes"][0] + str(ANSWERS["hermes"][1]))
ANSWERS["generic"] = ANSWERS["hermes"]
XML = (
    "<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
    "\n</tool_call>"
)
ANSWERS["qwen3-coder"] = (XML, f"{XML}\n<tool_call>\n<function=get_x>\n</function>\n</tool_call>")
PLAIN = [name for name in FORMATS if name != "harmony"]  # which has channels, and tests of its own


def tool(name: str, schema: Any = None, strict: bool = True) -> Tool:
    return Tool(name, prepared(schema, strict)[0])


TOOLS = (tool("get", WEATHER), tool("get_x"))


@cache
def grammars(marked: bool = False) -> Grammars:
    """For a vocabulary without special tokens for calls, or with them."""
    backend = Backend.from_str(tiny.byte_level().backend.to_str())
    if marked:
        backend.add_tokens([AddedToken(mark, special=mark[0] == "[") for mark in MARKS])
    made = Tokenizer(backend, special=tiny.byte_level().special)
    return Grammars(made, made.vocab_size, [2])


def grammar(name: str, use: ToolUse, marked: bool = False, **more: Any) -> GrammarSpec:
    tokenizer = grammars(marked).tokenizer
    return composed(tokenizer.marks, tokenizer.pieces.special_ids, use=use, format=FORMATS[name], **more)


def fits(spec: GrammarSpec, text: str, marked: bool = False) -> bool | None:
    """Whether an answer may be this text; None: it may go on like this."""
    known = grammars(marked)
    matcher = known.make(spec)
    mask = np.zeros_like(known._ends)
    for token in known.tokenizer.backend.encode(text, add_special_tokens=False).ids:
        matcher.fill(mask)
        assert not matcher.error, matcher.error
        if not mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return False
        matcher.accept(token)
    matcher.fill(mask)
    assert not matcher.error, matcher.error
    return True if mask[0] >> np.uint32(2) & np.uint32(1) else None


def facts(parsed: Parsed) -> tuple[str, list[tuple[str, str]]]:
    if isinstance(parsed, str):
        return parsed, []
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


def test_every_format_can_be_chosen_by_flag() -> None:
    assert ("auto", *FORMATS) == TOOL_FORMATS
    assert set(ANSWERS) == set(PLAIN)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_a_call_fits_its_grammar_and_is_read_back(name: str, required: bool, marked: bool) -> None:
    use = ToolUse(TOOLS, required, parallel=True)
    spec = grammar(name, use, marked)
    one, two = ANSWERS[name]
    expected = [("get", ONE), ("get_x", "{}")]
    assert fits(spec, one, marked) is True
    assert facts(FORMATS[name].reader(use).parse(one)) == ("", expected[:1])
    if two is not None:
        assert fits(spec, two, marked) is True
        assert facts(FORMATS[name].reader(use).parse(two)) == ("", expected)
        single = ToolUse(TOOLS, required)
        assert fits(grammar(name, single, marked), two, marked) is False
    assert fits(spec, one.replace("3", "no"), marked) is False
    stays_text = not required and name in ("llama3", "pythonic")  # which are recognized by the names of their tools
    assert fits(spec, one.replace("get", "got"), marked) is stays_text


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_text_without_a_call_is_free(name: str, marked: bool) -> None:
    use = ToolUse(TOOLS)
    spec = grammar(name, use, marked)
    for text in ("", "Hello.", '{"name": "Joe"}', "[1, 2] {} <tool>", "a <tool_cal", "[get", "été 日本 \n\n x"):
        assert fits(spec, text, marked) is True
        plain = "" if name in ("llama3", "pythonic") and text in ("[get",) else text
        read = FORMATS[name].reader(use)
        assert facts(joined([read.push(text), read.finish("")]))[0] in (text, plain)
    assert fits(grammar(name, ToolUse(TOOLS, required=True), marked), "Hello.", marked) is False


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-args", "generic", "qwen3-coder"])
def test_text_may_come_before_a_call_and_loses_the_space_between_them(name: str) -> None:
    use = ToolUse(TOOLS)
    text = f"Let me see.\n\n{ANSWERS[name][0]}"
    assert fits(grammar(name, use), text) is True
    assert facts(FORMATS[name].reader(use).parse(text)) == ("Let me see.", [("get", ONE)])


@pytest.mark.parametrize("name", PLAIN)
def test_pieces_are_the_whole_wherever_the_text_is_cut(name: str) -> None:
    use = ToolUse(TOOLS, parallel=True)
    before = "" if name in ("llama3", "pythonic") else "é 日本 { < [TOOL <tool_c "
    text = before + (ANSWERS[name][1] or ANSWERS[name][0])
    whole = facts(FORMATS[name].reader(use).parse(text))
    draw = random.Random(7)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(text) + 1), 9))
        reader = FORMATS[name].reader(use)
        pieces = [reader.push(text[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        pieces.append(reader.finish(text[cuts[-1] :]))
        assert facts(joined(pieces)) == whole
        named = [call for piece in pieces if isinstance(piece, ParsedParts) for call in piece.tool_calls if call.name]
        assert [call.name for call in named] == [name for name, _ in whole[1]], "a name comes once, with an id"
        assert all(call.id for call in named)


@pytest.mark.parametrize("name", PLAIN)
def test_a_call_that_is_cut_keeps_what_it_has(name: str) -> None:
    use = ToolUse(TOOLS)
    answer = ANSWERS[name][0]
    for end in range(1, len(answer)):
        content, calls = facts(FORMATS[name].reader(use).parse(answer[:end]))
        assert "get" not in content, "no part of a call is shown as text"
        if calls:
            (called, arguments) = calls[0]
            assert called == "get"
            assert ONE.startswith(arguments.removesuffix(" ").removesuffix(",")) or arguments == ONE


def test_strings_in_arguments_may_hold_anything() -> None:
    use = ToolUse((tool("f", {"properties": {"a b": {"type": "string"}, "c": {}}}),), parallel=True)
    values = {"a b": '}]) "\\ </tool_call> \u2028 é, x=1', "c": [{"d": "("}, None, True]}
    text = json.dumps(values, ensure_ascii=False)
    odd = json.dumps(values["a b"], ensure_ascii=False)
    for name, answer in (
        ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'),
        (
            "pythonic",
            f'[f("a b"={odd}, c={json.dumps(values["c"])})]',
        ),
    ):
        assert fits(grammar(name, use), answer) is True
        reader = FORMATS[name].reader(use)
        for parsed in (reader.parse(answer), joined([*map(reader.push, answer), reader.finish("")])):
            (call,) = facts(parsed)[1]
            assert json.loads(call[1]) == values


def test_python_words_become_json() -> None:
    kinds = {"properties": {name: {"type": ["boolean", "null", "integer"]} for name in "abcd"}, "required": ["b"]}
    use = ToolUse((tool("f", kinds),))
    spec = grammar("pythonic", use)
    for text, values in (
        ("[f(a=True, b=None, d=7)]", {"a": True, "b": None, "d": 7}),
        ("[f(b=False)]", {"b": False}),
    ):
        assert fits(spec, text) is True
        assert json.loads(facts(FORMATS["pythonic"].reader(use).parse(text))[1][0][1]) == values
    assert fits(spec, "[f(a=True)]") is False, "b is required"
    assert fits(spec, "[f(b=1, a=2)]") is False, "properties keep their order"


def test_ids_have_the_form_that_a_template_wants() -> None:
    use = ToolUse(TOOLS)
    parsed = FORMATS["mistral"].reader(use).parse(ANSWERS["mistral"][0])
    assert isinstance(parsed, ParsedParts)
    assert len(parsed.tool_calls[0].id) == 9
    assert parsed.tool_calls[0].id.isalnum()


# ---- with an answer's own grammar, and after a thought --------------------------------------------------------------


def test_with_a_schema_of_the_answer_it_is_that_or_a_call() -> None:
    schema = source_of(GrammarSpec("json", '{"type": "object", "properties": {"x": {"type": "integer"}}}'))
    for answer, good, bad in (
        (schema, '{"x": 1}', '{"x": "a"}'),
        (source_of(GrammarSpec("regex", "[0-9]+")), "12", "ab"),
        (source_of(GrammarSpec("grammar", 'start: "yes" | "no"')), "no", "maybe"),
    ):
        spec = grammar("hermes", ToolUse(TOOLS), answer=answer)
        assert fits(spec, good) is True
        assert fits(spec, bad) is False
        assert fits(spec, ANSWERS["hermes"][0]) is True
        assert fits(spec, "Hello") is False


@pytest.mark.parametrize("marked", [False, True])
def test_a_thought_is_free_and_what_follows_is_not(marked: bool) -> None:
    begun, optional = Thought("<think>", "</think>", True), Thought("<think>", "</think>", False)
    call, use = ANSWERS["hermes"][0], ToolUse(TOOLS, required=True)
    spec = grammar("hermes", use, marked, thought=begun)
    assert fits(spec, f"Well {{…</think>\n\n{call}", marked) is True
    assert fits(spec, call, marked) in (None, False), "the thought must end first"
    assert fits(spec, "Well</think>Well", marked) is False
    spec = grammar("hermes", use, marked, thought=optional)
    assert fits(spec, call, marked) is True
    assert fits(spec, f"<think>Well</think>{call}", marked) is True
    answer = source_of(GrammarSpec("json", '{"type": "integer"}'))
    spec = composed(grammars(marked).tokenizer.marks, (), answer=answer, thought=begun)
    assert fits(spec, "Well, 5…</think>\n\n12", marked) is True
    assert fits(spec, "</think>a", marked) is False


# ---- schemas --------------------------------------------------------------------------------------------------------


def test_a_schema_that_is_not_strict_is_relieved_of_what_cannot_be_checked() -> None:
    schema = {
        "properties": {
            "not": {"type": "array", "items": {"type": "string", "format": "uint8"}, "uniqueItems": True},
            "b": {"enum": ["uniqueItems"], "if": {}},
        }
    }
    kept, dropped = prepared(schema, strict=False)
    assert dropped == ["format uint8", "if", "uniqueItems"]
    assert kept["properties"] == {"not": {"type": "array", "items": {"type": "string"}}, "b": {"enum": ["uniqueItems"]}}
    assert kept["additionalProperties"] is False
    grammars().check(grammar("hermes", ToolUse((Tool("f", kept),))))
    with pytest.raises(BadGrammar, match="uniqueItems"):
        grammars().check(grammar("hermes", ToolUse((tool("f", schema),))))


@pytest.mark.parametrize("schema", [{"type": "string"}, {"properties": []}, {"required": "a"}, {"required": [1]}])
def test_arguments_are_an_object(schema: Any) -> None:
    with pytest.raises(BadGrammar):
        prepared(schema, strict=False)


def test_branches_that_overlap_are_refused_with_what_to_do() -> None:
    schema = {"properties": {"x": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    with pytest.raises(BadGrammar, match="overlap"):
        grammars().check(grammar("hermes", ToolUse((tool("f", schema),))))
    apart = {"properties": {"x": {"oneOf": [{"type": "string"}, {"type": "integer"}]}}}
    grammars().check(grammar("hermes", ToolUse((tool("f", apart),))))


def test_what_calls_in_pythons_form_cannot_follow_is_refused() -> None:
    for schema in ({"anyOf": [{"required": ["a"]}]}, {"properties": {"a": {}}, "required": ["b"]}):
        with pytest.raises(BadGrammar, match="'f'"):
            grammar("pythonic", ToolUse((tool("f", schema),)))


# ---- templates ------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools> reply in <tool_call></tool_call>{% endif %}",
    "llama3": '{% if tools %}Respond in {"name": f, "parameters": dictionary}{% endif %}<|python_tag|>',
    "pythonic": "{{ tools }} [func_name1(params_name1=params_value1), func_name2(…)]",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS] [",
    "mistral-args": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]",
    "qwen3-coder": "{{ tools }} <tool_call>\\n<function=example>\\n<parameter=one>\\nvalue\\n</parameter>",
    "harmony": "{{ tools }} <|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>",
    "generic": "{{ messages }} <tool_call>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_one_that_the_template_speaks_of(name: str) -> None:
    assert format_for(TEMPLATES[name]).name == name
    assert format_for(TEMPLATES[name], "pythonic").name == "pythonic"
    assert format_for(None).name == "generic"


def test_a_model_that_knows_no_tools_is_told_of_them_in_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "18", "tool_call_id": "1"},
        {"role": "tool", "content": "19", "tool_call_id": "1"},
    ]
    told = with_tools(messages, [{"type": "function", "function": {"name": "f"}}])
    assert [one["role"] for one in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert '{"name": "f"}' in told[0]["content"]
    assert told[2]["content"].count('<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>') == 2
    assert "tool_calls" not in told[2]
    assert "18" in told[3]["content"]
    assert "19" in told[3]["content"]
    assert with_tools(messages[1:2], []) == messages[1:2]
    assert with_tools(messages[1:2], [{"a": 1}])[0]["role"] == "system"


def test_marks_are_what_llguidance_never_matches_as_text() -> None:
    for marked in (False, True):
        known = grammars(marked)
        vocabulary = known._for_llguidance()
        added = known.tokenizer.backend.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if vocabulary.is_special_token(id)}
        assert known.tokenizer.marks == special
