"""A sample: its tokens become text, and a stop string cuts text, tokens and logprobs at the same place."""

from typing import Any

import pytest

from shoal.core.job import Ending, Job
from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs
from shoal.output.sample import Sample
from tests.text import tiny

EOS = 2


def ids(text: str) -> list[int]:
    return tiny.byte_level().encode(text)


def make(tokenizer: bool = True, stop_ids: frozenset[int] = frozenset({EOS}), **params: Any) -> Sample:
    job = Job(id="j", prompt=[5], params=SamplingParams(**params), seed=0, stop_ids=stop_ids)
    return Sample(job, 0, 0, tiny.byte_level() if tokenizer else None)


def feed(sample: Sample, tokens: list[int]) -> list[str]:
    """Push tokens until a stop string is found, as a sink does."""
    texts = []
    for token in tokens:
        if sample.stopped:
            break
        texts.append(sample.take(token, Logprobs(token, -1.0, 1, (), ())))
    return texts


def test_each_token_returns_its_text_and_the_sum_is_the_text() -> None:
    sample, tokens = make(), ids("Once upon a time")
    texts = feed(sample, tokens)
    assert "".join(texts) == sample.text == "Once upon a time"
    assert sample.end(Ending("length"), eos=False) == ""
    assert (sample.tokens, sample.reason, sample.stop_reason) == (tokens, "length", None)
    assert [one.token for one in sample.logprobs] == tokens


def test_half_a_character_is_held_back_until_the_end() -> None:
    sample = make()
    assert feed(sample, ids("€")[:2]) == ["", ""]
    assert sample.end(Ending("length"), eos=False) == "\ufffd"
    assert sample.text == "\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "Once "), (True, "Once upon a")])
def test_a_stop_string_cuts_text_tokens_and_logprobs(include: bool, text: str) -> None:
    sample = make(stop=["upon a"], include_stop_str_in_output=include)
    assert "".join(feed(sample, ids("Once upon a time"))) == text
    assert sample.stopped
    assert sample.text == text
    assert len(sample.tokens) == len(sample.logprobs) == len(ids("Once upon a"))
    sample.end(Ending("length"), eos=False)
    assert (sample.reason, sample.stop_reason) == ("stop", "upon a")


def test_a_stop_string_found_in_text_that_was_held_back_cuts_too() -> None:
    sample = make(stop=["\ufffd"])
    feed(sample, [*ids("a"), *ids("€")[:2]])
    assert not sample.stopped
    assert sample.end(Ending("length"), eos=False) == ""
    assert (sample.text, sample.reason, sample.stop_reason) == ("a", "stop", "\ufffd")


def test_a_stop_string_does_not_hide_how_a_request_was_ended_from_outside() -> None:
    sample = make(stop=["upon"])
    feed(sample, ids("Once upon a"))
    sample.end(Ending("abort"), eos=False)
    assert sample.reason == "abort"


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_counted_and_shown_only_on_request(include: bool, text: str) -> None:
    mark = ids("!")[0]
    sample = make(stop_ids=frozenset({mark}), include_stop_str_in_output=include)
    feed(sample, [*ids("hi"), mark])
    sample.end(Ending("stop", mark), eos=False)
    assert (sample.text, sample.tokens[-1], sample.stop_reason) == (text, mark, mark)


def test_an_end_token_of_the_model_is_no_stop_reason() -> None:
    sample = make()
    feed(sample, [*ids("hi"), EOS])
    sample.end(Ending("stop", EOS), eos=True)
    assert (sample.text, sample.reason, sample.stop_reason) == ("hi", "stop", None)


def test_a_stop_token_before_min_tokens_is_text_like_any_other() -> None:
    mark = ids("!")[0]
    sample = make(stop_ids=frozenset({mark}), min_tokens=2)
    assert feed(sample, [mark, mark, mark]) == ["!", "!", ""]


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    sample = make(tokenizer=False)
    assert feed(sample, [7, 8]) == ["", ""]
    assert sample.end(Ending("length"), eos=False) == ""
    assert (sample.text, sample.tokens, sample.stopped) == ("", [7, 8], False)
