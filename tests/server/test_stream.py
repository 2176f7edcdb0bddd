"""Streamed answers: their events, their end, and what happens when something goes wrong on the way."""

import asyncio
import json
from itertools import chain
from typing import Any

import pytest

from shoal.core.job import Ending, Job, Refusal
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import EOS, ask_async, chat, complete, error_of, events, front, run, tokenizer

ONCE = "Once upon a time there was a little fish"


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def saying(text: str) -> FakeClient:
    return FakeClient(lambda job, sample: [*ids(text), EOS])


def texts(answer: Any) -> list[str]:
    return [event["choices"][0].get("text", "") for event in events(answer) if event["choices"]]


def test_there_is_one_event_per_token_and_one_for_the_end() -> None:
    answer = complete(front(saying(ONCE)), prompt="x", stream=True, max_tokens=50)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert texts(answer) == [tokenizer().decode([token]) for token in ids(ONCE)] + [""]
    *pieces, last = events(answer)
    assert all(event["choices"][0]["finish_reason"] is None for event in pieces)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert {event["id"] for event in events(answer)} == {last["id"]}
    assert "usage" not in last


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stop": ["upon a", "fish"]},
        {"max_tokens": 3},
        {"stop": "little", "include_stop_str_in_output": True},
        {"stop_token_ids": [ids(" a")[0]]},
        {"echo": True},
        {"logprobs": 2},
        {"logprobs": 1, "echo": True},
        {"return_token_ids": True, "stop": "there"},
        {"n": 3, "logprobs": 0},
    ],
    ids=str,
)
def test_the_events_add_up_to_the_whole_answer(body: dict[str, Any]) -> None:
    asked = {"prompt": ONCE + " é ü ß € ñ", "max_tokens": 60, **body}
    whole = complete(front(), **asked).json()
    streamed = events(complete(front(), **asked, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in streamed[:-1])
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in streamed[:-1] if event["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        for name in choice["logprobs"] or ():
            parts = [piece["logprobs"][name] for piece in mine if piece["logprobs"]]
            together = None if choice["logprobs"][name] is None else list(chain(*parts))
            assert together == choice["logprobs"][name]
        if "return_token_ids" in body:
            assert list(chain(*(piece.get("token_ids", []) for piece in mine))) == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_every_event_is_one_line_also_for_clients_that_split_at_all_line_ends() -> None:
    text = "one\u2028two\u2029three\u0085four\u000bfive\u001csix é €"
    answer = complete(front(saying(text)), prompt="x", stream=True, max_tokens=99)
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line == "data: [DONE]" or json.loads(line.removeprefix("data: ")) for line in lines)
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text


def test_a_chat_begins_with_its_role_and_ends_with_its_reason() -> None:
    first, *pieces, last = events(chat(front(saying("a b c")), stream=True))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"] for event in pieces] == [
        {"content": tokenizer().decode([token])} for token in ids("a b c")
    ]
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_a_streamed_chat_shows_logprobs_and_ids_on_request() -> None:
    client = FakeClient(lambda job, sample: [50, 60])
    first, *pieces, last = events(chat(front(client), stream=True, logprobs=True, return_token_ids=True))
    assert first["prompt_token_ids"] == client.submitted[0].prompt
    assert [event["choices"][0]["token_ids"] for event in pieces] == [[50], [60]]
    assert [event["choices"][0]["logprobs"]["content"][0]["token"] for event in pieces] == ["P", "Z"]
    assert last["choices"][0]["token_ids"] == []


def test_a_token_that_is_half_a_character_makes_no_event() -> None:
    euro = ids("€")
    assert len(euro) == 3
    assert texts(complete(front(FakeClient(lambda job, sample: euro)), prompt="x", stream=True)) == ["€", ""]


def test_half_a_character_at_the_end_comes_with_the_last_event() -> None:
    answer = complete(front(FakeClient(lambda job, sample: ids("€")[:2])), prompt="x", stream=True)
    assert texts(answer) == ["\ufffd"]
    assert events(answer)[-1]["choices"][0]["finish_reason"] == "length"


def test_text_that_may_become_a_stop_string_is_held_back_and_then_shown() -> None:
    answer = complete(front(saying("Once upon a time")), prompt="x", stream=True, stop=["upon a fish"])
    assert "".join(texts(answer)) == "Once upon a time"
    assert texts(answer)[0] == "Once"


