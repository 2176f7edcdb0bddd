"""A server with drafts answers as one without: every kind of request, shapes, streams, and an engine that is killed.

The same bodies go to both servers; the one with drafts decides without knowing the time (tests/drafting.py).
"""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import kernels
from shoal.kernels.cpu import NativeOps
from tests.drafting import untimed_env
from tests.story_server.asks import ASKED, STORY
from tests.story_server.servers import RESTARTS, RUNNING, SMALL, WAITING, Server, running
from tests.story_server.test_crash import Ask, all_answers, asks
from tests.story_server.test_structured import LARK, SWITCH

pytestmark = pytest.mark.skipif(
    not isinstance(kernels.pick("cpu"), NativeOps), reason="in plain torch a position rounds as its neighbours make it"
)

PROPOSED, ACCEPTED = "shoal_draft_tokens_proposed_total", "shoal_draft_tokens_accepted_total"
ORDER = {
    "type": "object",
    "properties": {
        "customer_first_name": {"type": "string", "maxLength": 8},
        "number_of_articles": {"type": "integer", "minimum": 1, "maximum": 99},
        "delivery_before_noon": {"type": "boolean"},
    },
    "required": ["customer_first_name", "number_of_articles", "delivery_before_noon"],
    "additionalProperties": False,
}
GBNF = 'root ::= "<" (word ",")* ">"\nword ::= "once upon " word | "a time"'
BAD = [">>>", "=>", "==="]  # of tokens that are allowed beside them
CHAT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 4, "ignore_eos": True},
    "sampled": {"temperature": 0.4, "top_p": 0.9, "logprobs": True, "ignore_eos": True},
    "penalties": {"temperature": 0.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "ignore_eos": True},
    "bias": {"temperature": 0.5, "logit_bias": {"7": 9, "9": 8}, "logprobs": True, "ignore_eos": True},
    "stop strings": {"temperature": 0, "stop": ["th", "q"], "min_tokens": 8},
    "stop tokens": {"temperature": 0.5, "stop_token_ids": list(range(5, 300, 9)), "min_tokens": 5},
    "n": {"temperature": 0.5, "n": 4, "logprobs": True},
    "schema": {"structured_outputs": {"json": SWITCH}, "max_tokens": 400},
    "long keys": {"structured_outputs": {"json": ORDER}, "max_tokens": 400, "n": 3},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}-(swim|swam|swum){2,9}"}, "max_tokens": 200},
    "choice": {"structured_outputs": {"choice": ["once upon a time", "never"]}, "n": 4},
    "grammar": {"structured_outputs": {"grammar": LARK}, "logprobs": True, "max_tokens": 200},
    "gbnf": {"structured_outputs": {"grammar": GBNF}, "max_tokens": 200},
    "allowed tokens": {"allowed_token_ids": [60, 61], "temperature": 0.2, "ignore_eos": True, "logprobs": True},
    "bad words": {"allowed_token_ids": [60, 61, 62], "bad_words": BAD, "ignore_eos": True, "min_tokens": 20},
    "bad words in a regex": {"structured_outputs": {"regex": "(swim|swam|swum){9}"}, "bad_words": ["a", "mswu"]},
}

DRAFTED = ("allowed tokens", "bias", "schema", "long keys", "regex")  # which repeat themselves, or are forced to


@pytest.fixture(scope="module")
def drafting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "24", "--max-model-len", "2048", "--max-num-batched-tokens", "128")
    flags += ("--speculate", "grammar+suffix")
    with running(tmp_path_factory.mktemp("drafts"), tiny_model, *SMALL, *flags, env=untimed_env()) as server:
        yield server


def answer(server: Server, body: dict[str, Any]) -> Any:
    """All of an answer but its name and time."""
    got = server.post("/v1/chat/completions", {"model": "tiny", "messages": ASKED, "seed": 3, "max_tokens": 60, **body})
    assert got.status_code == 200, got.text
    return {key: value for key, value in got.json().items() if key not in ("id", "created")}


@pytest.mark.parametrize("name", CHAT)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_kind_of_request_is_answered_as_without_drafts(
    tiny: Server, drafting: Server, name: str, seed: int
) -> None:
    before = drafting.metrics()
    body = {**CHAT[name], "seed": seed}
    assert answer(drafting, body) == answer(tiny, body)
    proposed = drafting.metrics()[PROPOSED] - before[PROPOSED]
    assert proposed > 0 or name not in DRAFTED


def shaped(count: int) -> list[Ask]:
    """Requests whose answers must follow a grammar, half of them streamed."""
    shapes: list[dict[str, Any]] = [{"json": ORDER}, {"regex": "(swim|swam|swum)( and (swim|swam|swum)){20,40}"}]
    return [
        {
            "model": "tiny",
            "prompt": STORY,
            "max_tokens": 300,
            "seed": number,
            "structured_outputs": shapes[number % 2],
            "stream": number % 4 < 2,
            "return_token_ids": True,
        }
        for number in range(count)
    ]


def test_streams_with_drafts_survive_kills(tiny: Server, drafting: Server) -> None:
    """The answers of a server without drafts, although the engine with drafts is killed twice meanwhile."""
    wanted = asks(12, 100) + shaped(4)
    undisturbed = asyncio.run(all_answers(tiny, wanted, lambda: None))
    assert {status for status, _ in undisturbed} == {200}
    assert asyncio.run(all_answers(drafting, wanted, lambda: None)) == undisturbed
    now = drafting.metrics()
    assert min(now[ACCEPTED], now[PROPOSED] - now[ACCEPTED]) > 20
    chance = random.Random(time.time_ns())

    def drafted_or_idle() -> bool:
        now = drafting.metrics()  # without the engine's own while it is down
        return now.get(ACCEPTED, 0) > 0 or now.get(RUNNING) == now.get(WAITING) == 0

    def kills() -> None:
        for _ in range(2):
            drafting.wait_for("drafts, or the end of all answers", drafted_or_idle)
            time.sleep(chance.uniform(0.0, 0.5))
            drafting.kill_engine()

    before = drafting.metrics()[RESTARTS]
    disturbed = asyncio.run(all_answers(drafting, wanted, kills))
    assert drafting.metrics()[RESTARTS] == before + 2
    assert disturbed == undisturbed
    drafting.wait_until_idle()
