"""Draft tokens change no token and no logprob: a real runner and a tiny model, on all kernels of this CPU.

The C kernels compute a position to the same bits alone and among others, so there all is compared exactly. In torch a
product of one row and of several round differently, and logprobs are compared to that.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from shoal import SamplingParams, kernels
from shoal.kernels import Ops
from shoal.kernels.cpu import NativeOps
from shoal.kernels.noise import coins, draw_keys
from shoal.runner.results import FORBIDDEN, NOT_FINITE
from shoal.runner.runner import Runner
from shoal.runner.verify import CoinToss
from tests.kernels.pretended import older, pretended
from tests.runner.verifying import VOCAB, Answer, Asked, Drafts, Driver, make_runner, plan_of, row_starts

WAYS: dict[str, Ops] = {name: ops for name, ops in kernels.available() if name != "ref"}
NATIVE = [name for name, ops in WAYS.items() if isinstance(ops, NativeOps)]
FASTEST = (NATIVE or ["cpu"])[0]
OTHER_CPUS = dict([*pretended(), *older()])  # as far as this one can run them
FORMATS = {"bfloat16": (torch.bfloat16, False), "float16": (torch.float16, False), "int8": (torch.float32, True)}
COUNT = 40


def prompt(number: int, length: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(VOCAB), k=length))


def allowed_after(outputs: Sequence[int]) -> list[int]:
    """A grammar: about one token in four, depending on the last two and on how many there are."""
    state = zlib.crc32(repr((len(outputs) % 5, outputs[-2:])).encode())
    return [token for token in range(VOCAB) if zlib.crc32(bytes((token % 256, token // 256)), state) % 4 == 0]


def kinds() -> list[Asked]:
    """Requests of every kind, one of each."""
    ends = frozenset(range(0, VOCAB, 9))
    several: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "logprobs": 0},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.05, "top_p": 0.95},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.3, "logprobs": 2},
        {"temperature": 0.9, "logit_bias": {3: 4.0, 5: -100.0, 7: 3.5}, "presence_penalty": -0.4},
        {"temperature": 0.0, "logit_bias": {11: 2.0}, "prompt_logprobs": 1},
    ]
    rows = [Asked(prompt(number), SamplingParams(**values), seed=50 + number) for number, values in enumerate(several)]
    return [
        *rows,
        Asked(prompt(20), SamplingParams(temperature=1.0, min_tokens=12, logprobs=1), seed=9, stop_ids=ends),
        Asked(prompt(21), SamplingParams(temperature=1.0), seed=10, stop_ids=frozenset(range(0, VOCAB, 40))),
        Asked(prompt(22), SamplingParams(temperature=0.5), seed=11, sample=3, ends_after=17),
        Asked(prompt(23), SamplingParams(temperature=0.8, logprobs=1), seed=12, allowed=allowed_after),
        Asked(prompt(24), SamplingParams(temperature=0.0, repetition_penalty=1.2), allowed=allowed_after),
        Asked(prompt(25, 100), SamplingParams(temperature=0.6, frequency_penalty=0.5), seed=13),
    ]


def drafts_from(asked: Sequence[Asked], answers: Sequence[Answer], wrong: float, most: int = 6) -> Drafts:
    """What will be generated, where each token is another one with the probability `wrong`."""
    known = {id(one): answer.tokens for one, answer in zip(asked, answers, strict=True)}
    source = random.Random(7)

    def drafts(one: Asked, outputs: Sequence[int]) -> list[int]:
        right = known[id(one)][len(outputs) :][: source.randint(0, most)]
        right = [max(token, 0) for token in right]  # a scripted end has no token of its own
        return [source.randrange(VOCAB) if source.random() < wrong else token for token in right]

    return drafts


def test_rows_of_every_kind_have_their_kind() -> None:
    """The requests do what they are there for; else this file would compare nothing."""
    answers = Driver(make_runner(WAYS[FASTEST]), asked := kinds()).run(COUNT)
    by_kind = dict(zip(range(len(asked)), answers, strict=True))
    assert all(len(answer.tokens) == COUNT for row, answer in by_kind.items() if row not in (8, 9, 10))
    assert 12 < len(by_kind[8].tokens) < COUNT, "it must stop, after min_tokens"
    assert 1 < len(by_kind[9].tokens) < COUNT, "it must stop"
    assert len(by_kind[10].tokens) == 17
    assert len(by_kind[7].prompt_logprobs) == 19
    assert all(not answer.failure for answer in answers)


@pytest.mark.parametrize("wrong", [0.0, 0.2, 0.6, 1.0], ids=lambda wrong: f"{wrong:.0%} wrong")
@pytest.mark.parametrize("way", NATIVE)
def test_drafts_change_no_token_and_no_logprob(way: str, wrong: float) -> None:
    compare(lambda: make_runner(WAYS[way]), wrong)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("way", NATIVE)
def test_nor_with_weights_of_fewer_bits(way: str, format: str) -> None:
    compare(lambda: make_runner(WAYS[way], *FORMATS[format]), 0.3)


@pytest.mark.parametrize("way", NATIVE)
def test_nor_with_an_attention_window(way: str) -> None:
    windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24}
    compare(lambda: make_runner(WAYS[way], **windowed), 0.3)


@pytest.mark.parametrize("threads", [1, 3])
def test_nor_with_other_numbers_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(lambda: make_runner(WAYS[FASTEST]), 0.3)
    finally:
        torch.set_num_threads(before)


def compare(make: Callable[[], Runner], wrong: float) -> None:
    """All requests with and without drafts; the same to the last bit."""
    asked = kinds()
    plain = Driver(make(), asked)
    want = plain.run(COUNT)
    drafted = Driver(make(), asked, drafts_from(asked, want, wrong))
    got = drafted.run(COUNT)
    for row, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one == other, f"row {row}: {asked[row].params}"
    accepted = sum(answer.accepted for answer in got)
    if wrong < 0.5:
        assert accepted > 100
        assert drafted.passes < plain.passes
    assert wrong or drafted.rejected <= 1, "right drafts are accepted; only the scripted end's token is not known"


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_in_plain_torch_the_tokens_are_the_same(wrong: float) -> None:
    asked, ops = kinds(), WAYS["cpu"]
    want = Driver(make_runner(ops), asked).run(COUNT)
    got = Driver(make_runner(ops), asked, drafts_from(asked, want, wrong)).run(COUNT)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for one, other in zip(got, want, strict=True):
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]
        near = pytest.approx([each.logprob for each in other.logprobs], abs=1e-4)
        assert [each.logprob for each in one.logprobs] == near


@pytest.mark.parametrize("format", ["float32", *FORMATS])
@pytest.mark.parametrize("way", [*NATIVE, *OTHER_CPUS])
def test_a_position_has_the_same_bits_alone_and_among_others(way: str, format: str) -> None:
    """Hidden states and scores of 16 positions, computed one by one and 2 to 16 at once, beside other rows or not."""
    runner = make_runner((WAYS | OTHER_CPUS)[way], *FORMATS.get(format, (torch.float32, False)))
    asked = [Asked(prompt(number, 316)) for number in range(3)]
    with torch.inference_mode():
        for context in (17, 300):
            runner.forward(
                plan_of([(row, 0, one.prompt[:context], 0) for row, one in enumerate(asked)], row_starts(asked))
            )
            tokens = asked[0].prompt[context : context + 16]
            alone = [states(runner, [(0, context + at, [token], 1)]) for at, token in enumerate(tokens)]
            for count in range(2, 17):
                for first in {0, 16 - count}:
                    others = [(row, context, asked[row].prompt[context : context + 4 * row - 3], 1) for row in (1, 2)]
                    ours = (0, context + first, tokens[first : first + count], count)
                    for parts in ([ours], [ours, *others[: count % 3]], [*others, ours]):
                        hidden, scores = states(runner, parts)
                        begin = sum(len(ids) for _, _, ids, _ in parts[: parts.index(ours)])
                        for at in range(count):
                            assert torch.equal(hidden[begin + at], alone[first + at][0][0]), f"{count} at once"
                            assert torch.equal(scores[begin + at], alone[first + at][1][0]), f"{count} at once"


def states(runner: Runner, parts: Sequence[tuple[int, int, Sequence[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states, scores) of all positions of a pass."""
    forward = runner.forward(plan_of(parts))
    assert forward is not None
    return forward.hidden.clone(), runner.model.logits(forward.hidden)


