"""instructor in its default mode (tools): whole objects and partial ones; and in two other modes."""

import asyncio
import sys
from typing import Annotated, Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]
server: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
common: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "The quick brown fox"}]}
common |= {"max_tokens": 2000}


class Owner(BaseModel):
    """Who has it."""

    model_config = ConfigDict(extra="forbid")  # else a random model adds fields without end

    name: Annotated[str, Field(max_length=5)]
    age: Annotated[int, Field(ge=0, le=99)]


class Fish(BaseModel):
    """A fish."""

    kind: Literal["cod", "eel"]
    owners: Annotated[list[Owner], Field(max_length=2)]
    friend: Literal["crab"] | None


client = instructor.from_openai(OpenAI(**server))
assert isinstance(client.chat.completions.create(**common, response_model=Fish), Fish)
fish, completion = client.chat.completions.create_with_completion(**common, response_model=Fish)
assert isinstance(fish, Fish)
assert completion.choices[0].message.tool_calls
*_, last = client.chat.completions.create_partial(**common, response_model=Fish)
assert last.kind in ("cod", "eel")


async def later() -> Any:
    return await instructor.from_openai(AsyncOpenAI(**server)).chat.completions.create(**common, response_model=Fish)


assert isinstance(asyncio.run(later()), Fish)
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    other = instructor.from_openai(OpenAI(**server), mode=mode)
    assert isinstance(other.chat.completions.create(**common, response_model=Owner), Owner)
