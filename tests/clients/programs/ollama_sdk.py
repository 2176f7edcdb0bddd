"""ollama-python: what is served, chats and prompts, whole and streamed, formats, tools and their results."""

import json
import sys
from typing import Any

from ollama import Client, ResponseError

url, model = sys.argv[1:]
client = Client(host=url)
asked: list[Any] = [{"role": "user", "content": "The quick brown fox"}]
few = {"num_predict": 12, "temperature": 0.8, "seed": 1, "num_ctx": 2048, "repeat_penalty": 1.1}

assert model in {one.model for one in client.list().models}
assert model in {one.model for one in client.ps().models}
assert "completion" in (client.show(model).capabilities or [])

answer = client.chat(model=model, messages=asked, options=few, keep_alive="5m")
assert answer.message.role == "assistant"
assert answer.done
assert 0 < answer.eval_count <= 12
assert answer.prompt_eval_count > 0
pieces = list(client.chat(model=f"{model}:latest", messages=asked, options=few, stream=True))
assert pieces[-1].done
assert not any(piece.done for piece in pieces[:-1])
assert "".join(piece.message.content or "" for piece in pieces) == answer.message.content, "the same seed"
told = client.generate(model=model, prompt="Once upon a time", options=few)
assert told.done_reason in ("stop", "length")
lines = list(client.generate(model=model, prompt="Once upon a time", options=few, stream=True, raw=False))
assert "".join(line.response for line in lines) == told.response
assert client.generate(model=model, prompt="Once", options=few, raw=True).eval_count > 0

schema = {"type": "object", "properties": {"kind": {"enum": ["cod", "eel"]}}, "required": ["kind"]}
schema["additionalProperties"] = False
formed = client.chat(model=model, messages=asked, format=schema, options={"num_predict": 500})
assert json.loads(formed.message.content)["kind"] in ("cod", "eel")


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: where

    Returns:
        str: a word or two
    """
    return f"Sunny in {city}"


# the API has no way to demand a call: whatever comes is valid
offered = client.chat(model=model, messages=asked, tools=[weather], options={"num_predict": 40})
assert offered.message.role == "assistant"
call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
history = [
    *asked,
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": weather("Paris"), "tool_name": "weather"},
]
assert client.chat(model=model, messages=history, tools=[weather], options=few).eval_count > 0

try:
    client.chat(model="none", messages=asked)
    status = 200
except ResponseError as error:
    status = error.status_code
assert status == 404