def test_a_row_whose_grammar_allows_nothing_fails_where_it_would_without_drafts() -> None:
    def until_five(outputs: Sequence[int]) -> list[int]:
        return [] if len(outputs) == 5 else allowed_after(outputs)

    asked = [Asked(prompt(1), SamplingParams(temperature=0.7), allowed=until_five), Asked(prompt(2))]
    want = Driver(make_runner(WAYS[FASTEST]), asked).run(12)
    assert (len(want[0].tokens), want[0].failure) == (5, FORBIDDEN)
    continued = [Answer([*want[0].tokens, *range(6)]), want[1]]
    for most in range(1, 8):
        got = Driver(make_runner(WAYS[FASTEST]), asked, drafts_from(asked, continued, 0.0, most)).run(12)
        assert got == want


def test_a_row_whose_scores_are_broken_fails_where_it_would_without_drafts() -> None:
    """The embedding of one token is not a number: the row that generates it fails at the next one."""
    runner = make_runner(WAYS["cpu"])
    asked = [Asked(prompt(1), SamplingParams(temperature=0.0)), Asked(prompt(2), SamplingParams(temperature=0.0))]
    whole = Driver(runner, asked).run(12)
    token = next(t for t in whole[0].tokens[3:8] if t not in asked[0].prompt + asked[1].prompt + tuple(whole[1].tokens))
    at = whole[0].tokens.index(token)

    def broken() -> Runner:
        made = make_runner(WAYS["cpu"])
        made.model.embedding.values[token] = torch.nan  # type: ignore[attr-defined]
        return made

    want = Driver(broken(), asked).run(12)
    assert (want[0].tokens, want[0].failure) == (whole[0].tokens[: at + 1], NOT_FINITE)
    assert want[1].tokens == whole[1].tokens
    got = Driver(broken(), asked, drafts_from(asked, whole, 0.0)).run(12)
    assert got == want
    assert got[0].accepted > 0


