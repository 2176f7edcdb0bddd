"""What the detokenizer hands out, added up, is the decoding of the whole output, cut at the first stop string."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadParameter
from shoal.text.detok import Detokenizer
from shoal.text.tokenizer import Tokenizer
from tests.text.tiny import KINDS, byte_level, sentencepiece

kinds = st.sampled_from(sorted(KINDS))
texts = st.text(st.sampled_from("aeo sthSTOP,.\n é😀👩‍👩‍👧日1▁\ufffd"), max_size=40)
stop_lists = st.lists(st.text(st.sampled_from("aeo sthSTOP.\n é😀"), min_size=1, max_size=5), max_size=3)


def whole(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip_special: bool = True) -> str:
    """The text of an output behind its prompt, by two full decodings."""
    if tokenizer.pieces.is_byte_level:
        return tokenizer.decode(output, skip_special)
    return tokenizer.decode(prompt + output, skip_special)[len(tokenizer.decode(prompt, skip_special)) :]


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, found the slow way."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(detok: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detok.push(i) for i in ids), detok.finish()]


@settings(max_examples=300, deadline=None)
@given(kinds, texts, texts, stop_lists, st.booleans())
def test_encoded_texts(kind: str, prompt: str, text: str, stops: list[str], include: bool) -> None:
    tokenizer = KINDS[kind]()
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    detok = Detokenizer(tokenizer, prompt_ids, stops, include, True)
    deltas = run(detok, ids)
    expected, stop = cut(whole(tokenizer, prompt_ids, ids), stops, include)
    assert ("".join(deltas), detok.text, detok.stopped) == (expected, expected, stop)


@settings(max_examples=300, deadline=None)
@given(kinds, st.data(), stop_lists, st.booleans(), st.booleans())
def test_random_tokens(kind: str, data: st.DataObject, stops: list[str], include: bool, skip_special: bool) -> None:
    """Any ids in any order: half characters, bytes that never fit, special tokens, ids that do not exist."""
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    detok = Detokenizer(tokenizer, [], stops, include, skip_special)
    deltas = run(detok, ids)
    expected, stop = cut(tokenizer.decode(ids, skip_special), stops, include)
    assert ("".join(deltas), detok.stopped) == (expected, stop)


@settings(max_examples=150, deadline=None)
@given(kinds, texts, stop_lists)
def test_stop_at_counts_the_completing_token(kind: str, text: str, stops: list[str]) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    detok = Detokenizer(tokenizer, [], stops, False, True)
    run(detok, ids)
    if detok.stopped is None:
        assert detok.stop_at is None
        return
    assert detok.stop_at is not None
    wanted, _ = cut(tokenizer.decode(ids), stops, include=True)
    assert tokenizer.decode(ids[: detok.stop_at]).startswith(wanted)
    assert not tokenizer.decode(ids[: detok.stop_at - 1]).startswith(wanted)


@settings(max_examples=150, deadline=None)
@given(kinds, texts, stop_lists)
def test_nothing_shown_is_taken_back(kind: str, text: str, stops: list[str]) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    detok = Detokenizer(tokenizer, [], stops, False, True)
    final, _ = cut(tokenizer.decode(ids), stops, include=False)
    for token_id in ids:
        detok.push(token_id)
        assert final.startswith(detok.text)


def test_text_is_shown_as_soon_as_it_can_be() -> None:
    tokenizer = byte_level()
    detok = Detokenizer(tokenizer, [], ["STOP"], False, True)
    pushed = [detok.push(i) for word in ("a", "S", "T", "x") for i in tokenizer.encode(word)]
    assert pushed == ["a", "", "", "STx"]


def test_half_a_character_is_held_and_completed() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    detok = Detokenizer(tokenizer)
    assert [detok.push(i) for i in ids] == ["", "", "", "😀"]
    detok = Detokenizer(tokenizer)
    assert [detok.push(i) for i in ids[:2]] == ["", ""]
    assert (detok.finish(), detok.finish(), detok.text) == ("\ufffd", "", "\ufffd")


def test_space_before_the_first_word_depends_on_the_prompt() -> None:
    tokenizer = sentencepiece()
    fish = tokenizer.encode("fish")
    assert "".join(run(Detokenizer(tokenizer, tokenizer.encode("a little")), fish)) == " fish"
    assert "".join(run(Detokenizer(tokenizer, [tokenizer.bos_id or 0]), fish)) == "fish"


def test_a_skipped_special_token_does_not_eat_a_space() -> None:
    tokenizer = sentencepiece()
    ids = [*tokenizer.encode("little"), *tokenizer.eos_ids, *tokenizer.encode("fish")]
    assert "".join(run(Detokenizer(tokenizer), ids)) == "little fish"
    assert "".join(run(Detokenizer(tokenizer, skip_special=False), ids)) == "little</s> fish"


def test_prompt_ending_inside_a_character_leaves_no_trace() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode("a😀", add_special=False)
        detok = Detokenizer(tokenizer, ids[:-2])
        assert "".join(run(detok, tokenizer.encode("b", add_special=False))).strip() == "b"


def test_after_a_stop_nothing_is_shown() -> None:
    tokenizer = byte_level()
    detok = Detokenizer(tokenizer, [], ["b"], True, True)
    assert "".join(run(detok, tokenizer.encode("a, b, c"))) == "a, b"
    assert detok.push(tokenizer.encode("x")[0]) == ""
    assert detok.stop_at == len(tokenizer.encode("a, b"))


@pytest.mark.parametrize("stop", [[""], ["a", ""], "word"])
def test_empty_stop_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(BadParameter, match="non-empty"):
        Detokenizer(byte_level(), [], stop)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cost_of_a_token_does_not_grow(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("Once upon a time there was a fish. " * 300)[:3000]
    bytes_only = [tokenizer.encode("😀", add_special=False)[-1]] * 3000
    for output in (ids, bytes_only):
        detok = Detokenizer(tokenizer, ids, ["never found", "nor this"])
        started = time.thread_time()
        for token_id in output:
            detok.push(token_id)
        assert time.thread_time() - started < 1.5  # some 20 µs a token here; quadratic work would take many seconds
