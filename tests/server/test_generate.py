"""POST /generate: errors under SGLang's names, warnings, answers. What its fields do is checked in tests/fields."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from shoal.core.job import Ending
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, ask, ask_async, error_of, front, run, tokenizer
from tests.server.test_tools import Recorded, says


def generate(client: FakeClient | None = None, **body: Any) -> httpx.Response:
    return ask(front(client or says("Yes."), grammars=Recorded()), "POST", "/generate", json={"text": "Hi", **body})


def test_an_answer_has_sglangs_fields() -> None:
    found = generate(rid="mine").json()
    ids = tokenizer().encode("Yes.", add_special=False)
    meta = found.pop("meta_info")
    assert found == {"text": "Yes.", "output_ids": [*ids, EOS]}
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": len(tokenizer().encode("Hi")),
        "completion_tokens": len(ids) + 1,
        "cached_tokens": 0,
        "weight_version": "default",
    }
    stopped = generate(sampling_params={"stop": "s"}).json()
    assert stopped["text"] == "Ye"
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "s"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [5]}, "text"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": [5, [6]]}, "input_ids"),
        ({"text": None, "input_ids": [10**6]}, "input_ids"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
        ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "structured_outputs"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"return_logprob": True, "top_logprobs_num": 65}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"return_logprob": True, "top_logprobs_num": 1, "stream": True}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ],
)
def test_what_cannot_be_is_refused_under_its_own_name(body: dict[str, Any], param: str) -> None:
    error = error_of(generate(**body), 400)
    assert error["param"] == param, error
    if "." in param:
        assert param in error["message"]


def test_what_has_no_effect_is_named() -> None:
    answer = generate(session_id="x", sampling_params={"stream_interval": 4})
    assert answer.headers["x-shoal-warning"] == "ignored: session_id, stream_interval"
    assert "x-shoal-warning" not in generate(return_hidden_states=False, lora_path=None).headers


def test_a_stream_that_fails_says_so() -> None:
    app, client = front(tick := FakeClient(lambda job, sample: [7] * 50, tick_s=None)), tick

    async def work() -> None:
        body = {"text": "Hi", "stream": True, "sampling_params": {"max_new_tokens": 50}}
        asked = asyncio.create_task(ask_async(app, "POST", "/generate", json=body))
        while not client.running:
            await asyncio.sleep(0.01)
        client.tick()
        await asyncio.sleep(0.05)
        client.failure = Ending("error", error="boom")
        client.tick()
        *_, error, done = (await asked).text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert "internal error" in json.loads(error.removeprefix("data: "))["error"]["message"]

    run(work)


def test_a_long_stream_stays_linear() -> None:
    """Events have the whole text, and come at growing intervals."""
    count = 400
    client = FakeClient(lambda job, sample: [7] * count)
    lines = generate(client, stream=True, sampling_params={"max_new_tokens": count}).text.strip().split("\n\n")
    lengths = [len(json.loads(line.removeprefix("data: "))["output_ids"]) for line in lines[:-1]]
    assert lengths[:70] == list(range(1, 71))
    assert lengths[-1] == count
    assert len(lengths) < 250
