"""Tools of a chat: fields, choices, the prompt, the grammar that is asked for, and the answer, whole and streamed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from shoal.core.job import GrammarSpec, Job
from shoal.errors import BadGrammar
from shoal.server.app import Front
from tests.server.fake_client import INFO, FakeClient
from tests.server.fronts import EOS, ask, error_of, events, front, tokenizer
from tests.server.fronts import chat as chat_with

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


class Recorded:
    """Compiles nothing, but keeps what it is asked to."""

    def __init__(self, bad: str = "") -> None:
        self.specs: list[GrammarSpec] = []
        self.bad = bad

    def check(self, spec: GrammarSpec) -> None:
        self.specs.append(spec)
        if self.bad and self.bad in spec.text:
            raise BadGrammar(f"the schema cannot be used: {self.bad}; change it")


def says(text: str, ends: bool = True) -> FakeClient:
    ids = tokenizer().encode(text, add_special=False)
    client = FakeClient(lambda job, sample: [*ids, EOS] if ends else ids)
    client._info = replace(INFO, max_model_len=8192)  # the tiny tokenizer makes many tokens of a schema
    return client


def chat(app: Front, **body: Any) -> httpx.Response:
    return chat_with(app, **{"max_tokens": 1000, **body})


def made(text: str = CALL, ends: bool = True, grammars: Any = None) -> tuple[Front, FakeClient]:
    client = says(text, ends)
    return front(client, grammars=grammars or Recorded()), client


def start_of(job: Job) -> str:
    """The first line of the grammar."""
    assert job.grammar is not None
    return str(json.loads(job.grammar.text)["grammars"][0]["lark_grammar"].splitlines()[0])


def test_a_call_is_answered_as_openai_does() -> None:
    app, client = made(CALL + SECOND)
    answer = chat(app, tools=TOOLS).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    prompt = tokenizer().decode(client.submitted[0].prompt)
    assert "Of a city." in prompt
    assert "TEXT" in start_of(client.submitted[0]), "text may come first"


def test_text_before_a_call_is_content_and_text_alone_ends_as_ever() -> None:
    message = chat(made(f"Wait.\n{CALL}")[0], tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] == "Wait."
    assert len(message["tool_calls"]) == 1
    choice = chat(made("Hello")[0], tools=TOOLS).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}])
def test_streamed_pieces_are_the_whole(more: dict[str, Any]) -> None:
    app, _ = made(f"Wait. {CALL}{SECOND}")
    streamed = events(chat(app, tools=TOOLS, stream=True, **more))
    content, calls = "", dict[int, dict[str, str]]()
    for event in streamed:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["type"] == "function"
                assert piece["index"] not in calls, "an id comes once"
                calls[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
            calls[piece["index"]]["arguments"] += piece["function"].get("arguments", "")
    assert content == "Wait."
    assert calls == {
        0: {"name": "weather", "arguments": '{"city": "Paris"}'},
        1: {"name": "now", "arguments": "{}"},
    }
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert sum(bool(event["choices"][0]["delta"].get("tool_calls")) for event in streamed) > 4, "arguments are streamed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_ends_as_length_with_what_it_has(stream: bool) -> None:
    app, _ = made(CALL[: CALL.index("Paris") + 3], ends=False)
    answer = chat(app, tools=TOOLS, stream=stream)
    if stream:
        pieces = [one["choices"][0] for one in events(answer)]
        calls = [call for one in pieces for call in one["delta"].get("tool_calls", ())]
        assert "".join(call["function"].get("arguments", "") for call in calls) == '{"city": "Par'
        assert pieces[-1]["finish_reason"] == "length"
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'
        assert choice["finish_reason"] == "length"


def test_required_and_named_begin_with_a_call() -> None:
    for choice, names, reason in (
        ("required", {"weather", "now"}, "tool_calls"),
        (NAMED, {"weather"}, "stop"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, {"weather"}, "tool_calls"),
    ):
        app, client = made()
        answer = chat(app, tools=TOOLS, tool_choice=choice).json()["choices"][0]
        assert answer["finish_reason"] == reason
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
        job = client.submitted[0]
        assert "TEXT" not in start_of(job)
        assert job.grammar is not None
        rules = json.loads(job.grammar.text)["grammars"][0]["lark_grammar"]
        assert {name for name in ("weather", "now") if f'"{name}\\",' in rules} == names


def test_none_hides_the_tools_and_constrains_nothing() -> None:
    app, client = made("Hello")
    assert chat(app, tools=TOOLS, tool_choice="none").status_code == 200
    assert client.submitted[0].grammar is None
    assert "weather" not in tokenizer().decode(client.submitted[0].prompt)


def test_one_call_at_a_time_where_asked() -> None:
    app, client = made(CALL)
    chat(app, tools=TOOLS, parallel_tool_calls=False)
    many, other = made(CALL)
    chat(many, tools=TOOLS)
    one_text, many_text = client.submitted[0].grammar, other.submitted[0].grammar
    assert one_text is not None
    assert many_text is not None
    assert ")*" in start_of(other.submitted[0]).removeprefix("start: (TEXT (<[395]> TEXT)*")
    assert len(one_text.text) < len(many_text.text)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_answered_in_the_older_form(stream: bool) -> None:
    functions = [tool["function"] for tool in TOOLS]
    for choice, reason in ((None, "function_call"), ("auto", "function_call"), ({"name": "weather"}, "stop")):
        app, _ = made()
        answer = chat(app, functions=functions, function_call=choice, stream=stream)
        if stream:
            pieces = [one["choices"][0] for one in events(answer)]
            called = [one["delta"]["function_call"] for one in pieces if "function_call" in one["delta"]]
            assert called[0]["name"] == "weather"
            assert "".join(one.get("arguments", "") for one in called) == '{"city": "Paris"}'
            assert pieces[-1]["finish_reason"] == reason
        else:
            (one,) = answer.json()["choices"]
            assert one["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
            assert "tool_calls" not in one["message"]
            assert one["finish_reason"] == reason


def history(arguments: Any = '{"city": "Paris"}') -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18 degrees"}]},
    ]


def test_calls_and_results_come_back_in_the_history() -> None:
    app, client = made("Yes.")
    assert chat(app, messages=history(), tools=TOOLS).status_code == 200
    prompt = tokenizer().decode(client.submitted[0].prompt)
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert "18 degrees" in prompt
    older = history()
    older[1] = {"role": "assistant", "content": None, "function_call": older[1]["tool_calls"][0]["function"]}
    older[2] = {"role": "function", "name": "weather", "content": "18 degrees"}
    app, again = made("Yes.")
    assert chat(app, messages=older, tools=TOOLS).status_code == 200
    assert tokenizer().decode(again.submitted[0].prompt) == prompt


def test_arguments_that_were_cut_can_be_sent_back_too() -> None:
    for arguments in ('{"city": "Par', "", "[1]", {"city": "Paris"}):
        app, _ = made("Yes.")
        assert chat(app, messages=history(arguments), tools=TOOLS).status_code == 200
    for arguments in ("[" * 200 + "]" * 200, '{"a": ' + "[1," * 70_000):
        answer = chat(made("Yes.")[0], messages=history(arguments), tools=TOOLS)
        assert answer.status_code in (200, 400)
    many = '{"a": [' + "1," * 70_000 + "1]}"
    error = error_of(chat(made("Yes.")[0], messages=history(many), tools=TOOLS), 400)
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_template_that_knows_tools_is_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    app, client = made()
    renderer = tokenizer().renderer
    monkeypatch.setattr(app.preparer, "templates", Spoken(renderer, shown := list[Any]()), raising=True)
    from shoal.text.tools.formats import FORMATS

    monkeypatch.setattr(app.preparer, "tool_format", FORMATS["hermes"])
    assert chat(app, tools=TOOLS, messages=history()[:2]).status_code == 200
    messages, variables = shown[0]
    assert variables["tools"][0]["function"]["parameters"] == CITY
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert messages[1]["content"] is None
    assert client.submitted


class Spoken:
    def __init__(self, renderer: Any, shown: list[Any]) -> None:
        self.renderer, self.shown = renderer, shown

    async def render(self, messages: Sequence[Any], add_generation_prompt: bool, variables: Any) -> Any:
        self.shown.append((messages, variables))
        return self.renderer.render([{"role": "user", "content": "Hi"}], add_generation_prompt, {})


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="")}, "tools[0].function.name"),
        ({"tools": function() + function()}, "tools"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"properties": []})}, "tools[0].function.parameters"),
        ({"tools": function(description="x" * 300_000)}, "tools"),
        ({"tools": function() * 300}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
        ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "functions[0].parameters"),
        ({"tools": TOOLS, "tool_choice": "auto", "function_call": "auto"}, "function_call"),
        ({"tools": TOOLS, "min_tokens": 3}, "min_tokens"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    app, client = made()
    error = error_of(chat(app, **body), 400)
    assert error["param"] == param
    assert not client.submitted


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"properties": {"x": deep}}
    error = error_of(chat(made()[0], tools=function(parameters=deep)), 400)
    assert error["param"] == "tools[0].function.parameters"


def test_the_tool_whose_schema_cannot_be_compiled_is_named() -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"zzz": {}}}}}]
    error = error_of(chat(made(grammars=Recorded(bad="zzz"))[0], tools=tools), 400)
    assert error["param"] == "tools[2].function.parameters"
    assert "'odd'" in error["message"]


def test_keywords_that_cannot_be_checked_are_named_in_a_header_unless_strict() -> None:
    schema = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
    answer = chat(made("Hi")[0], tools=function(parameters=schema))
    assert "uniqueItems" in answer.headers["x-shoal-warning"]
    recorded = Recorded()
    answer = chat(made("Hi", grammars=recorded)[0], tools=function(parameters=schema, strict=True))
    assert "x-shoal-warning" not in answer.headers
    assert "uniqueItems" in recorded.specs[0].text


def test_a_schema_of_the_answer_and_tools_go_together() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    app, client = made()
    assert chat(app, tools=TOOLS, response_format=format).status_code == 200
    assert "@answer" in start_of(client.submitted[0])
    app, client = made()
    assert chat(app, tools=TOOLS, tool_choice="required", response_format=format).status_code == 200
    assert "@answer" not in start_of(client.submitted[0])


def test_several_samples_have_calls_of_their_own() -> None:
    choices = chat(made()[0], tools=TOOLS, n=3).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_completions_say_where_tools_belong() -> None:
    error = error_of(ask(front(), "POST", "/v1/completions", json={"prompt": "x", "tools": []}), 400)
    assert "/v1/chat/completions" in error["message"]
