"""The suffix automaton against a search through the whole text."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.spec.automaton import Automaton, Cursor

texts = st.lists(st.integers(0, 3), max_size=60)


def longest_before(text: list[int]) -> int:
    """The length of the longest end of the text that also occurs before."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[start : start + length] == text[-length:] for start in range(len(text) - length)):
            return length
    return 0


def longest_in(history: list[int], text: list[int]) -> int:
    """The length of the longest end of the text that occurs in the history."""
    for length in range(len(text), 0, -1):
        if any(history[start : start + length] == text[-length:] for start in range(len(history) - length + 1)):
            return length
    return 0


def check_match(automaton: Automaton) -> None:
    text, length, end = automaton.text, automaton.length, automaton.end
    assert length == longest_before(text)
    if length:
        assert end < len(text) - 1
        assert text[end - length + 1 : end + 1] == text[-length:], "it does not end there"


@given(texts)
@settings(max_examples=300, deadline=None)
def test_the_longest_repeated_end_is_found_after_every_token(text: list[int]) -> None:
    automaton = Automaton()
    for token in text:
        automaton.extend([token])
        check_match(automaton)
    assert automaton.text == text
    assert automaton.states <= max(2, 2 * len(text))


@given(texts, st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_tokens_may_come_in_parts_of_any_size(text: list[int], size: int) -> None:
    one, parts = Automaton(), Automaton()
    one.extend(text)
    for start in range(0, len(text), size):
        parts.extend(text[start : start + size])
    assert (one.length, one.end, one.branches, one.states) == (parts.length, parts.end, parts.branches, parts.states)


@given(texts)
@settings(max_examples=150, deadline=None)
def test_it_branches_where_different_tokens_followed(text: list[int]) -> None:
    automaton = Automaton()
    automaton.extend(text)
    length = automaton.length
    if length:
        ends = [start + length for start in range(len(text) - length) if text[start : start + length] == text[-length:]]
        assert automaton.branches == (len({text[end] for end in ends}) > 1)


def test_the_latest_occurrence_of_a_long_match_is_followed() -> None:
    automaton = Automaton()
    automaton.extend([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3])
    assert (automaton.length, automaton.follow(automaton.end, 2)) == (4, [5, 9])


def test_what_repeats_to_the_end_goes_on_repeating() -> None:
    automaton = Automaton()
    automaton.extend([7, 1, 2, 1, 2, 1, 2])
    assert automaton.length == 4
    assert automaton.follow(automaton.end, 5) == [1, 2, 1, 2, 1]


@given(texts, texts, st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_cursor_finds_the_longest_end_in_another_text_while_that_grows(
    history: list[int], text: list[int], known: int
) -> None:
    automaton = Automaton()
    automaton.extend(history[:known])
    cursor = Cursor(automaton)
    half = len(text) // 2
    cursor.advance(text[:half])
    assert cursor.length == longest_in(history[:known], text[:half])
    automaton.extend(history[known:])
    for place in range(half, len(text)):
        cursor.advance([text[place]])
        longest = longest_in(history, text[: place + 1])
        # what it matched before the history grew may match further back now; what came since is matched as it should
        assert min(longest, place - half + 1) <= cursor.length <= longest
        follows = cursor.following(3)
        if follows:
            found = text[place - cursor.length + 1 : place + 1] + follows
            assert any(
                history[start : start + len(found)] == found for start in range(len(history) - len(found) + 1)
            ), "it never followed"


def test_a_cursor_stops_at_a_separator() -> None:
    automaton = Automaton()
    automaton.extend([1, 2, 3, -3, 4, 5])
    cursor = Cursor(automaton)
    cursor.advance([1, 2])
    assert cursor.following(4, stop=-3) == [3]
    cursor.advance([3])
    assert cursor.following(4, stop=-3) == []


@pytest.mark.parametrize("words", [3, 50, 5000])
def test_its_work_and_memory_grow_with_the_text_alone(words: int) -> None:
    """States and transitions are counted, not seconds: at most 2 and 3 per token."""
    draw = random.Random(words)
    automaton = Automaton()
    automaton.extend([draw.randrange(words) for _ in range(4000)])
    transitions = sum(token != -1 for token in automaton._tokens) + sum(map(len, automaton._more.values()))
    assert automaton.states <= 2 * 4000
    assert transitions <= 3 * 4000
