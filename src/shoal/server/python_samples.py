"""Programs in Python for the API page: one for each endpoint, with the client that people use for it.

Owns which client has which call. Endpoints that no client knows are asked with the standard library. Knows the API's
description; sends nothing.
"""

import json
from typing import Any, NamedTuple

Json = dict[str, Any]
BASE = "http://localhost:8000"  # the page puts its own address in its place
WIDE = 96  # characters of a line


class ClientSetup(NamedTuple):
    """A package, and how it is set up with and without an API key."""

    setup: str
    keyed: str


CLIENTS = {
    "openai": ClientSetup(
        f'from openai import OpenAI\n\nclient = OpenAI(base_url="{BASE}/v1", api_key="none")',
        "import os\n\nfrom openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{BASE}/v1", api_key=os.environ["SHOAL_API_KEY"])',
    ),
    "anthropic": ClientSetup(
        f'from anthropic import Anthropic\n\nclient = Anthropic(base_url="{BASE}", api_key="none")',
        "import os\n\nfrom anthropic import Anthropic\n\n"
        f'client = Anthropic(base_url="{BASE}", api_key=os.environ["SHOAL_API_KEY"])',
    ),
    "ollama": ClientSetup(
        f'from ollama import Client\n\nclient = Client(host="{BASE}")',
        "import os\n\nfrom ollama import Client\n\n"
        'key = os.environ["SHOAL_API_KEY"]\n'
        f'client = Client(host="{BASE}", headers={{"Authorization": f"Bearer {{key}}"}})',
    ),
}


class ClientCall(NamedTuple):
    """A call of a client, and what of its answer is printed."""

    client: str
    name: str
    shown: str = ""  # of the answer; empty: all of it


CALLS = {
    "POST /v1/chat/completions": ClientCall("openai", "chat.completions.create", ".choices[0].message.content"),
    "POST /v1/completions": ClientCall("openai", "completions.create", ".choices[0].text"),
    "POST /v1/responses": ClientCall("openai", "responses.create", ".output_text"),
    "GET /v1/responses/{id}": ClientCall("openai", "responses.retrieve", ".output_text"),
    "DELETE /v1/responses/{id}": ClientCall("openai", "responses.delete"),
    "POST /v1/responses/{id}/cancel": ClientCall("openai", "responses.cancel", ".status"),
    "GET /v1/responses/{id}/input_items": ClientCall("openai", "responses.input_items.list", ".data"),
    "GET /v1/models": ClientCall("openai", "models.list", ".data"),
    "GET /v1/models/{model}": ClientCall("openai", "models.retrieve"),
    "POST /v1/messages": ClientCall("anthropic", "messages.create", ".content[0].text"),
    "POST /v1/messages/count_tokens": ClientCall("anthropic", "messages.count_tokens", ".input_tokens"),
    "POST /api/chat": ClientCall("ollama", "chat", ".message.content"),
    "POST /api/generate": ClientCall("ollama", "generate", ".response"),
    "GET /api/tags": ClientCall("ollama", "list"),
    "GET /api/ps": ClientCall("ollama", "ps"),
}


def add_samples(paths: Json, keyed: bool) -> None:
    """Give every operation its program, where tools look for one. `keyed`: the server asks for API keys."""
    for path, methods in paths.items():
        for method, operation in methods.items():
            needs_key = keyed and operation.get("security") != []
            source = sample(method.upper(), path, operation, needs_key)
            operation["x-codeSamples"] = [{"lang": "Python", "source": source}]


def sample(method: str, path: str, operation: Json, keyed: bool) -> str:
    """The program for one operation."""
    values = {one["name"]: one.get("example", one["name"]) for one in operation.get("parameters", ()) if in_path(one)}
    content = operation.get("requestBody", {}).get("content", {})
    body: Json | None = content["application/json"]["example"] if content else None
    found = CALLS.get(f"{method} {path}")
    if found is None:
        return plain(method, path.format(**values), body, keyed)
    client = CLIENTS[found.client]
    arguments = [literal(value) for value in values.values()]
    arguments += [f"{name}={literal(value)}" for name, value in (body or {}).items()]
    return "\n".join(
        [
            client.keyed if keyed else client.setup,
            f"answer = {called(f'client.{found.name}', arguments)}",
            f"print(answer{found.shown})",
        ]
    )


def in_path(parameter: Json) -> bool:
    return bool(parameter["in"] == "path")


def plain(method: str, path: str, body: Json | None, keyed: bool) -> str:
    """With the standard library."""
    names = ["json"] * (path != "/metrics") + ["os"] * keyed + ["urllib.request"]
    lines = [*(f"import {name}" for name in names), ""]
    headers = ['"Content-Type": "application/json"'] * (body is not None)
    headers += ['"Authorization": "Bearer " + os.environ["SHOAL_API_KEY"]'] * keyed
    arguments = [literal(BASE + path)]
    if body is not None:
        lines.append(f"body = {literal(body)}")
        arguments.append("json.dumps(body).encode()")
    if headers:
        arguments.append(f"headers={{{', '.join(headers)}}}")
    if method != ("GET" if body is None else "POST"):
        arguments.append(f"method={literal(method)}")
    target = arguments[0]
    if len(arguments) > 1:
        lines.append(f"request = {called('urllib.request.Request', arguments)}")
        target = "request"
    shown = "json.load(answer)" if path != "/metrics" else "answer.read().decode()"
    return "\n".join([*lines, f"with urllib.request.urlopen({target}) as answer:", f"    print({shown})"])


def called(name: str, arguments: list[str]) -> str:
    """On one line, if it fits."""
    short = f"{name}({', '.join(arguments)})"
    if len(short) <= WIDE:
        return short
    return f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + ")"


def literal(value: Any) -> str:
    """JSON as Python writes it.

    >>> literal({"a": [True, None, "it's"]})
    '{"a": [True, None, "it\\'s"]}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
