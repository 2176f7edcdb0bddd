"""POST /v1/chat/completions, not streamed; and answers that must fit a grammar."""

import json
import threading
from typing import Any

import pytest

from shoal.core.job import GrammarSpec
from shoal.errors import BadGrammar, GrammarTimeout
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, TEMPLATE, ask, chat, complete, error_of, front, tokenizer

ASSISTANT = "assistant: "


def prompt_of(**body: Any) -> str:
    client = FakeClient()
    answer = chat(front(client), **body)
    assert answer.status_code == 200, answer.text
    return tokenizer().decode(client.submitted[0].prompt)


def test_messages_go_through_the_chat_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_of(messages=messages) == f"system: Be brief.\nuser: Hi\n{ASSISTANT}"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(messages=[{"role": "user", "content": parts}]) == f"user: a\nb\n{ASSISTANT}"


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    message = chat(front()).json()["choices"][0]["message"]
    assert message["role"] == "assistant"
    user = {"role": "user", "content": "Hi"}
    assert message["content"] in prompt_of(messages=[user, message, user])


def test_template_variables_may_come_with_a_request_but_not_override_the_servers() -> None:
    assert prompt_of(chat_template_kwargs={"mood": "glad "}).endswith(f"glad {ASSISTANT}")
    for name in ("messages", "add_generation_prompt", "bos_token", "tools", "a b"):
        error = error_of(chat(front(), chat_template_kwargs={name: "x"}), 400)
        assert error["param"] == "chat_template_kwargs"


def test_the_answer_has_openais_fields() -> None:
    answer = chat(front(FakeClient(lambda job, sample: [50, EOS]))).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "P", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 2


def test_token_ids_are_shown_on_request() -> None:
    client = FakeClient(lambda job, sample: [50])
    answer = chat(front(client), return_token_ids=True).json()
    assert answer["prompt_token_ids"] == client.submitted[0].prompt
    assert answer["choices"][0]["token_ids"] == [50]


def test_logprobs_have_the_shape_of_chats() -> None:
    answer = chat(front(FakeClient(lambda job, sample: [50])), logprobs=True, top_logprobs=1).json()
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "P",
                "logprob": -0.5,
                "bytes": [80],
                "top_logprobs": [{"token": "<unk>", "logprob": 0.0, "bytes": list(b"<unk>")}],
            }
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("count", [-1, 65, 10**30])
def test_too_many_top_logprobs_are_refused_by_name(count: int) -> None:
    error = error_of(chat(front(), logprobs=True, top_logprobs=count), 400)
    assert (error["param"], error["message"][:12]) == ("top_logprobs", "top_logprobs")


def test_top_logprobs_without_logprobs_are_refused() -> None:
    assert error_of(chat(front(), top_logprobs=2), 400)["param"] == "top_logprobs"


def test_max_tokens_has_two_names() -> None:
    for body in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        client = FakeClient()
        chat(front(client), **body)
        assert client.submitted[0].params.max_tokens == 3
    error = error_of(chat(front(), max_tokens=3, max_completion_tokens=4), 400)
    assert error["param"] == "max_completion_tokens"


def test_a_chat_goes_on_until_the_context_is_full_unless_limited() -> None:
    client = FakeClient()
    chat(front(client))
    assert client.submitted[0].params.max_tokens is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "a king", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ("Hi", "messages"),
    ],
)
def test_messages_that_cannot_be_used_are_refused_with_their_place(messages: Any, param: str) -> None:
    error = error_of(chat(front(), messages=messages), 400)
    assert error["param"] == param


def test_the_part_that_is_not_text_is_named() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    assert "image_url" in error_of(chat(front(), messages=[{"role": "user", "content": parts}]), 400)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {}), ("modalities", ["audio"]), ("chat_template", TEMPLATE),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    error = error_of(chat(front(), **{name: value}), 400)
    assert error["param"] == name
    assert error["code"] == "unsupported_field"


def test_empty_tool_fields_are_accepted() -> None:
    assert chat(front(), tools=[], tool_choice="none", functions=None, modalities=["text"]).status_code == 200


def test_a_model_without_a_tokenizer_refuses_chats() -> None:
    assert "no tokenizer" in error_of(chat(front(without_tokenizer=True)), 400)["message"]


def test_a_long_chat_is_worked_on_in_a_thread_and_answered_all_the_same() -> None:
    long = "a b " * 3000
    app = front()
    error = error_of(chat(app, messages=[{"role": "user", "content": long}]), 400)
    assert error["code"] == "context_length_exceeded"


# ---- grammars ------------------------------------------------------------------------------------------------------


class Grammars:
    """Takes every grammar but one."""

    def __init__(self) -> None:
        self.seen: list[GrammarSpec] = []
        self.threads: list[int] = []

    def check(self, spec: GrammarSpec) -> None:
        self.threads.append(threading.get_ident())
        self.seen.append(spec)
        if "bad" in spec.text:
            raise BadGrammar("this grammar is bad; write another")
        if "slow" in spec.text:
            raise GrammarTimeout("this grammar is slow; try again soon", retry_after_s=2.0)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            GrammarSpec("json", json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json", json.dumps(SCHEMA, separators=(",", ":")))),
        ({"structured_outputs": {"json": '{"type":"object"}'}}, GrammarSpec("json", '{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "start: x"}}, GrammarSpec("grammar", "start: x")),
    ],
)
def test_every_way_to_ask_for_a_shape_becomes_a_grammar(body: dict[str, Any], spec: GrammarSpec | None) -> None:
    grammars, client = Grammars(), FakeClient()
    app = front(client, grammars=grammars)
    assert chat(app, **body).status_code == 200
    assert complete(app, prompt="x", **body).status_code == 200
    assert [job.grammar for job in client.submitted] == [spec, spec]
    assert grammars.seen == ([] if spec is None else [spec, spec])
    assert threading.get_ident() not in grammars.threads  # a compilation must not stop the event loop


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"xml": "a"}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
        {"structured_outputs": {"regex": "a"}, "min_tokens": 2},
    ],
)
def test_shapes_that_cannot_be_are_refused(body: dict[str, Any]) -> None:
    error_of(chat(front(grammars=Grammars()), **body), 400)


def test_a_grammar_that_cannot_be_compiled_is_a_400_with_its_reason() -> None:
    error = error_of(chat(front(grammars=Grammars()), structured_outputs={"regex": "bad("}), 400)
    assert error["param"] == "structured_outputs.regex"
    assert "write another" in error["message"]


def test_a_grammar_that_takes_too_long_is_a_503_that_says_when_to_retry() -> None:
    answer = chat(front(grammars=Grammars()), structured_outputs={"regex": "slow"})
    assert error_of(answer, 503)["code"] == "grammar_timeout"
    assert answer.headers["retry-after"] == "2"


def test_with_a_grammar_the_end_token_always_ends() -> None:
    client = FakeClient()
    chat(front(client, grammars=Grammars()), structured_outputs={"regex": "a"}, stop_token_ids=[9])
    assert client.submitted[0].stop_ids == {9, EOS}


def test_a_body_nested_too_deeply_is_a_400() -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"metadata":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    answer = ask(front(), "POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert "nested" in error_of(answer, 400)["message"]
