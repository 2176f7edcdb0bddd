"""Beam search in a front: the best beams of a small model that is written down, and what it cannot be combined with."""

import itertools
import math
from typing import Any

import pytest

from shoal.core.job import Ending, Job, Refusal, Sink
from shoal.core.request import Logprobs
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, chat, complete, error_of, front, run
from tests.server.test_tolerance import shared

VOCAB = (EOS, 5, 6, 7)


def likely(tokens: tuple[int, ...]) -> dict[int, float]:
    """The logprobs of the next token: any fixed function of all tokens will do."""
    weights = {one: 1 + (sum(tokens[-3:]) * 7 + one * 13 + len(tokens)) % 17 for one in VOCAB}
    return {one: math.log(weight / sum(weights.values())) for one, weight in weights.items()}


class Model(FakeClient):
    """Answers requests of one token with the logprobs of that function."""

    def _say(self, one: Any, sample: int) -> None:
        job: Job = one.job
        order = sorted(likely(tuple(job.prompt)).items(), key=lambda item: -item[1])[: job.params.logprobs]
        tokens, logprobs = zip(*order, strict=True)
        one.sink.token(sample, tokens[0], Logprobs(tokens[0], logprobs[0], 1, tokens, logprobs))
        self._end(one, sample, Ending("length"))


def best(prompt: list[int], length: int, count: int, penalty: float) -> list[tuple[int, ...]]:
    """By trying all continuations."""
    scored = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(VOCAB, repeat=size):
            ends = tokens[-1] == EOS
            if EOS in tokens[:-1] or (size < length and not ends):
                continue
            logprob = sum(likely((*prompt, *tokens[:at]))[token] for at, token in enumerate(tokens))
            scored[tokens] = logprob / max(1, size - ends) ** penalty
    return sorted(scored, key=lambda one: -scored[one])[:count]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_wide_beams_find_the_likeliest_answers(penalty: float) -> None:
    """With as many beams as there are continuations nothing is lost."""
    body = {"prompt": [9, 8], "n": 32, "max_tokens": 4, "use_beam_search": True, "length_penalty": penalty}
    client = Model()
    answer = complete(front(client), **body, return_token_ids=True, logprobs=2)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    expected = best([9, 8], 4, 8, penalty)
    assert [tuple(one["token_ids"]) for one in choices[:8]] == expected
    assert [one["finish_reason"] for one in choices[:8]] == ["stop" if one[-1] == EOS else "length" for one in expected]
    assert all(len(one["logprobs"]["top_logprobs"][0]) in (2, 3) for one in choices)
    assert not client.running


def test_one_beam_is_greedy() -> None:
    body = {"max_tokens": 6, "use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    answer = complete(front(Model()), prompt=[9], **body).json()
    tokens: tuple[int, ...] = (9,)
    for _ in range(6):
        table = likely(tokens)
        tokens += (max(table, key=lambda one: table[one]),)
    assert tuple(answer["choices"][0]["token_ids"]) == tokens[1:]


def test_chats_and_several_prompts() -> None:
    done = complete(front(Model()), prompt=[[9], [8]], n=2, max_tokens=3, use_beam_search=True)
    assert len(done.json()["choices"]) == 4
    assert len(chat(front(Model()), n=2, max_tokens=3, use_beam_search=True).json()["choices"]) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True}, {"stop": "x"}, {"stop_regex": "x"}, {"bad_words": ["x"]}, {"allowed_token_ids": [5]},
        {"logit_bias": {"5": 1}}, {"min_tokens": 2}, {"presence_penalty": 1}, {"frequency_penalty": 1},
        {"prompt_logprobs": 1}, {"n": 33},
    ],
)  # fmt: skip
def test_what_beams_cannot_follow_is_refused_by_name(body: dict[str, Any]) -> None:
    error = error_of(complete(shared(), prompt=[9], use_beam_search=True, **body), 400)
    assert error["param"] == next(iter(body))


def test_a_refusal_is_the_answer() -> None:
    client = Model()
    client.refusal = Refusal("QueueFull", "the queue is full", 2.0)
    assert error_of(complete(front(client), prompt=[9], use_beam_search=True, n=3), 429)["code"] == "queue_full"


def test_an_abort_ends_the_steps() -> None:
    from shoal.core.params import SamplingParams
    from shoal.server.beams import BeamClient

    class Silent(Sink):
        def refused(self, refusal: Refusal) -> None:
            raise AssertionError(refusal)

        def accepted(self) -> None:
            raise AssertionError("it was aborted")

    async def work() -> None:
        import asyncio

        client = FakeClient(tick_s=None)
        beams = BeamClient(client, 1.0)
        beams.submit(Job(id="a", prompt=[9], params=SamplingParams(n=2, max_tokens=3), seed=0), Silent())
        await asyncio.sleep(0.01)
        assert list(client.running) == ["a.0.0"]
        beams.abort("a")
        await asyncio.sleep(0.01)
        assert client.aborted == ["a.0.0"]
        assert not client.running

    run(work)
