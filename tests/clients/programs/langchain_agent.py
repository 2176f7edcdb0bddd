"""LangChain: a chat model, streams, bind_tools, create_agent, with_structured_output in its three methods."""

import sys
from collections.abc import Callable
from typing import Any, Literal

import httpx
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
server: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0}
chat = ChatOpenAI(**server, max_tokens=300)
short = ChatOpenAI(**server, max_tokens=12, stream_usage=True)
question = "The quick brown fox"


class Fish(BaseModel):
    """A fish."""

    kind: Literal["cod", "eel"]
    salty: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    asked_for.append(city)
    return f"Sunny in {city}"


@tool
def double(number: Literal[1, 2, 3]) -> int:
    """Doubles a number."""
    return 2 * number


asked_for: list[str] = []

# answers, whole, in pieces, and several at once
assert short.invoke(question).usage_metadata["output_tokens"] <= 12
pieces = list(short.stream([("system", "Be brief."), ("user", question)]))
assert pieces[-1].usage_metadata or any(piece.usage_metadata for piece in pieces)
assert len(short.batch([question] * 3)) == 3
assert isinstance(OpenAI(**server, max_tokens=8).invoke(question), str)

# tools, by choice and by name, and their results in the history
for choice in ("any", "required", True, "weather"):
    tools = [weather] if choice is True else [weather, double]
    (call, *_) = chat.bind_tools(tools, tool_choice=choice).invoke(question).tool_calls
    assert call["name"] in {one.name for one in tools}
    if call["name"] == "weather":
        assert call["args"]["city"] in ("Paris", "Rome")
strict = chat.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
first = strict.invoke(question)
(call,) = first.tool_calls
history = [HumanMessage(question), first, ToolMessage("Sunny", tool_call_id=call["id"])]
assert short.bind_tools([weather], tool_choice="none").invoke(history).tool_calls == []
whole = None
for piece in strict.stream(question):
    whole = piece if whole is None else whole + piece
assert whole is not None
assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


# an agent: a model that cannot choose well must call first, then must answer
@wrap_model_call
def call_then_answer(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    called = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if called else "any"))


asked_for.clear()
agent = create_agent(chat, [weather], system_prompt="Be brief.", middleware=[call_then_answer])
ended = agent.invoke({"messages": [{"role": "user", "content": question}]})
kinds = [type(message) for message in ended["messages"]]
assert kinds[0] is HumanMessage
assert kinds[1] is AIMessage
assert ToolMessage in kinds
assert kinds[-1] is AIMessage
assert asked_for
for strategy in (ToolStrategy(Fish), ProviderStrategy(Fish)):
    shaped = create_agent(chat, [], response_format=strategy).invoke({"messages": [HumanMessage(question)]})
    assert isinstance(shaped["structured_response"], Fish)

# structured output
for method in ("function_calling", "json_schema"):
    for options in ({}, {"strict": True}):
        assert isinstance(chat.with_structured_output(Fish, method=method, **options).invoke(question), Fish)
assert isinstance(chat.with_structured_output(Fish).invoke(question), Fish)
# json_mode promises JSON, not its form: this bias makes the shortest object likely
brace = int(httpx.post(f"{url}/tokenize", json={"prompt": "}", "add_special_tokens": False}).json()["tokens"][0])
biased = ChatOpenAI(**server, max_tokens=300, temperature=0, logit_bias={brace: 100})
assert biased.with_structured_output({"title": "Any", "type": "object"}, method="json_mode").invoke(question) == {}
