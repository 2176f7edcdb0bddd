"""Parameters of vLLM's and SGLang's servers: what jobs they become, and how they are shown in answers."""

from typing import Any

import pytest

from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, ask, chat, complete, error_of, events, front, tokenizer
from tests.server.test_chat import prompt_of
from tests.server.test_tolerance import shared
from tests.server.test_tools import Recorded

PROMPT = [5, 6, 7, 8, 9]


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def submitted(**body: Any) -> Any:
    client = FakeClient()
    answer = complete(front(client, grammars=Recorded()), **{"prompt": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return client.submitted[0]


# ---- tokens that may be drawn


def test_token_rules_reach_the_job() -> None:
    job = submitted(allowed_token_ids=[4, 5], bad_words=["fish", "a"], min_tokens=2)
    assert job.params.allowed_token_ids == (4, 5)
    assert tuple(ids_of("fish")) in job.bad_words
    assert tuple(ids_of(" fish")) in job.bad_words
    assert job.grammar is None
    with_grammar = submitted(allowed_token_ids=[4, 5], structured_outputs={"regex": "a+"})
    assert with_grammar.grammar is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1] * 20_000}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 300}, "bad_words"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [1] * 65}, "logprob_token_ids"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": "a*"}, "stop_regex"),
        ({"stop_regex": ["a"] * 5}, "stop_regex"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 63, "prompt": [[5] * 200] * 42}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert error_of(complete(shared(), **{"prompt": PROMPT, **body}), 400)["param"] == param


def test_without_a_tokenizer_texts_cannot_be_looked_for() -> None:
    for name in ("stop_regex", "bad_words"):
        error = error_of(complete(front(without_tokenizer=True), prompt=PROMPT, **{name: ["x"]}), 400)
        assert error["param"] == name
    assert complete(front(without_tokenizer=True), prompt=PROMPT, allowed_token_ids=[5]).status_code == 200


# ---- where an answer ends


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_regex_ends_the_answer_with_what_matched(stream: bool) -> None:
    client = FakeClient(lambda job, sample: [*ids_of("in 1984 and 1985"), EOS])
    answer = complete(front(client), prompt="x", stop_regex=["[0-9]{4}"], stream=stream, max_tokens=100)
    choices = [one["choices"][0] for one in events(answer)] if stream else answer.json()["choices"]
    assert "".join(one["text"] for one in choices) == "in 1984"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "[0-9]{4}"
    assert client.finished_at


def test_no_stop_trim_keeps_the_stop_string() -> None:
    app = front(FakeClient(lambda job, sample: [*ids_of("one END two"), EOS]))
    assert complete(app, prompt="x", stop="END", no_stop_trim=True).json()["choices"][0]["text"] == "one END"
    assert complete(app, prompt="x", stop="END").json()["choices"][0]["text"] == "one "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_max_tokens_0_with_echo_is_the_prompt_alone(stream: bool, eos: bool) -> None:
    client = FakeClient(lambda job, sample: [EOS if eos else 9])
    answer = complete(front(client), prompt="Once upon", max_tokens=0, echo=True, logprobs=2, stream=stream)
    (job,) = client.submitted
    assert job.params.max_tokens == 1
    assert not job.stop_ids
    if stream:
        choices = [one["choices"][0] for one in events(answer)]
        assert "".join(one["text"] for one in choices) == "Once upon"
        assert choices[-1]["finish_reason"] == "length"
        return
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "Once upon"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == len(job.prompt)
    assert len(choice["logprobs"]["top_logprobs"][1]) in (2, 3)
    assert answer.json()["usage"]["completion_tokens"] == 0


# ---- logprobs


def test_logprobs_0_are_those_of_the_tokens_alone() -> None:
    app = front(FakeClient(lambda job, sample: [7, 8]))
    whole = complete(app, prompt=PROMPT, logprobs=0).json()["choices"][0]["logprobs"]
    assert whole["token_logprobs"] == [-0.07, -0.08]
    assert whole["top_logprobs"] is None
    shown = chat(app, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in shown] == [-0.07, -0.08]
    assert all(one["top_logprobs"] == [] for one in shown)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_as_their_ids(stream: bool) -> None:
    app = front(FakeClient(lambda job, sample: [7, 8]))
    body = {"return_tokens_as_token_ids": True, "stream": stream}
    done = complete(app, prompt=PROMPT, logprobs=1, **body)
    parts = [one["choices"][0] for one in events(done)] if stream else done.json()["choices"]
    shown = [one["logprobs"] for one in parts if one["logprobs"]]
    assert [token for one in shown for token in one["tokens"]] == ["token_id:7", "token_id:8"]
    assert {"token_id:0", "token_id:7"} == set(shown[0]["top_logprobs"][0])
    done = chat(app, logprobs=True, top_logprobs=1, **body)
    parts = [one["choices"][0] for one in events(done)] if stream else done.json()["choices"]
    content = [token for one in parts if one["logprobs"] for token in one["logprobs"]["content"]]
    assert [one["token"] for one in content] == ["token_id:7", "token_id:8"]
    assert content[0]["top_logprobs"][0]["token"] == "token_id:0"
    assert content[0]["bytes"] == list(tokenizer().bytes_of(7))


