"""/v1/responses of a real server, with OpenAI's own client and its agents, unchanged."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from tests.story_server.servers import SMALL, Server, running

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}


class Fish(BaseModel):
    swims: bool
    size: int


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The random model behind two fronts."""
    keys = ("--api-key", "a=sk-aaaaaaaa", "--api-key", "b=sk-bbbbbbbb")
    flags = (*keys, "--max-model-len", "4096", "--api-workers", "2")
    with running(tmp_path_factory.mktemp("responses"), tiny_model, *SMALL, *flags) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with server.openai("sk-aaaaaaaa") as made:
        yield made


def test_create_follow_retrieve_list_delete(client: OpenAI, server: Server) -> None:
    first = client.responses.create(model="tiny", input="Once upon a time", max_output_tokens=8, metadata={"k": "v"})
    assert first.status in ("completed", "incomplete")
    assert first.metadata == {"k": "v"}
    assert first.usage is not None
    assert first.usage.output_tokens <= 8
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4, "temperature": 0}
    items = [{"role": "user", "content": "Once upon a time"}, *first.output, {"role": "user", "content": "And?"}]
    whole = client.responses.create(input=items, **asked)  # type: ignore[arg-type]
    for _ in range(4):  # whichever front answers
        then = client.responses.create(input="And?", previous_response_id=first.id, **asked)
        assert then.usage is not None
        assert whole.usage is not None
        assert then.usage.input_tokens == whole.usage.input_tokens
        assert then.output_text == whole.output_text, "the same prompt"
        assert client.responses.retrieve(first.id).output_text == first.output_text
    listed = list(client.responses.input_items.list(whole.id, order="asc", limit=1))
    assert [item.type for item in listed] == ["message", *(item.type for item in first.output), "message"]
    with server.openai("sk-bbbbbbbb") as other:
        with pytest.raises(NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(BadRequestError, match="previous_response_id"):
            other.responses.create(input="And?", previous_response_id=first.id, **asked)
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(BadRequestError):
        client.responses.cancel(whole.id)


def test_streams(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Once upon", "max_output_tokens": 300, "seed": 3}
    with client.responses.stream(model="tiny", input="Once", text_format=Fish, max_output_tokens=300) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert isinstance(final.output_parsed, Fish)
    asked.pop("seed")
    raw = list(client.responses.create(stream=True, extra_body={"seed": 3, "stop": ["e"]}, **asked))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    whole = client.responses.create(extra_body={"seed": 3, "stop": ["e"]}, **asked)
    assert text == whole.output_text


def test_parse(client: OpenAI) -> None:
    done = client.responses.parse(model="tiny", input="A fish", text_format=Fish, max_output_tokens=300)
    assert isinstance(done.output_parsed, Fish)
    assert done.status == "completed"


def test_a_call_and_its_result(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "max_output_tokens": 200}
    called = client.responses.create(input="Warm?", tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = called.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    then = client.responses.create(input=[result], previous_response_id=called.id, tool_choice="none", **asked)
    assert then.output_text is not None
    with client.responses.stream(
        input="Warm?", tool_choice={"type": "function", "name": "get_weather"}, **asked
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert "".join(pieces) == streamed.arguments
    assert json.loads(streamed.arguments)["city"] in ("Paris", "Rome")


def test_a_real_model_answers_as_in_a_chat(smol_client: OpenAI, smol_name: str) -> None:
    asked: dict[str, Any] = {"model": smol_name, "temperature": 0}
    first = smol_client.responses.create(input="Name a fish.", instructions="Be brief.", max_output_tokens=12, **asked)
    assert first.output_text
    then = smol_client.responses.create(input="Another?", previous_response_id=first.id, max_output_tokens=12, **asked)
    messages: Any = [
        {"role": "user", "content": "Name a fish."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Another?"},
    ]
    chat = smol_client.chat.completions.create(messages=messages, max_tokens=12, **asked)
    assert then.output_text == chat.choices[0].message.content


def test_tokens_are_counted(client: OpenAI) -> None:
    made = client.responses.create(model="tiny", input="Hi there", max_output_tokens=1)
    counted = client.responses.input_tokens.count(model="tiny", input="Hi there")
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


def test_the_background(client: OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "background": True, "input": "Once"}
    begun = client.responses.create(**asked, max_output_tokens=20)
    assert (begun.status, begun.background) == ("in_progress", True)
    server.wait_for("its end", lambda: client.responses.retrieve(begun.id).status != "in_progress")
    done = client.responses.retrieve(begun.id)
    assert done.status in ("completed", "incomplete")
    assert done.usage is not None
    then = client.responses.create(model="tiny", input="And?", previous_response_id=begun.id, max_output_tokens=2)
    assert then.usage is not None
    assert then.usage.input_tokens > done.usage.input_tokens
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3000}
    digits = {"format": {"type": "json_schema", "name": "d", "schema": schema}}
    for _ in range(3):  # whichever front makes it, and whichever is asked to cancel it
        long = client.responses.create(**asked, text=digits)
        with server.openai("sk-bbbbbbbb") as other, pytest.raises(NotFoundError):
            other.responses.cancel(long.id)
        with server.openai("sk-aaaaaaaa") as again:
            assert again.responses.cancel(long.id).status == "cancelled"
        assert client.responses.retrieve(long.id).status == "cancelled"


def test_a_stream_of_the_background_is_followed_again(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "background": True, "input": "Once", "max_output_tokens": 20}
    seen = list(client.responses.create(**asked, stream=True))
    assert seen[-1].type in ("response.completed", "response.incomplete")
    id = seen[-1].response.id
    for _ in range(3):  # whichever front is asked
        assert list(client.responses.retrieve(id, stream=True)) == seen
        assert list(client.responses.retrieve(id, stream=True, starting_after=5)) == seen[6:]


def test_a_front_that_is_restarted_finds_them_again(client: OpenAI, server: Server) -> None:
    made = client.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    before = server.front_pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    server.wait_for("other fronts", lambda: len(set(server.front_pids()) - set(before)) == 2)
    server.wait_for("/health to say 200 again", lambda: server.health() == 200)
    assert client.responses.retrieve(made.id).output_text == made.output_text


def test_agents_use_tools(server: Server) -> None:
    sys.path += [path for path in os.environ.get("TEST_PACKAGES", "").split(os.pathsep) if path]
    agents = pytest.importorskip("agents")
    called: list[str] = []

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return "18 degrees"

    async def work() -> None:
        async with server.async_openai("sk-aaaaaaaa") as http:
            agents.set_tracing_disabled(True)
            model = agents.OpenAIResponsesModel(model="tiny", openai_client=http)
            settings = agents.ModelSettings(tool_choice="get_weather", max_tokens=300, parallel_tool_calls=False)
            tools = [agents.function_tool(get_weather)]
            agent = agents.Agent(
                name="Helper",
                instructions="Brief!",
                model=model,
                tools=tools,
                output_type=Fish,
                model_settings=settings,
            )
            done = await agents.Runner.run(agent, "Is it warm in Paris?", max_turns=30)  # a forced choice is made once
            assert isinstance(done.final_output, Fish)
            assert [item.type for item in done.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
            assert set(called) <= {"Paris", "Rome"}
            called.clear()
            streamed = agents.Runner.run_streamed(agent, done.to_input_list(), max_turns=30)
            async for _ in streamed.stream_events():
                pass
            assert isinstance(streamed.final_output, Fish)
            assert called

    asyncio.run(work())


@pytest.mark.slow
def test_a_store_outlives_its_server(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.sqlite"
    flags = (*SMALL, "--response-store", str(file), "--response-store-size", "2MiB", "--response-store-age", "3600")
    ids: list[str] = []
    for _ in range(2):  # the second server finds what the first has stored
        with running(tmp_path, tiny_model, *flags) as made:
            body = {"input": "Hi", "max_output_tokens": 2, "previous_response_id": ids[-1] if ids else None}
            answer = httpx.post(f"{made.url}/v1/responses", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
    assert file.stat().st_mode & 0o777 == 0o600
