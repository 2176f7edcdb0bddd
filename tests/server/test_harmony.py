"""A model with harmony's channels behind each API: reasoning, content and calls are apart, and come back so."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shoal.server.app import Front
from shoal.server.settings import ServerSettings
from shoal.text.grammar import Grammars
from shoal.text.tokenizer import Tokenizer
from tests.harmony_model import TEMPLATE, ends_of, with_marks
from tests.server.fake_client import INFO, FakeClient
from tests.server.fronts import ask, events
from tests.server.test_tools import CITY
from tests.text import tiny

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
THINKS = "<|channel|>analysis<|message|>Well, \n hm<|end|><|start|>assistant"
FINAL = f"{THINKS}<|channel|>final<|message|>It is noon.<|return|>"
CALL = f'{THINKS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city":"Paris"}}<|call|>'
USER = [{"role": "user", "content": "Warm?"}]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(with_marks(tiny.byte_level().backend), special=tiny.byte_level().special, chat_template=TEMPLATE)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), tokenizer().vocab_size, ends_of(tokenizer().backend))


def made(text: str) -> tuple[Front, FakeClient]:
    ids = tokenizer().encode(text, add_special=False)
    client = FakeClient(lambda job, sample: ids)
    client._info = replace(INFO, max_model_len=8192, vocab_size=tokenizer().vocab_size)
    settings = ServerSettings(models=("tiny",), host="front")
    return Front(settings, client, tokenizer(), grammars(), ends_of(tokenizer().backend), {}), client


def chat(app: Front, **body: Any) -> Any:
    sent = {"messages": USER, "max_tokens": 500, **body}
    return ask(app, "POST", "/v1/chat/completions", json=sent)


def prompt_of(client: FakeClient) -> str:
    return tokenizer().decode(client.submitted[-1].prompt, skip_special=False)


def test_reasoning_and_content_are_apart() -> None:
    app, client = made(FINAL)
    (choice,) = chat(app).json()["choices"]
    assert choice["message"]["reasoning_content"] == "Well, \n hm"
    assert choice["message"]["content"] == "It is noon."
    assert choice["finish_reason"] == "stop"
    assert client.submitted[0].grammar is None
    assert prompt_of(client).endswith("<|start|>user<|message|>Warm?<|end|><|start|>assistant")
    hidden = chat(app, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    assert hidden["content"] == "It is noon."
    assert "Reasoning: low" in (chat(app, reasoning_effort="low"), prompt_of(client))[1]


def test_a_call_is_answered_as_openai_does() -> None:
    app, client = made(CALL)
    (choice,) = chat(app, tools=TOOLS).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Paris"}'}
    assert choice["message"]["reasoning_content"] == "Well, \n hm"
    assert choice["finish_reason"] == "tool_calls"
    assert '"name": "weather"' in prompt_of(client)
    history = [*USER, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "18"}]
    then = chat(app, messages=history, tools=TOOLS)
    assert then.status_code == 200, then.text
    assert (
        "<|start|>assistant<|channel|>analysis<|message|>Well, \n hm<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Paris"}<|call|><|start|>functions to=assistant'
        "<|channel|>commentary<|message|>18<|end|><|start|>assistant"
    ) in prompt_of(client)


@pytest.mark.parametrize("text", [FINAL, CALL])
def test_a_stream_brings_the_same(text: str) -> None:
    app, _ = made(text)
    whole = chat(app, tools=TOOLS).json()["choices"][0]["message"]
    deltas = [one["choices"][0]["delta"] for one in events(chat(app, tools=TOOLS, stream=True))]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (whole["content"] or "")
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(piece.get("arguments") or "" for piece in pieces)
    assert arguments == "".join(call["function"]["arguments"] for call in whole.get("tool_calls") or ())
    assert sum(1 for delta in deltas if delta.get("reasoning_content")) > 1, "as it comes"


def test_items_of_a_response() -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    body = {"input": "Warm?", "tools": tools, "instructions": "Be brief.", "max_output_tokens": 500}
    app, client = made(CALL)
    reasoning, call = ask(app, "POST", "/v1/responses", json=body).json()["output"]
    assert reasoning["content"][0]["text"] == "Well, \n hm"
    assert call["arguments"] == '{"city":"Paris"}'
    assert "<|start|>system<|message|>Be brief." in prompt_of(client)


def test_a_format_holds_the_final_channel_alone() -> None:
    app, client = made(f'{THINKS}<|channel|>final<|message|>{{"city": "Rome"}}<|return|>')
    format = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    message = chat(app, response_format=format).json()["choices"][0]["message"]
    assert json.loads(message["content"]) == {"city": "Rome"}
    assert message["reasoning_content"] == "Well, \n hm"
    grammar = client.submitted[0].grammar
    assert grammar is not None
    assert "@answer" in grammar.text


def test_plain_completions_have_no_channels() -> None:
    app, client = made("<|channel|>final<|message|>x")
    answer = ask(app, "POST", "/v1/completions", json={"prompt": "Warm?", "max_tokens": 50})
    assert answer.json()["choices"][0]["text"] == "finalx"
    assert client.submitted[0].params.skip_special_tokens