def test_prompt_logprobs_are_ranked_by_token_id() -> None:
    app = front(FakeClient(lambda job, sample: [7]))
    for answer in (complete(app, prompt=PROMPT, prompt_logprobs=2), chat(app, prompt_logprobs=2)):
        body = answer.json()
        found = body.get("prompt_logprobs") or body["choices"][0]["prompt_logprobs"]
        assert found[0] is None
        assert len(found) == body["usage"]["prompt_tokens"]
        for one in found[1:]:
            own = [(id, each) for id, each in one.items() if int(id) > 1]
            for id, each in own:
                assert each["logprob"] == -int(id) / 100
                assert each["rank"] == int(id) + 1
            assert one["0"]["rank"] == 1
            assert one["1"]["rank"] == 2
            assert isinstance(one["0"]["decoded_token"], str)
    assert "prompt_logprobs" not in chat(app).json()
    assert "prompt_logprobs" not in complete(app, prompt=PROMPT).json()["choices"][0]


def test_prompt_logprobs_beside_echo_with_fewer() -> None:
    app = front(FakeClient(lambda job, sample: [7]))
    choice = complete(app, prompt="Once upon", echo=True, logprobs=1, prompt_logprobs=3).json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][1]) <= 2
    assert {"0", "1", "2"} <= set(choice["prompt_logprobs"][1])


def test_certain_tokens_logprobs_take_the_place_of_the_likeliest() -> None:
    job = submitted(logprobs=1, logprob_token_ids=[30, 31, 32])
    assert job.params.logprob_token_ids == (30, 31, 32)
    assert job.params.logprobs == 3
    client = FakeClient()
    assert chat(front(client), logprobs=True, logprob_token_ids=[30]).status_code == 200
    assert client.submitted[0].params.logprobs == 1


# ---- prompts


def test_a_prompt_is_cut_to_its_last_or_first_tokens() -> None:
    assert submitted(truncate_prompt_tokens=2).prompt == [8, 9]
    assert submitted(truncate_prompt_tokens=2, truncation_side="right").prompt == [5, 6]
    assert submitted(truncate_prompt_tokens=99).prompt == PROMPT
    long = submitted(prompt="Once upon a time " * 500, truncate_prompt_tokens=-1, max_tokens=12).prompt
    assert len(long) == 500
    assert long == ids_of("Once upon a time " * 500)[-500:]
    client = FakeClient()
    answer = chat(front(client), truncate_prompt_tokens=3, max_tokens=1)
    assert answer.json()["usage"]["prompt_tokens"] == 3
    echoed = complete(front(), prompt="Once upon a time", truncate_prompt_tokens=1, echo=True, max_tokens=0)
    assert echoed.json()["choices"][0]["text"] == tokenizer().decode(ids_of("Once upon a time")[-1:])


def test_special_tokens_before_a_prompt_can_be_left_out() -> None:
    with_them, without = submitted(prompt="Once").prompt, submitted(prompt="Once", add_special_tokens=False).prompt
    assert without == ids_of("Once")
    assert with_them == tokenizer().encode("Once")
    assert error_of(chat(front(), add_special_tokens=True), 400)["param"] == "add_special_tokens"
    assert chat(front(), add_special_tokens=False).status_code == 200


HALF = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]


def test_the_last_message_is_continued() -> None:
    assert prompt_of(messages=HALF, continue_final_message=True) == "user: Hi\nassistant: Well, "
    parts = [HALF[0], {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    assert prompt_of(messages=parts, continue_final_message=True).endswith("Well, ")
    assert prompt_of(messages=HALF, add_generation_prompt=False) == "user: Hi\nassistant: Well, \n"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_what_is_continued(stream: bool) -> None:
    app = front(FakeClient(lambda job, sample: [*ids_of("yes"), EOS]))
    body = {"messages": HALF, "continue_final_message": True, "stream": stream}

    def text(**more: Any) -> str:
        answer = chat(app, **body, **more)
        if not stream:
            return str(answer.json()["choices"][0]["message"]["content"])
        return "".join(one["choices"][0]["delta"].get("content", "") for one in events(answer))

    assert text(echo=True) == "Well, yes"
    assert text() == text(echo=False) == "yes"
    user_last = chat(app, messages=HALF[:1], echo=True)
    assert user_last.json()["choices"][0]["message"]["content"] == "yes"


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    empty = [HALF[0], {"role": "assistant", "content": ""}]
    for body in (
        {"messages": empty, "continue_final_message": True},
        {"messages": HALF, "continue_final_message": True, "add_generation_prompt": True},
    ):
        assert error_of(chat(front(), **body), 400)["param"] == "continue_final_message"


# ---- names and warnings


def test_a_request_id_names_the_answer() -> None:
    for name in ("request_id", "rid"):
        answer = chat(front(), **{name: "mine-1"})
        assert answer.json()["id"] == "chatcmpl-mine-1"
        assert answer.headers["x-request-id"] == "mine-1"
        assert "x-shoal-warning" not in answer.headers
    body = {"messages": HALF, "request_id": "mine"}
    header = ask(front(), "POST", "/v1/chat/completions", json=body, headers={"x-request-id": "header"})
    assert header.headers["x-request-id"] == "header"
    streamed = events(chat(front(), request_id="mine", stream=True))
    assert {one["id"] for one in streamed} == {"chatcmpl-mine"}


def test_two_requests_may_have_the_same_id() -> None:
    client = FakeClient()
    app = front(client)
    for _ in range(2):
        assert complete(app, prompt=PROMPT, request_id="same").json()["id"] == "cmpl-same"
    assert len({job.id for job in client.submitted}) == 2


def test_a_priority_that_no_order_looks_at_is_named() -> None:
    plain, used = front(uses_priority=False), front(uses_priority=True)
    assert "priority" in chat(plain, priority=3).headers["x-shoal-warning"]
    for answer in (chat(used, priority=3), chat(plain, priority=0), chat(plain)):
        assert answer.status_code == 200
        assert "x-shoal-warning" not in answer.headers
