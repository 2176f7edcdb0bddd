"""Checks of the fields that decide what an answer looks like: grammars, tools, reasoning."""

import json
import re
from typing import Any

from tests.fields.registry import BOTH, CHAT, COMPLETIONS, COUNT, MESSAGES, RESPONSES, checks
from tests.fields.server import OPEN, FieldServer, encoded, text_of

ENUM = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
FISH, DOG = ({"name": name, "description": f"A {name}.", "parameters": ENUM} for name in ("fish", "dog"))
LONG = {"max_tokens": 200}


def check_json(text: str) -> None:
    assert json.loads(text) in ({"x": 1}, {"x": 2}), text


@checks(BOTH, "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "response_format")
@checks(BOTH, "regex", "ebnf")
@checks(COMPLETIONS, "json_schema")
def constrained(server: FieldServer, path: str) -> None:
    fields: list[tuple[str, Any, str]] = [
        ("guided_json", ENUM, ""), ("guided_regex", "[ab]{6}", "[ab]{6}"), ("guided_choice", ["ja", "nein"], "ja|nein"),
        ("guided_grammar", 'start: /[cd]{4}/', "[cd]{4}"), ("regex", "[ab]{6}", "[ab]{6}"),
        ("ebnf", 'root ::= [ef] [ef] [ef]', "[ef]{3}"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": ENUM}}, ""),
        ("structured_outputs", {"json": ENUM}, ""), ("structured_outputs", {"choice": ["a", "b"]}, "a|b"),
        ("structured_outputs", {"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ("structured_outputs", {"grammar": 'root ::= "x" "y"'}, "xy"),
    ]  # fmt: skip
    if path == COMPLETIONS:
        fields.append(("json_schema", json.dumps(ENUM), ""))
    for name, value, pattern in fields:
        text = server.text(path, **LONG, **{name: value})
        if pattern:
            assert re.fullmatch(pattern, text), (name, text)
        else:
            check_json(text)
    assert server.text(path, **LONG, response_format={"type": "json_object"}).startswith("{")


@checks(RESPONSES, "text")
@checks(MESSAGES, "output_config")
def text_of_a_format(server: FieldServer, path: str) -> None:
    form = {"type": "json_schema", "schema": ENUM}
    body: dict[str, Any] = {"output_config": {"format": form}, "max_tokens": 200}
    if path == RESPONSES:
        body = {"text": {"format": {**form, "name": "x"}}, "max_output_tokens": 200}
    check_json(server.text(path, **body))
    if path == MESSAGES:
        plain, more = (used(server.ask(path, output_config=one, max_tokens=1)) for one in ({}, {"effort": "low"}))
        assert more == plain + len(encoded("[low]")), "the template writes it"


# ---- tools


def tool_body(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"tools": [{"type": "function", "function": one} for one in (FISH, DOG)], "max_tokens": 400}
    if path == RESPONSES:
        return {"tools": [{"type": "function", **one} for one in (FISH, DOG)], "max_output_tokens": 400}
    return {"tools": [{"name": one["name"], "input_schema": ENUM} for one in (FISH, DOG)], "max_tokens": 400}


def calls_of(path: str, answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, arguments) of every call."""
    if path == CHAT:
        calls = [one["function"] for one in answer["choices"][0]["message"].get("tool_calls") or ()]
        return [(one["name"], json.loads(one["arguments"])) for one in calls]
    if path == RESPONSES:
        calls = [one for one in answer["output"] if one["type"] == "function_call"]
        return [(one["name"], json.loads(one["arguments"])) for one in calls]
    return [(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]


def used(answer: dict[str, Any]) -> int:
    """The tokens of the prompt."""
    counts = answer["usage"]
    return int(counts.get("prompt_tokens", 0) or counts["input_tokens"] + counts.get("cache_read_input_tokens", 0))


@checks((CHAT, RESPONSES, MESSAGES), "tools", "tool_choice")
@checks((CHAT, RESPONSES), "parallel_tool_calls")
def tools(server: FieldServer, path: str) -> None:
    body = tool_body(path)
    required, named, none = {
        CHAT: ("required", {"type": "function", "function": {"name": "dog"}}, "none"),
        RESPONSES: ("required", {"type": "function", "name": "dog"}, "none"),
        MESSAGES: ({"type": "any"}, {"type": "tool", "name": "dog"}, {"type": "none"}),
    }[path]
    one = {} if path == MESSAGES else {"parallel_tool_calls": False}
    if path == MESSAGES:
        required["disable_parallel_tool_use"] = named["disable_parallel_tool_use"] = True  # type: ignore[index]
    ((name, arguments),) = calls_of(path, server.ask(path, **body, **one, tool_choice=required))
    assert name in ("fish", "dog")
    check_json(json.dumps(arguments))
    ((name, _),) = calls_of(path, server.ask(path, **body, **one, tool_choice=named))
    assert name == "dog"
    free = server.ask(path, **body, tool_choice=none)
    assert not calls_of(path, free)
    shown = server.ask(path, **body)
    assert used(shown) > used(free) + 50, "the model sees the tools unless none may be called"


@checks(COUNT, "tools", "tool_choice")
def tools_are_counted(server: FieldServer, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    plain = server.ask(path, **body)["input_tokens"]
    tools = tool_body(MESSAGES)["tools"]
    assert server.ask(path, **body, tools=tools)["input_tokens"] > plain + 50
    assert server.ask(path, **body, tools=tools, tool_choice={"type": "none"})["input_tokens"] == plain


# ---- reasoning


@checks(CHAT, "reasoning_effort", "include_reasoning", "thinking_token_budget")
def reasoning_of_a_chat(server: FieldServer, path: str) -> None:
    assert server.prompt(path, reasoning_effort="low").endswith("[low]<|assistant|><think>")
    assert server.prompt(path, reasoning_effort="none").endswith(f"[none]{OPEN}")
    message = server.choice(path, reasoning_effort="low")["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] != ""
    hidden = server.choice(path, reasoning_effort="low", include_reasoning=False)["message"]
    assert "reasoning" not in hidden
    held = server.choice(path, reasoning_effort="low", thinking_token_budget=4, max_tokens=40, seed=1)
    assert held["message"]["content"], "the reasoning was closed, and an answer follows"
    closed = server.choice(path, reasoning_effort="low", thinking_token_budget=0, max_tokens=40, seed=1)["message"]
    assert not closed.get("reasoning")


@checks(RESPONSES, "reasoning")
def reasoning_of_a_response(server: FieldServer, path: str) -> None:
    (item,) = server.ask(path, reasoning={"effort": "low"})["output"]
    assert item["type"] == "reasoning"
    assert item["content"][0]["text"]
    answer = server.ask(path, reasoning={"effort": "none"})
    assert [one["type"] for one in answer["output"]] == ["message"]
    assert answer["reasoning"]["effort"] == "none"


@checks(MESSAGES, "thinking")
def thinking(server: FieldServer, path: str) -> None:
    shown, text = server.ask(path, thinking={"type": "enabled", "budget_tokens": 4}, max_tokens=40)["content"]
    assert (shown["type"], text["type"]) == ("thinking", "text")
    assert 0 < len(shown["thinking"]) < 60
    kinds = [one["type"] for one in server.ask(path, thinking={"type": "disabled"})["content"]]
    assert kinds == ["text"]


@checks(COUNT, "thinking")
def thinking_is_counted(server: FieldServer, path: str) -> None:
    """The template writes something else where the model is to reason."""
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    off = server.ask(path, **body, thinking={"type": "disabled"})["input_tokens"]
    assert server.ask(path, **body, thinking={"type": "enabled", "budget_tokens": 1024})["input_tokens"] != off


def streamed_text(path: str, events: list[dict[str, Any]]) -> str:
    if path == COMPLETIONS:
        return "".join(one["choices"][0]["text"] for one in events if one["choices"])
    if path == CHAT:
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
    if path == RESPONSES:
        return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    return "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta")


@checks((COMPLETIONS, CHAT, RESPONSES, MESSAGES), "stream")
def streamed(server: FieldServer, path: str) -> None:
    events = server.events(path, temperature=0)
    whole = server.ask(path, temperature=0)
    assert streamed_text(path, events) == text_of(whole)
    assert len(events) > 10, "in pieces"


@checks(BOTH, "stream_options")
def usage_of_a_stream(server: FieldServer, path: str) -> None:
    last = server.events(path, stream_options={"include_usage": True})[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    every = server.events(path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [one["usage"]["completion_tokens"] for one in every]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 24
    assert not any(one.get("usage") for one in server.events(path))
    assert server.refused(path, stream_options={"include_usage": True})["param"] == "stream_options"