def test_a_coin_accepts_as_many_drafts_as_it_is_asked_to() -> None:
    """What is accepted depends on seed, sample and position; the tokens are the drafts, then one that was drawn."""
    chance, drafts = 0.7, [5, 6, 7, 8]
    asked = [
        Asked(prompt(number), SamplingParams(temperature=1.0), seed=number, sample=number % 2) for number in range(9)
    ]
    runner = make_runner(WAYS[FASTEST], rule=CoinToss(chance))
    driver = Driver(runner, asked, lambda one, outputs: drafts)
    answers = driver.run(200)
    for number, (one, answer) in enumerate(zip(asked, answers, strict=True)):
        positions = np.arange(len(one.prompt), len(one.prompt) + 200)
        heads = coins(draw_keys(positions * 0 + number, positions * 0 + one.sample, positions), chance)
        at, want = 1, 0  # the first token comes with the prompt
        while at < 200:
            most = min(4, 200 - at - 1)
            right = next((count for count in range(most) if not heads[at + count]), most)
            assert answer.tokens[at : at + right] == drafts[:right]
            at, want = at + right + 1, want + right
        assert answer.accepted == want
    tokens_per_pass = (sum(len(answer.tokens) for answer in answers) - 9) / (9 * (driver.passes - 1))
    assert tokens_per_pass > 2  # 2.77 in theory, and rows wait for the slowest
