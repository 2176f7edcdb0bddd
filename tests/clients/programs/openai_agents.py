"""openai-agents over /v1/responses, its default, and over chats: tools, results, a form of the answer, streams."""

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
set_tracing_disabled(True)
question = "The quick brown fox"
cities: list[str] = []


class Fish(BaseModel):
    """A fish."""

    kind: Literal["cod", "eel"]
    salty: bool


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    cities.append(city)
    return f"Sunny in {city}"


async def check(model: Any) -> None:
    many = ModelSettings(max_tokens=3000, parallel_tool_calls=False)  # answers that are cut are errors to it
    plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=many)
    ended = await Runner.run(plain, question)
    assert isinstance(ended.final_output, str)
    again = await Runner.run(plain, [*ended.to_input_list(), {"role": "user", "content": "And then?"}])
    assert isinstance(again.final_output, str)
    streamed = Runner.run_streamed(plain, question)
    assert len([event async for event in streamed.stream_events()]) > 2

    # a call is demanded once; afterwards the agent lets the model choose, and a random model writes text
    cities.clear()
    must = ModelSettings(max_tokens=3000, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="caller", model=model, tools=[weather], model_settings=must)
    await Runner.run(agent, question, max_turns=8)
    assert cities
    assert set(cities) <= {"Paris", "Rome"}

    shaped = Agent(name="shaped", model=model, output_type=Fish, model_settings=many)
    assert isinstance((await Runner.run(shaped, question)).final_output, Fish)


async def both() -> None:
    await check(OpenAIResponsesModel(name, client))
    await check(OpenAIChatCompletionsModel(name, client))


asyncio.run(both())
