"""POST /v1/messages: Anthropic's fields, blocks, events and errors; and its own client, where it is installed."""

import json
from typing import Any

import httpx
import pytest

from shoal.server.app import Front
from tests.server.fake_client import FakeClient
from tests.server.fronts import ask, front, listening, run, tokenizer
from tests.server.test_tools import CALL, CITY, SECOND, Recorded, says

TOOLS = [
    {"name": "weather", "description": "Of a city.", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"name": "now"},
]
USER = [{"role": "user", "content": "Warm?"}]


def made(text: str = "Yes.", ends: bool = True, **settings: Any) -> tuple[Front, FakeClient]:
    client = says(text, ends)
    return front(client, grammars=Recorded(), **settings), client


def post(app: Front, path: str = "", headers: Any = None, **body: Any) -> httpx.Response:
    sent = {"messages": USER, "max_tokens": 500, **body}
    return ask(app, "POST", f"/v1/messages{path}", json=sent, headers=headers)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(client: FakeClient) -> str:
    return tokenizer().decode(client.submitted[-1].prompt)


def test_a_message_is_answered_as_anthropic_does() -> None:
    app, client = made()
    answer = post(app, system="Be brief.", stop_sequences=["z"], top_k=5, temperature=0.5).json()
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert usage["input_tokens"] == len(client.submitted[0].prompt)
    assert usage["output_tokens"] > 1
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Yes."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    params = client.submitted[0].params
    assert (params.stop, params.top_k, params.temperature, params.max_tokens) == (("z",), 5, 0.5, 500)
    assert prompt_of(client) == "system: Be brief.\nuser: Warm?\nassistant: "


def test_why_it_ended() -> None:
    assert post(made("Yes.")[0], stop_sequences=["s"]).json()["stop_reason"] == "stop_sequence"
    assert post(made("Yes.")[0], stop_sequences=["s"]).json()["stop_sequence"] == "s"
    assert post(made("Yes.", ends=False)[0]).json()["stop_reason"] == "max_tokens"
    assert post(made(CALL)[0], tools=TOOLS).json()["stop_reason"] == "tool_use"


def test_the_form_of_the_answer_is_constrained() -> None:
    form = {"type": "json_schema", "schema": CITY}
    for body in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        app, client = made('{"city": "Rome"}')
        assert post(app, **body).json()["content"] == [{"type": "text", "text": '{"city": "Rome"}'}]
        grammar = client.submitted[0].grammar
        assert grammar is not None
        assert json.loads(grammar.text) == CITY
    assert post(made()[0], output_config={"format": {"type": "xml", "schema": {}}}).status_code == 400


def test_a_thread_is_refused_so_that_clients_go_on_without() -> None:
    answer = post(made()[0], thread={"type": "create"})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert post(made()[0], thread=None, container=None, mcp_servers=[]).status_code == 200
    assert post(made()[0], container="one").status_code == 400


def test_what_has_no_effect_is_named() -> None:
    answer = post(made()[0], metadata={"user_id": "u"}, speed="fast", cache_control={"type": "ephemeral"})
    assert set(answer.headers["x-shoal-warning"].removeprefix("ignored: ").split(", ")) == {
        "metadata", "speed", "cache_control",
    }  # fmt: skip