def test_text_that_json_must_escape_arrives_as_it_was() -> None:
    text = 'def double(x):\n    return "x" * 2\\\t\x00\x7f é € 🐟 </end>'
    answer = complete(front(saying(text)), prompt="x", stream=True, max_tokens=200)
    assert "".join(texts(answer)) == text


def test_a_model_without_a_tokenizer_streams_ids() -> None:
    first, *pieces, _ = events(complete(front(without_tokenizer=True), prompt=[50, 60], stream=True))
    assert first["choices"][0]["prompt_token_ids"] == [50, 60]
    assert [event["choices"][0]["token_ids"] for event in pieces] == [[50], [60]]


def test_ignored_fields_are_named_in_a_header_of_streams_too() -> None:
    assert complete(front(), prompt="x", stream=True, user="me").headers["x-shoal-warning"] == "ignored: user"


def test_echo_with_logprobs_and_several_samples_cannot_be_streamed() -> None:
    error_of(complete(front(), prompt="x", stream=True, echo=True, logprobs=1, n=2), 400)


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_a_status_also_for_streams(stream: bool) -> None:
    client = FakeClient()
    client.refusal = Refusal("QueueFull", "100 requests wait already; try again later", 2.4)
    answer = complete(front(client), prompt="x", stream=stream)
    assert error_of(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("stream", [False, True])
def test_if_one_of_several_prompts_is_refused_the_others_are_ended(stream: bool) -> None:
    class Second(FakeClient):
        def tick(self) -> None:
            for job_id, one in list(self.running.items()):
                if job_id.endswith(".1"):
                    del self.running[job_id]
                    one.sink.refused(Refusal("PromptTooLong", "the prompt is too long"))
                    one.sink.flush()
            super().tick()

    client = Second(lambda job, sample: job.prompt * 100)
    error_of(complete(front(client), prompt=["a", "b", "c"], stream=stream, max_tokens=100), 400)
    assert not client.running
    assert len(client.aborted) == 2


def test_a_failure_before_the_first_event_is_a_500_without_details() -> None:
    client = FakeClient()
    client.failure = Ending("error", error="secret: /home/me failed at 0xdeadbeef")
    for stream in (False, True):
        answer = complete(front(client), prompt="x", stream=stream)
        error_of(answer, 500)
        assert "secret" not in answer.text


def test_a_failure_after_the_first_event_is_an_error_event_and_done() -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 100, tick_s=None)
        asking = asyncio.create_task(
            ask_async(front(client), "POST", "/v1/completions", json={"prompt": "x", "stream": True})
        )
        await until(lambda: bool(client.running))
        client.tick()
        await asyncio.sleep(0.01)
        client.failure = Ending("error", error="secret")
        client.tick()
        first, *_, last = events(await asking)
        assert first["choices"][0]["text"] == "P"
        assert last["error"]["code"] == "internal_error"
        assert "secret" not in str(last)
        assert not client.running

    run(work)


def test_what_breaks_in_one_answer_does_not_reach_the_engine_client() -> None:
    client = FakeClient()
    app = front(client)
    app.preparer.tokenizer = None  # so that ids pass; the detokenizer then gets an id that no table has
    for stream in (False, True):
        client.script = broken
        error_of(complete(app, prompt=[5], stream=stream), 500)
    client.script = lambda job, sample: [50]
    assert complete(app, prompt=[5]).status_code == 200


def broken(job: Job, sample: int) -> list[Any]:
    return ["not an id"]


def test_time_over_before_the_first_token_is_a_503() -> None:
    client = FakeClient()
    client.refusal = Refusal("DeadlinePassed", "waited 2 s, its timeout; ask later")
    error_of(complete(front(client), prompt="x", timeout=2), 503)


def test_a_timeout_later_is_the_finish_reason_of_the_answer() -> None:
    client = FakeClient()
    client.failure = Ending("timeout")
    choice = complete(front(client), prompt="a b", timeout=2).json()["choices"][0]
    assert choice["text"] == "a"
    assert choice["finish_reason"] == "timeout"


def test_many_streams_at_once_do_not_mix() -> None:
    async def work() -> None:
        app = front()
        bodies = [{"prompt": f"number {i} says {i * i}", "stream": True, "max_tokens": 99} for i in range(100)]
        answers = await asyncio.gather(*(ask_async(app, "POST", "/v1/completions", json=body) for body in bodies))
        assert ["".join(texts(answer)) for answer in answers] == [body["prompt"] for body in bodies]
        assert app.active == 0
        assert not app.streams

    run(work)
