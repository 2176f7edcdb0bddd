"""Answers with drafts are the answers without: a real model in float32, the drafters that users choose, all that a
request may ask for.

Each engine with drafts is compared with one without, at its simplest: tokens, text, logprobs and why they ended. The
model is random, so greedy answers repeat themselves and are drafted well, and the others are drafted badly.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import LLM, GrammarSpec, RequestOutput, SamplingParams, kernels
from shoal.kernels.cpu import NativeOps
from tests.drafting import Drafts, drafting
from tests.story.models import EOS, VOCAB, open_llm, small_kv

pytestmark = pytest.mark.skipif(
    not isinstance(kernels.pick("cpu"), NativeOps), reason="in plain torch a position rounds as its neighbours make it"
)

ENGINES: dict[str, dict[str, Any]] = {
    "ngram, no prefix cache": {"speculate": "ngram", "depth": 1, "prefix_caching": False},
    "suffix": {"speculate": "suffix", "depth": 2, "chunk_tokens": 9},
    "preempted": {"speculate": "grammar+suffix", "depth": 1, "kv_memory": small_kv(15), "block_size": 4},
    "swapped": {
        "speculate": "grammar+ngram+suffix",
        "depth": 2,
        "kv_memory": small_kv(15),
        "when_short": "swap",
        "host_kv_memory": "4MiB",
        "watermark": 0.0,
    },
}
ALWAYS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "draft_tokens": 6, "max_model_len": 200}
BOOKING = {
    "type": "object",
    "properties": {
        "passenger_name": {"type": "string", "maxLength": 6},
        "number_of_seats": {"type": "integer", "minimum": 1, "maximum": 40},
        "window_seat_wanted": {"type": "boolean"},
    },
    "required": ["passenger_name", "number_of_seats", "window_seat_wanted"],
    "additionalProperties": False,
}
GRAMMARS = (
    GrammarSpec("json", json.dumps(BOOKING)),
    GrammarSpec("regex", "(swim|swam|swum)( and (swim|swam|swum)){2,6}"),
    GrammarSpec("choice", json.dumps(["once upon a time", "once upon a shoal"])),
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.3, "logprobs": 1},
    {"temperature": 1.0, "top_k": 8, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 0.4, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.5, "logit_bias": {"7": 8.0, "9": 7.0, "11": -100.0}, "logprobs": 1},
    {"temperature": 0.0, "stop": ["a", "e"], "min_tokens": 12},
    {"temperature": 0.6, "stop": ["th", "on"], "include_stop_str_in_output": True, "ignore_eos": True},
    {"temperature": 0.0, "stop_token_ids": list(range(5, VOCAB, 6)), "min_tokens": 9, "logprobs": 1},
    {"temperature": 0.8, "stop_token_ids": list(range(5, VOCAB, 12))},
    {"temperature": 0.7, "n": 3, "logprobs": 1},
)


@dataclass(frozen=True)
class Ask:
    """One call. leave: the caller closes the stream after so many pieces; 0: it reads to the end."""

    prompt: tuple[int, ...]
    kind: int
    seed: int
    max_tokens: int
    grammar: int = -1
    leave: int = 0
    salt: str = ""

    def params(self) -> SamplingParams:
        values = {"ignore_eos": self.seed % 3 != 0, **KINDS[self.kind]}
        values["min_tokens"] = min(values.get("min_tokens", 0), self.max_tokens)
        return SamplingParams(seed=self.seed, max_tokens=self.max_tokens, **values)


def told(output: RequestOutput) -> list[Any]:
    """All that a caller sees of it but the time."""
    samples = [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]
    return [output.prompt_logprobs, *samples]


def answers(llm: LLM, asked: Sequence[Ask]) -> list[Any]:
    """All at once: streams, some of which are left, beside a call that waits for whole answers."""
    streams: list[tuple[Ask, Any]] = []
    for ask in asked:
        if ask.grammar >= 0 or ask.leave:
            grammar = GRAMMARS[ask.grammar] if ask.grammar >= 0 else None
            streams.append((ask, llm.stream([list(ask.prompt)], ask.params(), grammar=grammar, cache_salt=ask.salt)))
    calls: dict[str, list[Ask]] = {}
    for ask in asked:
        if ask.grammar < 0 and not ask.leave:
            calls.setdefault(ask.salt, []).append(ask)
    found: list[Any] = []
    for ask, stream in streams:  # others go on while it is read
        if ask.leave:
            found.append(first_tokens(stream, ask.leave))
            stream.close()
    for salt, several in calls.items():
        params = [ask.params() for ask in several]
        found += [told(one) for one in llm.generate([list(ask.prompt) for ask in several], params, cache_salt=salt)]
    for ask, stream in streams:
        if not ask.leave:
            chunks = list(stream)
            for index in range(ask.params().n):
                mine = [chunk for chunk in chunks if chunk.index == index]
                text = "".join(chunk.text for chunk in mine)
                found.append((text, [t for chunk in mine for t in chunk.token_ids], mine[-1].finish_reason))
    while not llm.loop.idle:  # blocks of requests that have ended may be on their way to host memory
        llm.step()
    assert llm.loop.scheduler.kv.pool.held == 0
    return found


def first_tokens(stream: Any, count: int) -> list[int]:
    """The first tokens of its first sample."""
    tokens: list[int] = []
    for chunk in stream:
        if chunk.index == 0:
            tokens += chunk.token_ids
        if len(tokens) >= count:
            break
    return tokens[:count]


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with open_llm(model, depth=1, check=True, **ALWAYS) as llm:
        yield llm


@pytest.fixture(scope="module", params=ENGINES)
def drafted(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, Drafts]]:
    with open_llm(model, check=True, **{**ALWAYS, **ENGINES[request.param]}) as llm, drafting(llm) as drafts:
        yield llm, drafts


few_ids = st.integers(5, 9)
asks = st.builds(
    Ask,
    prompt=st.lists(st.one_of(few_ids, few_ids, st.integers(5, VOCAB - 30)), min_size=1, max_size=40).map(tuple),
    kind=st.integers(0, len(KINDS) - 1),
    seed=st.integers(0, 99),
    max_tokens=st.integers(1, 60),
    grammar=st.sampled_from([-1, -1, -1, 0, 1, 2]),
    leave=st.sampled_from([0, 0, 0, 0, 3, 11]),
    salt=st.sampled_from(["", "", "other"]),
)


@given(st.lists(asks, min_size=1, max_size=7))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_requests_get_the_same_answers(plain: LLM, drafted: tuple[LLM, Drafts], asked: list[Ask]) -> None:
    assert answers(drafted[0], asked) == answers(plain, asked)


def busy(count: int) -> list[Ask]:
    """Requests of every kind, more than there are rows."""
    source, found = random.Random(4), []
    for number in range(count):
        prompt = tuple(source.choices(range(5, 12), k=number % 30) + source.choices(range(5, 290), k=1 + number % 3))
        kind, grammar = number % len(KINDS), number % 3 if number % 5 == 4 else -1
        leave = 5 if number % 11 == 10 else 0
        found.append(Ask(prompt, kind, number, 24 + number % 40, grammar, leave, "other" if number % 7 == 6 else ""))
    return found


@pytest.fixture(scope="module")
def busy_answers(plain: LLM) -> list[Any]:
    return answers(plain, busy(30))


def test_a_busy_engine_gives_the_same_answers(
    busy_answers: list[Any], drafted: tuple[LLM, Drafts], request: pytest.FixtureRequest
) -> None:
    """All of the above is known to happen here: drafts accepted and rejected, by every drafter; preemption."""
    llm, drafts = drafted
    preempted: list[str] = []
    step = llm.loop.step

    def watched(until_s: float | None = None) -> Any:
        events = step(until_s)
        preempted.extend(one.how for one in events.preempted)
        return events

    llm.loop.step = watched  # type: ignore[method-assign]
    try:
        assert answers(llm, busy(30)) == busy_answers
    finally:
        llm.loop.step = step  # type: ignore[method-assign]
    for name in llm.config.speculation.drafters:
        assert drafts.accepted[name] > 10, name
    assert drafts.rejected > 10
    if llm.config.kv_memory == small_kv(15):
        assert preempted.count("swap" if llm.config.when_short == "swap" else "recompute") > 1


def test_what_drafts_leave_in_the_prefix_cache_is_right(plain: LLM, drafted: tuple[LLM, Drafts]) -> None:
    """The next turn of a conversation: its prompt holds the last answer, which was computed with drafts, some wrong."""
    llm, drafts = drafted
    before = drafts.accepted.total(), drafts.rejected
    for seed in range(3):
        prompt = [5 + seed, 6, 7, 8] * 4
        bias = {str(token): 9.0 for token in range(20, 24)}  # an answer of few words, in any order
        params = SamplingParams(
            temperature=0.5 * seed, seed=seed, max_tokens=60, ignore_eos=True, logprobs=1, logit_bias=bias
        )
        (first,) = llm.generate([prompt], params)
        again = [*prompt, *first.outputs[0].token_ids, 9, 10]
        second, want = (one.generate([again], params)[0] for one in (llm, plain))
        assert told(second) == told(want)
        if llm.config.prefix_caching:
            assert second.outputs[0].metrics.cached_tokens >= 64
    assert drafts.accepted.total() > before[0]
    assert drafts.rejected > before[1]


def test_an_end_token_in_the_middle_of_a_draft_ends_the_answer(plain: LLM, drafted: tuple[LLM, Drafts]) -> None:
    """A bias makes the end token likely after a text that repeats itself, so that drafts run over the end."""
    llm, _ = drafted
    for seed in range(4):
        params = SamplingParams(
            temperature=0.5, seed=seed, max_tokens=60, logit_bias={str(EOS): 2.0 + seed / 2, "7": 5.0, "8": 5.0}
        )
        got, want = (one.generate([[7, 8] * 6], params)[0] for one in (llm, plain))
        assert told(got) == told(want)
