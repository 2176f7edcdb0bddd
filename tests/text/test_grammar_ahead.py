"""Grammars and drafts: what is forced, what may follow, and masks ahead. All of it must leave the grammar as it was."""

import json

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.job import GrammarSpec
from shoal.text.grammar import Grammars, Matcher
from tests.text.tiny import byte_level, sentencepiece

VOCAB = 450
EOS = 2
WORDS = -(-VOCAB // 32)
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 6},
        "is_returning": {"type": "boolean"},
        "items": {"type": "array", "items": {"enum": ["hammer", "hammock"]}, "maxItems": 2},
    },
    "required": ["customer_name", "is_returning", "items"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec("json", json.dumps(SCHEMA)),
    GrammarSpec("regex", "(yes, certainly|yes, of course|no)[.!]?"),
    GrammarSpec("choice", '["one hundred", "one thousand", "two"]'),
    GrammarSpec("json_object"),
]
MADE = {name: Grammars(make(), VOCAB, [EOS]) for name, make in (("bytes", byte_level), ("pieces", sentencepiece))}

Bits = npt.NDArray[np.uint32]


def mask_of(matcher: Matcher) -> Bits:
    line = np.zeros(WORDS, dtype=np.uint32)
    matcher.fill(line)
    return line


def allowed(line: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: Matcher, seed: int, most: int) -> list[int]:
    """Random tokens that the grammar allows; forced ones now and then as they are usually spelled."""
    draw, tokens = np.random.default_rng(seed), []
    for _ in range(most):
        if matcher.ended or matcher.error:
            break
        forced = matcher.forced() if draw.random() < 0.5 else []
        token = forced[0] if forced else int(draw.choice(allowed(mask_of(matcher))))
        assert matcher.accept(token), matcher.error
        tokens.append(token)
    return tokens


cases = st.tuples(st.sampled_from(sorted(MADE)), st.sampled_from(SPECS), st.integers(0, 2**32))
examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(cases, st.integers(0, 20), st.integers(1, 6))
@examples
def test_masks_ahead_are_those_of_the_tokens_accepted_one_by_one(
    case: tuple[str, GrammarSpec, int], before: int, drafts: int
) -> None:
    name, spec, seed = case
    tokens = walk(MADE[name].make(spec), seed, before + drafts)
    known, ahead = tokens[:before], tokens[before:]
    matcher, plain = MADE[name].make(spec, known), MADE[name].make(spec, known)
    if matcher.ended:
        return
    lines = np.full((len(ahead) + 1, WORDS), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill_ahead(lines, ahead)
    for line, token in zip(lines, [*ahead, EOS], strict=True):
        assert (line == mask_of(plain)).all()
        plain.accept(token)
    assert (mask_of(matcher) == lines[0]).all(), "the state has moved"
    for token in ahead:
        assert matcher.accept(token)


@given(cases, st.integers(0, 30))
@examples
def test_looking_ahead_changes_no_mask_and_no_end(case: tuple[str, GrammarSpec, int], most: int) -> None:
    """One grammar is asked for everything all the time, another only for its masks, a third for nothing."""
    name, spec, seed = case
    tokens = walk(MADE[name].make(spec), seed, most)
    asked, masked, silent = (MADE[name].make(spec) for _ in range(3))
    for place, token in enumerate(tokens):
        asked.forced()
        asked.allows(tokens[place : place + 3])
        assert (mask_of(asked) == mask_of(masked)).all()
        for matcher in (asked, masked, silent):
            assert matcher.accept(token)
        assert asked.ended == masked.ended == silent.ended
        assert asked.forced() == masked.forced()


@given(cases, st.integers(0, 20), st.lists(st.integers(0, VOCAB - 1), max_size=4))
@examples
def test_as_many_tokens_are_allowed_as_can_be_accepted(
    case: tuple[str, GrammarSpec, int], before: int, others: list[int]
) -> None:
    name, spec, seed = case
    tokens = walk(MADE[name].make(spec), seed, before + 4)
    draft = [*tokens[before:], *others]
    matcher, plain = (MADE[name].make(spec, tokens[:before]) for _ in range(2))
    count = 0
    for token in draft:
        if plain.ended or token == EOS or not plain.accept(token):
            break
        count += 1
    assert matcher.allows(draft) == count
    assert not matcher.error


@given(cases, st.integers(0, 20))
@examples
def test_what_is_forced_is_allowed(case: tuple[str, GrammarSpec, int], before: int) -> None:
    name, spec, seed = case
    matcher = MADE[name].make(spec)
    walk(matcher, seed, before)
    if not matcher.ended:
        forced = matcher.forced()
        assert matcher.allows(forced) == len(forced)


def test_keys_of_a_schema_are_forced() -> None:
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, VOCAB, [EOS])
    matcher = grammars.make(SPECS[0], tokenizer.encode('{"', add_special=False))
    assert tokenizer.decode(matcher.forced()).startswith("customer_nam")
    free = grammars.make(SPECS[0], tokenizer.encode('{"customer_name": "', add_special=False))
    assert free.forced() == []


@pytest.mark.parametrize("tokens", [[], [EOS]])
def test_nothing_is_forced_or_allowed_after_the_end(tokens: list[int]) -> None:
    grammars = MADE["bytes"]
    matcher = grammars.make(GrammarSpec("choice", '["a"]'), byte_level().encode("a", add_special=False))
    assert matcher.ended
    for token in tokens:
        matcher.accept(token)
    assert matcher.forced() == []
    assert matcher.allows([5, EOS]) == 0


def test_a_draft_that_breaks_the_grammar_clears_the_lines_after_it() -> None:
    matcher = MADE["bytes"].make(SPECS[1])
    good = allowed(mask_of(matcher))[0]
    bad = next(token for token in range(VOCAB) if token not in allowed(mask_of(matcher)))
    lines = np.full((3, WORDS), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill_ahead(lines, [bad, good])
    assert lines[0].any()
    assert not lines[1:].any()
    assert not matcher.error
