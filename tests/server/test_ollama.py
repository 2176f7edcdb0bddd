"""Ollama's API: chats and prompts as lines of JSON, its other endpoints, and its own client where it is installed."""

import json
from typing import Any

import httpx
import pytest

from shoal.server.app import Front
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, ask, front, listening, run, tokenizer
from tests.server.test_tools import CALL, SECOND, TOOLS, Recorded, says

USER = [{"role": "user", "content": "Warm?"}]
LIMIT = {"num_predict": 500}


def made(text: str = "Yes.", ends: bool = True, **settings: Any) -> tuple[Front, FakeClient]:
    client = says(text, ends)
    return front(client, grammars=Recorded(), **settings), client


def chat(app: Front, **body: Any) -> httpx.Response:
    return ask(app, "POST", "/api/chat", json={"messages": USER, "options": LIMIT, **body})


def generate(app: Front, **body: Any) -> httpx.Response:
    return ask(app, "POST", "/api/generate", json={"prompt": "Warm?", "options": LIMIT, **body})


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def prompt_of(client: FakeClient) -> str:
    return tokenizer().decode(client.submitted[-1].prompt)


def test_a_chat_is_streamed_unless_it_is_not() -> None:
    app, client = made()
    found = lines(chat(app))
    assert "".join(one["message"]["content"] for one in found) == "Yes."
    assert found[-1]["done_reason"] == "stop"
    assert found[-1]["prompt_eval_count"] == len(client.submitted[0].prompt)
    whole = chat(made()[0], stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Yes."}
    assert whole["done"] is True
    assert whole["eval_count"] == found[-1]["eval_count"]
    assert whole["created_at"].endswith("Z")
    assert chat(made("Yes.", ends=False)[0], stream=False).json()["done_reason"] == "length"


def test_options_become_sampling_parameters() -> None:
    app, client = made()
    options = {"temperature": 0.5, "top_k": 5, "repeat_penalty": 1.1, "stop": ["z"], "num_predict": -1, "num_ctx": 4096}
    client.script = lambda job, sample: [EOS]
    assert chat(app, options=options, keep_alive="5m").status_code == 200
    params = client.submitted[0].params
    assert (params.temperature, params.top_k, params.repetition_penalty, params.stop) == (0.5, 5, 1.1, ("z",))
    assert params.max_tokens is None


def test_calls_are_whole_and_results_come_back() -> None:
    found = lines(chat(made(f"Wait. {CALL}{SECOND}")[0], tools=TOOLS))
    calls = [call for one in found for call in one["message"].get("tool_calls", ())]
    assert calls == [
        {"function": {"name": "weather", "arguments": {"city": "Paris"}}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    assert "".join(one["message"]["content"] for one in found) == "Wait."
    whole = chat(made(CALL)[0], tools=TOOLS, stream=False).json()
    assert whole["message"]["tool_calls"] == calls[:1]
    app, client = made()
    history = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "content": "18 degrees", "tool_name": "weather"},
    ]
    assert chat(app, messages=history, tools=TOOLS, stream=False).status_code == 200
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt_of(client)
    assert "18 degrees" in prompt_of(client)


def test_reasoning_is_thinking() -> None:
    text = "<think>Hm</think>Yes."
    found = lines(chat(made(text, reasoning_format="think")[0]))
    assert "".join(one["message"].get("thinking", "") for one in found) == "Hm"
    assert "".join(one["message"]["content"] for one in found) == "Yes."
    whole = chat(made(text, reasoning_format="think")[0], think=False, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Yes."}


def test_formats_become_grammars() -> None:
    for format, kind in (("json", "json_object"), ({"type": "object"}, "json")):
        app, client = made("{}")
        assert chat(app, format=format, stream=False).json()["message"]["content"] == "{}"
        assert client.submitted[0].grammar is not None
        assert client.submitted[0].grammar.kind == kind
    app, client = made()
    assert chat(app, format="", stream=False).status_code == 200
    assert client.submitted[0].grammar is None


def test_a_prompt_goes_through_the_template_unless_it_is_raw() -> None:
    app, client = made()
    found = lines(generate(app, system="Be brief."))
    assert "".join(one["response"] for one in found) == "Yes."
    assert prompt_of(client) == "system: Be brief.\nuser: Warm?\nassistant: "
    assert generate(app, raw=True, stream=False).json()["response"] == "Yes."
    assert prompt_of(client) == "Warm?"
    assert generate(app, raw=True, system="x").status_code == 400


def test_models_can_be_listed_and_asked_about() -> None:
    app, _ = made(reasoning_format="think")
    names = [model["name"] for model in ask(app, "GET", "/api/tags").json()["models"]]
    assert names == ["tiny", "other-name"]
    assert ask(app, "GET", "/api/version").json()["version"]
    shown = ask(app, "POST", "/api/show", json={"model": "tiny:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["shoal.context_length"] == 8192
    assert chat(app, model="tiny:latest", stream=False).status_code == 200
    error = chat(app, model="llama3")
    assert error.status_code == 404
    assert "no model named 'llama3'" in error.json()["error"]
    assert ask(app, "POST", "/api/show", json={"model": "llama3"}).json().keys() == {"error"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "images"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"format": "yaml"}, "format"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_errors_have_ollamas_shape(body: dict[str, Any], words: str) -> None:
    answer = chat(made()[0], **body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


def test_ollamas_own_client() -> None:
    ollama = pytest.importorskip("ollama")

    async def work() -> None:
        app, _ = made(f"Wait. {CALL}")
        async with listening(app) as port:
            client = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
            asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": TOOLS, "options": LIMIT}
            whole = await client.chat(**asked)
            assert whole.message.tool_calls[0].function.arguments == {"city": "Paris"}
            pieces = [piece async for piece in await client.chat(**asked, stream=True)]
            assert "".join(piece.message.content for piece in pieces) == "Wait."
            assert pieces[-1].done
            assert (await client.list()).models[0].model == "tiny"
            assert "tools" in (await client.show("tiny")).capabilities
            answer = await client.generate(model="tiny", prompt="Warm?", options=LIMIT)
            assert answer.response.startswith("Wait.")
            with pytest.raises(ollama.ResponseError, match="no model named"):
                await client.chat(model="llama3", messages=USER)
            await client._client.aclose()

    run(work)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_json_need_not_be_declared_except_by_a_page(kind: str | None) -> None:
    """Ollama's docs use `curl -d`, which declares a form; browsers mark what pages of other sites send."""
    body = json.dumps({"prompt": "Warm?", "options": LIMIT, "keep_alive": "5m"}).encode()
    headers = {"content-type": kind} if kind else {}
    answer = ask(made()[0], "POST", "/api/generate", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-shoal-warning"] == "ignored: keep_alive"
    for name, value in (("origin", "https://page.example"), ("sec-fetch-site", "cross-site")):
        assert (
            ask(made()[0], "POST", "/api/generate", content=body, headers={**headers, name: value}).status_code == 415
        )
    assert ask(made()[0], "POST", "/v1/completions", content=b"{}", headers=headers).status_code == 415
