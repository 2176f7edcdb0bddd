"""Stop regexes: found at the first place, whatever the pieces, in constant time per character."""

import numpy as np
import pytest

from shoal.errors import BadParameter
from shoal.text.detok import Detokenizer
from shoal.text.stop_regex import RegexStops, prepare_regex
from tests.text import tiny

TEXT = "Once upon a time, in 1984, a büro opened.\n\nStop here 77 END"


@pytest.mark.parametrize(
    ("patterns", "ends"),
    [
        (["[0-9]{4}"], "Once upon a time, in 1984"),
        (["[0-9]{2}"], "Once upon a time, in 19"),
        ([r"\n\n[A-Z]"], "Once upon a time, in 1984, a büro opened.\n\nS"),
        (["END", "b.ro"], "Once upon a time, in 1984, a büro"),
        (["(?i)STOP"], "Once upon a time, in 1984, a büro opened.\n\nStop"),
        (["nothing", "(a+)+x"], None),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_first_match_ends_the_text(patterns: list[str], ends: str | None, size: int) -> None:
    stops, seen = RegexStops(patterns), ""
    for at in range(0, len(TEXT), size):
        piece = TEXT[at : at + size]
        found = stops.feed(piece)
        if found is not None:
            seen += piece[:found]
            break
        seen += piece
    assert seen == (ends or TEXT)
    assert (stops.matched is None) == (ends is None)


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1", "^a", r"\bfoo", "a*", "", "a)(b"])
def test_one_that_cannot_be_used_is_refused_with_the_reason(pattern: str) -> None:
    with pytest.raises(BadParameter, match="stop_regex"):
        prepare_regex(pattern)


def test_a_hostile_one_ends_in_an_error_not_in_a_long_search() -> None:
    """As a table of states this one has 2**18 of them."""
    stops = RegexStops(["a[ab]{17}c"])
    text = "".join(np.random.default_rng(0).choice(["a", "b"], 50_000))
    with pytest.raises(BadParameter, match="too complex"):
        stops.feed(text)


def test_the_detokenizer_keeps_the_match_and_counts_its_tokens() -> None:
    tokenizer = tiny.byte_level()
    ids = tokenizer.encode(TEXT, add_special=False)
    for stop, shown, which in ((["Stop"], "Once upon a time, in 1984", "[0-9]+4"), (["time"], "Once upon a ", "time")):
        detok = Detokenizer(tokenizer, stop=stop, stop_regex=["[0-9]+4"])
        text = "".join(detok.push(token) for token in ids)
        assert text == detok.text == shown
        assert detok.stopped == which
        assert detok.stop_at is not None
        whole = shown if which != "time" else f"{shown}time"
        assert tokenizer.decode(ids[: detok.stop_at]).startswith(whole)
        assert not tokenizer.decode(ids[: detok.stop_at - 1]).startswith(whole)


def test_the_first_tokens_are_not_searched() -> None:
    tokenizer = tiny.byte_level()
    ids = tokenizer.encode("a1 b2 c3", add_special=False)
    detok = Detokenizer(tokenizer, stop_regex=["[0-9]"], min_tokens=len(tokenizer.encode("a1", add_special=False)))
    assert "".join(detok.push(token) for token in ids) == "a1 b2"
