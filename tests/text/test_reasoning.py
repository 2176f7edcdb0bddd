"""Reasoning apart from the answer, however the text is cut; and a limit on its tokens that closes it."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shoal.config.serve import REASONING_FORMATS
from shoal.core.job import GrammarSpec, ThinkingLimit
from shoal.output.parser import PlainParser, calls_of, content_of, reasoning_of
from shoal.text.grammar import Grammars, source_of
from shoal.text.parts import joined
from shoal.text.reasoning import REASONING, ReasoningParser, Thought, reasoning_for, thought_after
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.compose import composed
from shoal.text.tools.formats import FORMATS
from tests.text import tiny

OPENED, MAYBE = Thought("<think>", "</think>", True), Thought("<think>", "</think>", False)
CASES = [
    (OPENED, "\nI see < </thin.\n\n</think>\n\nYes <b>", "I see < </thin.", "Yes <b>"),
    (MAYBE, "<think>\nI see.\n</think>\n\nYes", "I see.", "Yes"),
    (MAYBE, "\n <think>I see.</think>Yes</think>", "I see.", "Yes</think>"),
    (MAYBE, "Yes, <think>no</think>", "", "Yes, <think>no</think>"),
    (MAYBE, "<thin", "", "<thin"),
    (MAYBE, "", "", ""),
    (OPENED, "I see", "I see", ""),
    (OPENED, "I see </thi", "I see </thi", ""),
    (OPENED, "</think>Yes", "", "Yes"),
    (OPENED, "a" + "\n" * 200 + "b</think>c", "a" + "\n" * 200 + "b", "c"),
]


@pytest.mark.parametrize(("thought", "text", "reasoning", "content"), CASES)
def test_reasoning_and_answer_are_told_apart(thought: Thought, text: str, reasoning: str, content: str) -> None:
    draw = random.Random(5)
    for shown in (True, False):
        whole = ReasoningParser(thought, PlainParser, shown).parse(text)
        assert (reasoning_of(whole), content_of(whole)) == (reasoning if shown else "", content)
        for _ in range(20):
            cuts = sorted(draw.choices(range(len(text) + 1), k=6))
            parser = ReasoningParser(thought, PlainParser, shown)
            pieces = [parser.push(text[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
            assert joined([*pieces, parser.finish(text[cuts[-1] :])]) == whole


def test_calls_follow_reasoning() -> None:
    use = ToolUse((Tool("f", {"type": "object"}),))
    text = 'Let me <tool_call> see.\n</think>\n\nWait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parsed = ReasoningParser(OPENED, lambda: FORMATS["hermes"].reader(use)).parse(text)
    assert reasoning_of(parsed) == "Let me <tool_call> see."
    assert content_of(parsed) == "Wait."
    assert [(call.name, call.arguments) for call in calls_of(parsed)] == [("f", "{}")]


def test_the_marks_are_those_of_the_template_and_the_prompts_end_decides() -> None:
    assert ("auto", *REASONING) == REASONING_FORMATS
    assert reasoning_for("… [THINK] … [/THINK]") == REASONING["mistral"]
    assert reasoning_for("{{ messages }}") is None
    assert reasoning_for("<think></think>", "none") is None
    assert reasoning_for(None, "think") == REASONING["think"]
    assert thought_after(REASONING["think"], "user: hi\nassistant: ") == MAYBE
    assert thought_after(REASONING["think"], "<think>\n") == OPENED
    assert thought_after(REASONING["think"], "<think>\n\n</think>\n\n") is None
    assert thought_after(None, "<think>") is None


# ---- the limit ------------------------------------------------------------------------------------------------------


@cache
def grammars(marked: bool) -> Grammars:
    backend = Backend.from_str(tiny.byte_level().backend.to_str())
    if marked:
        backend.add_tokens([AddedToken("</think>", special=False)])
    made = Tokenizer(backend, special=tiny.byte_level().special)
    return Grammars(made, made.vocab_size, [2])


def spec_of(known: Grammars, thought: Thought, tokens: int, answer: str | None) -> GrammarSpec:
    made = composed(known.tokenizer.marks, known.tokenizer.pieces.special_ids, answer=answer, thought=thought)
    return GrammarSpec(made.kind, made.text, ThinkingLimit(tokens, thought.opens, thought.closes, thought.begun))


def drawn(known: Grammars, spec: GrammarSpec, seed: int, most: int) -> tuple[list[int], Any]:
    """A random output: any allowed token is as likely as another."""
    matcher, draw = known.make(spec), np.random.default_rng(seed)
    mask = np.zeros_like(known._ends)
    tokens: list[int] = []
    while len(tokens) < most and not matcher.ended:
        matcher.fill(mask)
        assert not matcher.error, matcher.error
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        for token in matcher.forced()[:1]:
            assert token in allowed
        tokens.append(int(draw.choice(allowed)))
        assert matcher.accept(tokens[-1])
    return tokens, matcher


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_reasoning_is_closed_when_its_tokens_are_spent_and_the_answer_fits(marked: bool, tokens: int) -> None:
    known = grammars(marked)
    answer = source_of(GrammarSpec("regex", "[0-9]{3}"))
    known.check(spec_of(known, OPENED, tokens, answer))
    for seed in range(10):
        output, matcher = drawn(known, spec_of(known, OPENED, tokens, answer), seed, 200)
        assert matcher.ended
        text = known.tokenizer.decode(output, skip_special=False).removesuffix("</s>")
        rest = text.partition("</think>")[2]
        assert rest.strip("\n").isdigit()
        assert len(rest.strip("\n")) == 3
        ends = (at for at in range(len(output)) if "</think>" in known.tokenizer.decode(output[: at + 1], False))
        closing = len(known.tokenizer.encode("\n</think>", add_special=False))
        assert next(ends) < tokens + 3 + closing, "at most the rest of a character is added"


def test_reasoning_that_is_not_opened_is_not_limited() -> None:
    known = grammars(True)
    spec = spec_of(known, MAYBE, 2, None)
    matcher = known.make(spec)
    for token in known.tokenizer.encode("Once upon a time", add_special=False):
        assert matcher.allows([token]) == 1
        assert matcher.accept(token)
    assert not matcher.error


def test_drafts_see_the_limit_too() -> None:
    known = grammars(True)
    spec = spec_of(known, OPENED, 3, None)
    matcher = known.make(spec)
    words = known.tokenizer.encode("a b c d e f", add_special=False)
    assert matcher.allows(words) == 3
    lines = np.zeros((4, len(known._ends)), dtype=np.uint32)
    matcher.fill_ahead(lines, words[:3])
    assert np.unpackbits(lines[3].view(np.uint8)).sum() == 1, "the limit is reached: only the closing may follow"
    for token in words[:3]:
        matcher.accept(token)
    closing = known.tokenizer.encode("\n</think>", add_special=False)
    assert matcher.forced() == closing
    assert matcher.allows([*closing, words[0]]) == len(closing)
    again = known.make(spec, [*words[:3], closing[0]])
    assert again.forced() == closing[1:], "a matcher can be made in the middle"


def test_budgets_share_one_compiled_grammar() -> None:
    known = Grammars(grammars(True).tokenizer, grammars(True).vocab_size, [2])
    for tokens in range(5):
        known.check(spec_of(known, OPENED, tokens, None))
    assert len(known._kept) == 1
