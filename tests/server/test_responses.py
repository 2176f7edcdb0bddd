"""POST /v1/responses and what it stores: OpenAI's fields, items, events and errors."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.core.job import Ending
from shoal.keys.file import hashed
from shoal.server.app import Front
from shoal.server.response_store import SqliteStore, StoredResponse
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import ask, ask_async, error_of, front, run, tokenizer
from tests.server.test_tools import CALL, CITY, SECOND, Recorded, says

TOOLS = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": CITY, "strict": True},
    {"type": "function", "name": "now"},
]
PATH = "/v1/responses"


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "responses.sqlite", 2**20, 1000.0)


def made(text: str = "Yes.", ends: bool = True, **settings: Any) -> tuple[Front, FakeClient]:
    client = says(text, ends)
    return front(client, grammars=Recorded(), **settings), client


def post(app: Front, headers: Any = None, **body: Any) -> httpx.Response:
    return ask(app, "POST", PATH, json={"input": "Warm?", "max_output_tokens": 500, **body}, headers=headers)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers must be right."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, block in enumerate(answer.text.strip().split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def prompt_of(client: FakeClient) -> str:
    return tokenizer().decode(client.submitted[-1].prompt)


def test_a_text_is_answered_as_openai_does() -> None:
    app, client = made()
    answer = post(app, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, top_k=5, stop="z").json()
    assert answer.pop("id").startswith("resp_")
    (item,) = answer.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = answer.pop("usage")
    assert usage["input_tokens"] == len(client.submitted[0].prompt)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert answer.pop("created_at") <= answer.pop("completed_at")
    assert answer == {
        "object": "response", "status": "completed", "error": None, "incomplete_details": None, "model": "tiny",
        "store": False, "background": False, "instructions": "Be brief.", "max_output_tokens": 500,
        "max_tool_calls": None, "metadata": {"a": "b"}, "parallel_tool_calls": True, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "temperature": 0.5,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0,
        "truncation": "disabled",
    }  # fmt: skip
    params = client.submitted[0].params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.5, 5, ("z",), 500)
    assert prompt_of(client) == "system: Be brief.\nuser: Warm?\nassistant: "


def test_an_answer_that_was_cut_is_incomplete() -> None:
    answer = post(made(ends=False)[0]).json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    last = events(post(made(ends=False)[0], stream=True))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_calls_are_items_and_results_come_back() -> None:
    answer = post(made(f"Wait. {CALL}{SECOND}")[0], tools=TOOLS).json()
    text, first, second = answer["output"]
    assert text["content"][0]["text"] == "Wait."
    assert (first["name"], first["arguments"], first["status"]) == ("weather", '{"city": "Paris"}', "completed")
    assert (second["name"], second["arguments"]) == ("now", "{}")
    assert first["call_id"] != second["call_id"]
    assert len({text["id"], first["id"], second["id"]}) == 3
    assert answer["tools"] == TOOLS
    app, client = made()
    results = [
        {"type": "function_call_output", "call_id": first["call_id"], "output": "18 degrees"},
        {"type": "function_call_output", "call_id": second["call_id"], "output": [
            {"type": "input_text", "text": "noon"}
        ]},
    ]  # fmt: skip
    items = [{"role": "user", "content": "Warm?"}, text, first, second, *results]
    assert post(app, input=items, tools=TOOLS).status_code == 200
    prompt = prompt_of(client)
    assert 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert prompt.count("assistant: ") == 2, "text and calls are one message"
    assert prompt.index("18 degrees") < prompt.index("noon")


@pytest.mark.parametrize(
    ("choice", "free"),
    [
        ("auto", True),
        ("required", False),
        ({"type": "function", "name": "now"}, False),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, False),
    ],
)
def test_choices(choice: Any, free: bool) -> None:
    app, client = made(SECOND.strip())
    assert post(app, tools=TOOLS, tool_choice=choice).json()["tool_choice"] == choice
    grammar = client.submitted[0].grammar
    assert grammar is not None
    start = json.loads(grammar.text)["grammars"][0]["lark_grammar"].splitlines()[0]
    assert ("TEXT" in start) == free


def test_a_stream_has_its_events_in_order() -> None:
    text = f"<think>Hm</think>Wait. {CALL}{SECOND}"
    found = events(post(made(text, reasoning_format="think")[0], tools=TOOLS, stream=True))
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    once = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert once == [
        "created", "in_progress",
        *opened, "reasoning_text.delta", "reasoning_text.done", *closed,
        *opened, "output_text.delta", "output_text.done", *closed,
        *call, *call, "completed",
    ]  # fmt: skip
    final = found[-1]["response"]
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert final["output"] == done
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for number, item in enumerate(done):
        pieces = [one["delta"] for one in found if one.get("output_index") == number and "delta" in one]
        assert "".join(pieces) == (item.get("arguments") or item["content"][0]["text"])
    whole = post(made(text, reasoning_format="think")[0], tools=TOOLS).json()
    assert [shape(item) for item in whole["output"]] == [shape(item) for item in done]
    assert set(whole) == set(final)


def shape(item: Any) -> Any:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_an_empty_answer_is_an_empty_message() -> None:
    assert post(made("")[0]).json()["output"][0]["content"][0]["text"] == ""
    found = events(post(made("")[0], stream=True))
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_stream_that_fails_says_so() -> None:
    app, client = made()
    client.tick_s = None

    async def work() -> None:
        asked = asyncio.create_task(ask_async(app, "POST", PATH, json={"input": "Hm", "stream": True}))
        await until(lambda: bool(client.running))
        client.tick()
        await asyncio.sleep(0.01)
        client.failure = Ending("error", error="boom")
        client.tick()
        last = events(await asked)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert "boom" not in str(last)

    run(work)


def test_text_of_a_format() -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}}
    app, client = made('{"warm": true}')
    format = {"type": "json_schema", "name": "w", "schema": schema, "strict": True}
    answer = post(app, text={"format": format, "verbosity": "low"}).json()
    assert answer["text"] == {"format": format, "verbosity": "low"}
    grammar = client.submitted[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema
    assert error_of(post(app, text={"format": {"type": "json_schema"}}), 400)["param"] == "text.format.schema"


def test_reasoning_is_an_item_and_comes_back() -> None:
    app, client = made("<think>Hm, well</think>Yes.", reasoning_format="think")
    answer = post(app, reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"]).json()
    reasoning, message = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, well"}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert message["content"][0]["text"] == "Yes."
    again = [{"role": "user", "content": "Warm?"}, reasoning, message, {"role": "user", "content": "So?"}]
    assert post(app, input=again).status_code == 200
    assert prompt_of(client).endswith("user: Warm?\nassistant: Yes.\nuser: So?\nassistant: ")


def test_logprobs_come_where_they_are_included() -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = post(made()[0], **asked).json()
    known = answer["output"][0]["content"][0]["logprobs"]
    assert len(known) == answer["usage"]["output_tokens"]
    assert set(known[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(known[0]["top_logprobs"]) == 2
    streamed = [
        one["logprobs"] for one in events(post(made()[0], stream=True, **asked))
        if one["type"] == "response.output_text.delta"
    ]  # fmt: skip
    assert [one for pieces in streamed for one in pieces] == known[: len(streamed)]
    thinking = made("<think>Hm</think>Yes.", reasoning_format="think")[0]
    message = post(thinking, **asked).json()["output"][1]
    assert "".join(one["token"] for one in message["content"][0]["logprobs"]).startswith("Yes.")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(body: Any, param: str) -> None:
    assert error_of(post(made()[0], **body), 400)["param"] == param


# ---- the store ------------------------------------------------------------------------------------------------------


def test_a_response_is_stored_and_followed(store: SqliteStore) -> None:
    app, client = made(store=store)
    first = post(app, instructions="Be brief.").json()
    assert first["store"] is True
    assert ask(app, "GET", f"{PATH}/{first['id']}").json() == first
    second = post(app, input="And now?", previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(client) == "user: Warm?\nassistant: Yes.\nuser: And now?\nassistant: ", "without instructions"
    streamed = events(post(app, input="Hm?", previous_response_id=second["id"], stream=True))[-1]["response"]
    assert ask(app, "GET", f"{PATH}/{streamed['id']}").json() == streamed
    assert prompt_of(client).count("Yes.") == 2
    assert ask(app, "DELETE", f"{PATH}/{first['id']}").json() == {
        "id": first["id"], "object": "response", "deleted": True
    }  # fmt: skip
    assert error_of(ask(app, "GET", f"{PATH}/{first['id']}"), 404)["code"] == "response_not_found"
    assert error_of(ask(app, "DELETE", f"{PATH}/{first['id']}"), 404)
    broken = error_of(post(app, previous_response_id=second["id"]), 400)
    assert broken["code"] == "previous_response_not_found"
    assert first["id"] in broken["message"], "the one that is missing is named"


def test_calls_are_followed_by_their_results_alone(store: SqliteStore) -> None:
    app, client = made(CALL, store=store)
    called = post(app, tools=TOOLS).json()
    result = {"type": "function_call_output", "call_id": called["output"][0]["call_id"], "output": "18 degrees"}
    assert post(app, input=[result], previous_response_id=called["id"], tools=TOOLS).status_code == 200
    assert '"city": "Paris"' in prompt_of(client)
    assert "18 degrees" in prompt_of(client)


def test_items_can_be_referred_to(store: SqliteStore) -> None:
    app, client = made(store=store)
    (message,) = post(app).json()["output"]
    again = [
        {"role": "user", "content": "Warm?"},
        {"type": "item_reference", "id": message["id"]},
        {"id": message["id"]},
    ]
    assert post(app, input=again).status_code == 200
    assert prompt_of(client).count("assistant: Yes.") == 2
    listed = ask(app, "GET", f"{PATH}/{post(app, input=again[:2]).json()['id']}/input_items").json()
    assert listed["data"][0]["id"] == message["id"]


def test_what_is_not_to_be_stored_is_not(store: SqliteStore) -> None:
    app, _ = made(store=store)
    answer = post(app, store=False).json()
    assert answer["store"] is False
    assert error_of(ask(app, "GET", f"{PATH}/{answer['id']}"), 404)
    refused = post(made()[0], store=True)
    assert refused.json()["store"] is False
    assert "store" in refused.headers["x-shoal-warning"]


def test_input_items_come_in_pages(store: SqliteStore) -> None:
    app, _ = made(store=store)
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    id = post(app, input=items).json()["id"]

    def page(query: str = "") -> Any:
        return ask(app, "GET", f"{PATH}/{id}/input_items{query}").json()

    whole = page("?order=asc")
    assert [item["content"][0]["text"] for item in whole["data"]] == list("01234")
    assert whole["data"][0]["content"][0]["type"] == "input_text"
    assert [item["id"] for item in page()["data"]] == [item["id"] for item in whole["data"]][::-1]
    first = page("?limit=2&order=asc")
    assert first["has_more"] is True
    rest = page(f"?order=asc&after={first['last_id']}")
    assert [*first["data"], *rest["data"]] == whole["data"]
    assert rest["has_more"] is False
    for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=none", "?limit=" + "9" * 5000):
        assert error_of(ask(app, "GET", f"{PATH}/{id}/input_items{query}"), 400)


def test_no_key_sees_what_another_stored(store: SqliteStore) -> None:
    keys = hashed([("alice", "sk-alice-123"), ("bob", "sk-bob-4567")])
    app, _ = made(store=store, api_keys=keys)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-alice-123", "sk-bob-4567"))
    answer = post(app, alice).json()
    id, item = answer["id"], answer["output"][0]["id"]
    assert ask(app, "GET", f"{PATH}/{id}", headers=alice).status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert error_of(ask(app, method, f"{PATH}/{id}{path}", headers=bob), 404)
        assert error_of(ask(app, method, f"{PATH}/{id}{path}"), 401)
    assert error_of(post(app, bob, previous_response_id=id), 400)["code"] == "previous_response_not_found"
    assert error_of(post(app, bob, input=[{"type": "item_reference", "id": item}]), 400)
    assert ask(app, "GET", f"{PATH}/{id}", headers=alice).status_code == 200


def test_what_has_ended_cannot_be_cancelled(store: SqliteStore) -> None:
    app, _ = made(store=store)
    id = post(app).json()["id"]
    assert error_of(ask(app, "POST", f"{PATH}/{id}/cancel"), 400)["code"] == "not_cancellable"
    assert error_of(ask(app, "POST", f"{PATH}/no/cancel"), 404)
    assert error_of(ask(app, "GET", f"{PATH}/{id}?stream=true"), 400)["param"] == "stream"


# ---- the background


async def until_ended(app: Front, id: str) -> Any:
    while (found := (await ask_async(app, "GET", f"{PATH}/{id}")).json())["status"] == "in_progress":
        await asyncio.sleep(0.01)
    return found


def test_a_response_is_made_in_the_background(store: SqliteStore) -> None:
    app, client = made(store=store)
    client.tick_s = None

    async def work() -> None:
        body = {"input": "Warm?", "background": True, "max_output_tokens": 500}
        asked = asyncio.create_task(ask_async(app, "POST", PATH, json=body))
        id = ""
        while not id:  # the answer comes at once; the test's own transport waits for the end of the request, too
            await asyncio.sleep(0.01)
            id = next(iter(app.responses.running._running), "")
        begun = (await ask_async(app, "GET", f"{PATH}/{id}")).json()
        assert (begun["status"], begun["output"], begun["background"]) == ("in_progress", [], True)
        early = await ask_async(app, "POST", PATH, json={"input": "So?", "previous_response_id": id})
        assert error_of(early, 400)["param"] == "previous_response_id"
        while client.running:
            client.tick()
            await asyncio.sleep(0)
        found = await until_ended(app, id)
        assert found["status"] == "completed"
        assert found["output"][0]["content"][0]["text"] == "Yes."
        assert found["usage"]["output_tokens"] > 0
        assert (await asked).json()["status"] == "in_progress"
        again = await ask_async(app, "POST", f"{PATH}/{id}/cancel")
        assert again.json() == found, "what has ended stays as it is"
        assert not app.responses.running._running

    run(work)


@pytest.mark.parametrize("other", [False, True], ids=["here", "at another front"])
def test_what_runs_in_the_background_is_cancelled(store: SqliteStore, other: bool) -> None:
    app, client = made(store=store)
    second = SqliteStore(store.path, 2**20, 1000.0)
    asked_there = made(store=second)[0] if other else app
    client.tick_s = None

    async def work() -> None:
        body = {"input": "Warm?", "background": True}
        asked = asyncio.create_task(ask_async(app, "POST", PATH, json=body))
        while not app.responses.running._running:
            await asyncio.sleep(0.01)
        (id,) = app.responses.running._running
        done = (await ask_async(asked_there, "POST", f"{PATH}/{id}/cancel")).json()
        assert (done["status"], done["error"]) == ("cancelled", None)
        assert (await ask_async(app, "GET", f"{PATH}/{id}")).json() == done
        await asked
        assert not client.running
        assert len(client.aborted) == 1

    run(work)


def test_what_fails_in_the_background_says_so(store: SqliteStore) -> None:
    app, client = made(store=store)
    client.failure = Ending("error", error="boom")
    id = post(app, background=True).json()["id"]
    found = ask(app, "GET", f"{PATH}/{id}").json()
    assert found["status"] == "failed"
    assert found["error"]["code"] == "server_error"
    assert "boom" not in str(found)


def test_what_a_front_has_left_behind_has_failed(store: SqliteStore) -> None:
    app, _ = made(store=store)
    times = [time.time()]
    store._clock = lambda: times[0]
    lost = StoredResponse(
        "resp_lost", None, b"[]", b'{"id":"resp_lost","status":"in_progress","error":null}', ended=False
    )
    asyncio.run(store.put("", lost))
    assert ask(app, "GET", f"{PATH}/resp_lost").json()["status"] == "in_progress"
    times[0] += 60.0
    for _ in range(2):
        found = ask(app, "GET", f"{PATH}/resp_lost").json()
        assert found["status"] == "failed"
        assert "send the request again" in found["error"]["message"]


def test_a_client_that_leaves_stores_nothing(store: SqliteStore) -> None:
    app, client = made(store=store)
    client.tick_s = None

    async def work() -> None:
        asked = asyncio.create_task(ask_async(app, "POST", PATH, json={"input": "Hm"}))
        while not client.running:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    run(work)
    assert store._file is not None
    assert store._memory.used == 0, "nor is its input kept"


def test_the_oldest_turns_are_left_out_where_that_is_asked_for(store: SqliteStore) -> None:
    app, client = made(store=store)
    turns = [
        {"role": role, "content": f"{number} " + "long " * 300}
        for number in range(20)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "So?"}]
    assert error_of(post(app, input=items), 400)["code"] == "context_length_exceeded"
    assert post(app, input=items, instructions="Be brief.", truncation="auto").status_code == 200
    prompt = prompt_of(client)
    assert prompt.startswith("system: Be brief.\nuser: ")
    assert prompt.endswith("user: So?\nassistant: ")
    assert "user: 19 long" in prompt
    assert "user: 0 long" not in prompt
    too_long = [{"role": "user", "content": "long " * 9000}]
    assert error_of(post(app, input=too_long, truncation="auto"), 400)["code"] == "context_length_exceeded"


def test_tokens_are_counted(store: SqliteStore) -> None:
    app, client = made(store=store)
    first = post(app, tools=TOOLS).json()
    body = {"input": "Warm?", "tools": TOOLS}
    counted = ask(app, "POST", f"{PATH}/input_tokens", json=body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": first["usage"]["input_tokens"]}
    more = ask(app, "POST", f"{PATH}/input_tokens", json={**body, "previous_response_id": first["id"]}).json()
    assert more["input_tokens"] > counted["input_tokens"]
    assert len(client.submitted) == 1


def test_a_store_that_fails_costs_no_answer(store: SqliteStore, tmp_path: Path) -> None:
    app, _ = made(store=store)
    id = post(app).json()["id"]
    store.path.unlink()
    store.path.mkdir()
    answer = post(app)
    assert answer.json()["store"] is False
    assert answer.json()["output"][0]["content"][0]["text"] == "Yes."
    assert error_of(ask(app, "GET", f"{PATH}/{id}"), 503)
    store.path.rmdir()
    assert post(app).json()["store"] is True, "it is created again"
