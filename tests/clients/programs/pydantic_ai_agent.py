"""pydantic-ai: text, tools, the default structured output (a tool), the native one, streams."""

import asyncio
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
settings = ModelSettings(max_tokens=400, temperature=1.0)
limits = UsageLimits(request_limit=40)
question = "The quick brown fox"


class Fish(BaseModel):
    """A fish."""

    kind: Literal["cod", "eel"]
    age: Annotated[int, Field(ge=0, le=9)]
    owner: Annotated[str, Field(max_length=4)] | None = None


plain = Agent(model, model_settings=ModelSettings(max_tokens=12), instructions="Be brief.", retries=20)
assert isinstance(plain.run_sync(question).output, str)

# the default for a type of output: tools with tool_choice required; the model picks among them until it has ended
agent = Agent(model, output_type=Fish, model_settings=settings, retries=20)


@agent.tool_plain
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"Sunny in {city}"


assert isinstance(agent.run_sync(question, usage_limits=limits).output, Fish)
history = agent.run_sync(question, usage_limits=limits).all_messages()
assert isinstance(agent.run_sync("Again", message_history=history, usage_limits=limits).output, Fish)
for form in (ToolOutput(Fish, strict=True), NativeOutput(Fish)):
    assert isinstance(Agent(model, output_type=form, model_settings=settings).run_sync(question).output, Fish)


async def stream() -> Fish:
    async with Agent(model, output_type=Fish, model_settings=settings, retries=20).run_stream(question) as result:
        async for _ in result.stream_output():
            pass
        return await result.get_output()


assert isinstance(asyncio.run(stream()), Fish)
