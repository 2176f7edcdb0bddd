"""litellm under four of its names for a server: openai/, hosted_vllm/, anthropic/ and ollama/ (with ollama_chat/)."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the list of prices would be fetched from elsewhere

import litellm
from litellm import completion

url, model = sys.argv[1:]
bases = {
    "openai": f"{url}/v1",
    "hosted_vllm": f"{url}/v1",
    "anthropic": url,
    "ollama": url,
    "ollama_chat": url,
}
asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick brown fox"}]
weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
named = {"type": "function", "function": {"name": "weather"}}
schema = {"type": "object", "properties": {"kind": {"enum": ["cod", "eel"]}}, "required": ["kind"]}
schema["additionalProperties"] = False
form = {"type": "json_schema", "json_schema": {"name": "fish", "schema": schema, "strict": True}}


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


for provider, base in bases.items():
    print(provider, flush=True)
    common: dict[str, Any] = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "num_retries": 0}
    common |= {"messages": asked, "max_tokens": 300, "temperature": 0.9}
    whole = completion(**{**common, "max_tokens": 12}, stop=["\n\n\n"], top_p=0.9)
    assert whole.usage.completion_tokens > 0
    assert whole.choices[0].finish_reason in ("stop", "length")
    pieces = list(completion(**{**common, "max_tokens": 12}, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(pieces, messages=asked)
    assert built.usage.completion_tokens > 0
    if provider.startswith("ollama"):  # its API has no way to demand a call
        completion(**{**common, "max_tokens": 12}, tools=[weather])
        told = completion(**common, response_format=form)
        assert json.loads(told.choices[0].message.content)["kind"] in ("cod", "eel")
        continue
    for choice in ("required", named):
        first = completion(**common, tools=[weather], tool_choice=choice).choices[0].message
        check_calls(first.tool_calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny"} for call in first.tool_calls]
    history = {**common, "messages": [*asked, first, *results], "max_tokens": 12}
    assert completion(**history, tools=[weather]).usage.completion_tokens > 0
    pieces = list(completion(**common, tools=[weather], tool_choice="required", stream=True))
    check_calls(litellm.stream_chunk_builder(pieces).choices[0].message.tool_calls)
    if provider != "anthropic":
        told = completion(**common, response_format=form)
        assert json.loads(told.choices[0].message.content)["kind"] in ("cod", "eel")
    try:
        completion(**{**common, "model": f"{provider}/none"})
    except litellm.NotFoundError:
        continue
    raise AssertionError("a model that is not served was accepted")