def test_calls_are_blocks_and_results_come_back() -> None:
    answer = post(made(f"Wait. {CALL}{SECOND}")[0], tools=TOOLS).json()
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "Wait."}
    assert first.pop("id") != second.pop("id")
    assert first == {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    assert second == {"type": "tool_use", "name": "now", "input": {}}
    app, client = made()
    history = [
        *USER,
        {"role": "assistant", "content": [text, {**first, "id": "toolu_1"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "18 degrees"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "noon", "is_error": True},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    assert post(app, messages=history, tools=TOOLS).status_code == 200
    prompt = prompt_of(client)
    assert 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert prompt.index("18 degrees") < prompt.index("noon") < prompt.index("So?")


@pytest.mark.parametrize(
    ("choice", "free"), [({"type": "auto"}, True), ({"type": "any"}, False), ({"type": "tool", "name": "now"}, False)]
)
def test_choices(choice: Any, free: bool) -> None:
    app, client = made(CALL)
    assert post(app, tools=TOOLS, tool_choice=choice).json()["stop_reason"] == "tool_use"
    grammar = client.submitted[0].grammar
    assert grammar is not None
    start = json.loads(grammar.text)["grammars"][0]["lark_grammar"].splitlines()[0]
    assert ("TEXT" in start) == free
    app, client = made()
    assert post(app, tools=TOOLS, tool_choice={"type": "none"}).status_code == 200
    assert client.submitted[0].grammar is None


def test_a_stream_has_a_block_after_the_other() -> None:
    found = events(post(made(f"<think>Hm</think>Wait. {CALL}{SECOND}", reasoning_format="think")[0],
                        tools=TOOLS, stream=True, thinking={"type": "enabled", "budget_tokens": 1024}))  # fmt: skip
    assert [one["type"] for one in found][:2] == ["message_start", "content_block_start"]
    assert [one["type"] for one in found][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = [one for one in found if one["type"] == "content_block_start"]
    assert [one["content_block"]["type"] for one in started] == ["thinking", "text", "tool_use", "tool_use"]
    assert [one["index"] for one in started] == [0, 1, 2, 3]
    assert [one["index"] for one in found if one["type"] == "content_block_stop"] == [0, 1, 2, 3]
    said: dict[int, str] = {}
    for one in found:
        if one["type"] == "content_block_delta":
            (piece,) = (value for key, value in one["delta"].items() if key != "type")
            said[one["index"]] = said.get(one["index"], "") + piece
    assert said == {0: "Hm", 1: "Wait.", 2: '{"city": "Paris"}', 3: "{}"}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 10


def test_thinking_is_shown_and_limited_only_where_asked_for() -> None:
    text = "<think>Hm</think>Yes."
    app, client = made(text, reasoning_format="think")
    answer = post(app, thinking={"type": "enabled", "budget_tokens": 1024}).json()
    assert answer["content"][0] == {"type": "thinking", "thinking": "Hm", "signature": ""}
    grammar = client.submitted[0].grammar
    assert grammar is not None
    assert grammar.thinking is not None
    assert grammar.thinking.tokens == 1024
    for thinking in (None, {"type": "disabled"}):
        answer = post(made(text, reasoning_format="think")[0], thinking=thinking).json()
        assert answer["content"] == [{"type": "text", "text": "Yes."}]


def test_tokens_are_counted() -> None:
    app, client = made()
    post(app, system="Be brief.")
    body = {"messages": USER, "system": "Be brief."}
    answer = ask(app, "POST", "/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": len(client.submitted[0].prompt)}
    more = ask(app, "POST", "/v1/messages/count_tokens", json={**body, "tools": TOOLS}).json()
    assert more["input_tokens"] > answer.json()["input_tokens"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"tools": [{"name": "a b"}]}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "no"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_have_anthropics_shape(body: dict[str, Any], words: str) -> None:
    answer = post(made()[0], **body)
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"] or words in str(error["error"]["param"])
    assert post(made()[0], model="claude").json()["error"]["type"] == "not_found_error"


def test_a_key_may_come_in_anthropics_header() -> None:
    app, _ = made(api_keys=[("alice", "sk-12345678")])
    assert post(app).json()["error"]["type"] == "authentication_error"
    assert post(app, headers={"x-api-key": "sk-12345678"}).status_code == 200
    assert post(app, headers={"x-api-key": "sk-1234567"}).status_code == 401


def test_anthropics_own_client() -> None:
    anthropic = pytest.importorskip("anthropic")

    async def work() -> None:
        app, _ = made(f"Wait. {CALL}")
        async with listening(app) as port:
            url = f"http://127.0.0.1:{port}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                asked: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": USER, "tools": TOOLS}
                whole = await client.messages.create(**asked)
                assert whole.stop_reason == "tool_use"
                assert whole.content[1].input == {"city": "Paris"}
                async with client.messages.stream(**asked) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                    final = await stream.get_final_message()
                assert text == "Wait."
                assert final.content[1].input == {"city": "Paris"}
                assert final.usage.output_tokens == whole.usage.output_tokens
                counted = await client.messages.count_tokens(model="tiny", messages=USER)
                assert counted.input_tokens > 3
                with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                    await client.messages.create(**{**asked, "max_tokens": 0})
                with pytest.raises(anthropic.NotFoundError, match="no model named"):
                    await client.messages.create(**{**asked, "model": "claude"})

    run(work)
