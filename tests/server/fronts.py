"""Fronts for the tests: the real application over a fake engine, asked in process or over a real socket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import uvloop

from shoal.keys.api_key import ApiKey
from shoal.keys.file import hashed
from shoal.server.app import Front
from shoal.server.protocol import make_server, serve
from shoal.server.settings import ServerSettings
from shoal.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.text import tiny

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood | default('') }}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EOS = 2


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, small, with a chat template."""
    other = tiny.byte_level()
    return Tokenizer(other.backend, special=other.special, chat_template=TEMPLATE)


def front(
    client: FakeClient | None = None,
    *,
    grammars: Any = None,
    without_tokenizer: bool = False,
    defaults: Mapping[str, Any] | None = None,
    metrics: Any = None,
    spans: Any = None,
    limiter: Any = None,
    store: Any = None,
    api_keys: Sequence[ApiKey | tuple[str, str]] = (),
    **settings: Any,
) -> Front:
    keys = tuple(key if isinstance(key, ApiKey) else hashed([key])[0] for key in api_keys)
    return Front(
        ServerSettings(**{"models": ("tiny", "other-name"), "host": "front", "keys": lambda: keys, **settings}),
        client or FakeClient(),
        None if without_tokenizer else tokenizer(),
        grammars,
        (EOS,),
        defaults or {},
        metrics,
        spans,
        limiter,
        store,
    )


def run(work: Callable[[], Awaitable[None]]) -> None:
    """A test's coroutine, on an event loop of the kind that servers use."""

    async def whole() -> None:
        await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


def ask(app: Front, method: str, path: str, **how: Any) -> httpx.Response:
    """One request, in process."""
    return asyncio.run(ask_async(app, method, path, **how))


async def ask_async(app: Front, method: str, path: str, **how: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
        return await http.request(method, path, **how)


def complete(app: Front, **body: Any) -> httpx.Response:
    return ask(app, "POST", "/v1/completions", json=body)


def chat(app: Front, **body: Any) -> httpx.Response:
    return ask(app, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **body})


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer, which must end with [DONE]."""
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error in an answer, which must have OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@asynccontextmanager
async def listening(app: Front, **tls: str) -> AsyncIterator[int]:
    """The port of a real server on this event loop."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = make_server(app, app.settings, **tls)
    task = asyncio.create_task(serve(server, sock))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def raw_request(path: str, body: Mapping[str, Any] | bytes, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: front", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data
