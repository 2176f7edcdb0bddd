"""Tool calls in the formats of gpt-oss and Qwen3-Coder, of random models with their special tokens and templates."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.harmony_model import TEMPLATE, ends_of, with_marks
from tests.story.models import backend, generation, save_model
from tests.story_server.asks import ASKED
from tests.story_server.servers import SMALL, Server, running
from tests.story_server.tool_schemas import schemas, tools

jsonschema = pytest.importorskip("jsonschema_rs")
TOOLS = tools()
SCHEMAS = {tool["function"]["name"]: schema for tool, schema in zip(TOOLS, schemas(), strict=True)}
QWEN = (
    "{% if tools %}<|user|>{{ tools | tojson }} Reply with <tool_call>\n<function=name>\n<parameter=one>\nvalue\n"
    "</parameter>\n</function>\n</tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


def harmony(folder: Path) -> Path:
    save_model(folder, template=TEMPLATE, max_position_embeddings=32768)
    made = with_marks(backend())
    made.save(str(folder / "tokenizer.json"))
    return generation(folder, eos_token_id=ends_of(made))


def qwen(folder: Path) -> Path:
    return save_model(folder, template=QWEN, max_position_embeddings=32768)


@pytest.fixture(scope="module", params=[harmony, qwen], ids=["harmony", "qwen3-coder"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("family")
    with running(folder, request.param(folder), *SMALL, "--max-model-len", "8192") as made:
        yield made


async def one(client: AsyncOpenAI, number: int) -> str:
    given = [TOOLS[number % 50], TOOLS[(number + 7) % 50]]
    name = given[0]["function"]["name"]
    choice: Any = {"type": "function", "function": {"name": name}} if number % 2 else "required"
    body: dict[str, Any] = {
        "model": "tiny", "messages": ASKED, "tools": given, "tool_choice": choice, "seed": number, "max_tokens": 900,
        "temperature": 1.0, "parallel_tool_calls": number % 4 == 0, "extra_body": {"thinking_token_budget": 6},
    }  # fmt: skip
    if number % 3 == 0:
        async with client.chat.completions.stream(**body) as stream:
            async for _ in stream:
                pass
            done = (await stream.get_final_completion()).choices[0]
    else:
        done = (await client.chat.completions.create(**body)).choices[0]
    assert done.message.tool_calls
    if done.finish_reason == "length":
        return "length"
    assert done.finish_reason == ("stop" if number % 2 else "tool_calls")
    assert not done.message.content
    for call in done.message.tool_calls:
        assert call.type == "function"
        jsonschema.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    return "valid"


async def many(server: Server, count: int) -> list[str]:
    slots = asyncio.Semaphore(8)
    async with server.async_openai() as client:

        async def held(number: int) -> str:
            async with slots:
                return await one(client, number)

        return await asyncio.gather(*map(held, range(count)))


def test_calls_of_a_random_model_fit_their_schemas(server: Server) -> None:
    ended = asyncio.run(many(server, 8))
    assert ended.count("valid") >= 7


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_calls_of_a_random_model_fit_their_schemas(server: Server) -> None:
    ended = asyncio.run(many(server, 400))
    assert ended.count("valid") >= 360


def test_a_schema_that_cannot_be_followed_is_refused_with_its_tool(server: Server) -> None:
    schema = {"type": "object", "properties": {"x": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    bad = {"type": "function", "function": {"name": "bad_one", "parameters": schema}}
    with server.openai() as client, pytest.raises(BadRequestError, match="bad_one"):
        client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOLS[0], bad], max_tokens=5)  # type: ignore[list-item]
