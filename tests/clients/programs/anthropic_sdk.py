"""anthropic-python: messages, streams, tools and their results, structured output, token counts, errors."""

import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
asked: list[Any] = [{"role": "user", "content": "The quick brown fox"}]
weather: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
common: dict[str, Any] = {"model": model, "max_tokens": 2000}

# a message, with all that clients send beside it
message = client.messages.create(
    **{**common, "max_tokens": 12},
    messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
    system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    stop_sequences=["\n\nHuman:"],
    metadata={"user_id": "someone"},
    extra_body={"temperature": 0.5, "top_k": 20},  # which not every version of the client has arguments for
)
assert message.type == "message"
assert message.role == "assistant"
assert message.stop_reason in ("max_tokens", "end_turn")
assert 0 < message.usage.output_tokens <= 12

# the same tokens are counted before and after
counted = client.messages.count_tokens(model=model, messages=asked, system="Be brief.")
used = client.messages.create(**{**common, "max_tokens": 1}, messages=asked, system="Be brief.").usage
assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)

# a stream
with client.messages.stream(**{**common, "max_tokens": 20}, messages=asked) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
assert "".join(pieces) == "".join(block.text for block in final.content if block.type == "text")
assert final.usage.output_tokens > 0

# a call, its result, and what follows
called = client.messages.create(**common, messages=asked, tools=[weather], tool_choice={"type": "any"})
assert called.stop_reason == "tool_use", called
(call, *_) = [block for block in called.content if block.type == "tool_use"]
assert call.name == "weather"
assert call.input["city"] in ("Paris", "Rome")
results = [
    {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Sunny"}]}
    for block in called.content
    if block.type == "tool_use"
]
history = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
answer = client.messages.create(
    **{**common, "max_tokens": 12}, messages=history, tools=[weather], tool_choice={"type": "none"}
)
assert all(block.type == "text" for block in answer.content)

# a streamed call by name: the pieces of its input are the whole
choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
with client.messages.stream(**common, messages=asked, tools=[weather], tool_choice=choice) as stream:
    parts = [event.partial_json for event in stream if event.type == "input_json"]
    (block,) = stream.get_final_message().content
assert block.type == "tool_use"
assert block.input["city"] in ("Paris", "Rome")
assert len(parts) > 1


# the client's own loop over tools
@anthropic.beta_tool
def double(number: Literal[1, 2, 3]) -> str:
    """Doubles a number."""
    doubled.append(number)
    return str(2 * number)


doubled: list[int] = []
runner = client.beta.messages.tool_runner(
    **common, messages=asked, tools=[double], tool_choice={"type": "any"}, max_iterations=2
)
assert len(list(runner)) == 2
assert set(doubled) <= {1, 2, 3}
assert doubled


# an answer in a given form
class Fish(BaseModel):
    """What is asked for."""

    kind: Literal["cod", "eel"]
    salty: bool


parsed = client.messages.parse(**common, messages=asked, output_format=Fish)
assert isinstance(parsed.parsed_output, Fish)

# errors have the client's own types
for error, wrong in (
    (anthropic.NotFoundError, {"model": "claude-none"}),
    (anthropic.BadRequestError, {"max_tokens": 0}),
    (anthropic.BadRequestError, {"tools": [{**weather, "name": "no spaces here"}]}),
):
    try:
        client.messages.create(**{**common, "messages": asked, **wrong})
    except error:
        continue
    raise AssertionError(f"{wrong} was accepted")
