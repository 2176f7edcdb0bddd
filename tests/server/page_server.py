"""A small server with the real pages that speaks the real protocol, and answers as it is asked: for tests in a browser.

Knows the files of the pages and OpenAI's chat API; no engine.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import shoal
from shoal.server.pages import POLICY
from tests.server.chromium import CHROMIUM, PATIENCE_S, Tab

STATIC = Path(shoal.__file__).parent / "server" / "static"
STRICT = {"Content-Security-Policy": POLICY.decode()}
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

EVIL = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script><b>bold</b> & `code`'
WORDS = ["Fish ", "swim ", "in ", "a ", "shoal", "."]
MARKDOWN = """# Fish

A *shoal* of **fish**, `cod` [here](https://fish.example/a) and [there](javascript:alert(1)).

- one
- two

```python
print("fish")
for fish in shoal: swim(fish)
```

| fish | cm |
|---|---|
| cod | 80 |

![a fish](https://elsewhere.example/fish.png)

> quoted <script>window.hacked = 3</script>
"""
THINKING = ["Let ", "me ", "**see**"]
LETTERS = "Grüße, 魚の群れ 🐟🐟\n\nund noch eine Zeile"
FULL = {"message": "32 requests wait already; try again later", "type": "rate_limit_error", "code": "queue_full"}
BROKEN = {"message": "the engine failed while computing", "type": "server_error", "code": "engine_error"}


# ---- a server that answers by the word it is asked


class FakeServer:
    """Serves the real files; answers chats as the last message asks. Records requests and disconnects."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.gone = threading.Event()
        self.key = ""
        self.models = ["tiny-model"]
        routes = [
            Route("/", lambda request: FileResponse(STATIC / "index.html", headers=STRICT)),
            Route("/docs", lambda request: FileResponse(STATIC / "docs.html", headers=STRICT)),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model}", self.one_model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", ws="none", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def reset(self) -> None:
        self.asked.clear()
        self.gone.clear()
        self.key, self.models = "", ["tiny-model"]

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def barred(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "no API key, or a wrong one", "type": "invalid_request_error"}}, 401)

    async def openapi(self, request: Request) -> Response:
        return self.barred(request) or JSONResponse(SPEC)

    async def list_models(self, request: Request) -> Response:
        return self.barred(request) or JSONResponse({"object": "list", "data": [{"id": one} for one in self.models]})

    async def one_model(self, request: Request) -> Response:
        answer = {"id": request.path_params["model"], "query": dict(request.query_params)}
        return self.barred(request) or JSONResponse(answer)

    async def chat(self, request: Request) -> Response:
        if barred := self.barred(request):
            return barred
        body = await request.json()
        self.asked.append(body)
        word = body["messages"][-1]["content"]
        if word == "full":
            return JSONResponse({"error": FULL}, 429, {"Retry-After": "3"})
        if word == "not json":
            return Response("<h1>Bad gateway</h1>", 502)
        if word == "forever":
            return StreamingResponse(self.forever(request), media_type="text/event-stream")
        return StreamingResponse(answer(word, body), media_type="text/event-stream")

    async def forever(self, request: Request) -> AsyncIterator[bytes]:
        try:
            while not await request.is_disconnected():
                yield chunk({"content": "more "})
                await asyncio.sleep(0.02)
        finally:
            self.gone.set()


def chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def answer(word: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    pieces = {
        "html": [EVIL[:9], EVIL[9:]], "letters": list(LETTERS), "nothing": [],
        "markdown": [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)],
    }.get(word, WORDS)  # fmt: skip
    yield chunk({"role": "assistant", "content": ""})
    for piece in THINKING if word == "reason" else ():
        yield chunk({"reasoning_content": piece, "reasoning": piece})
    if word == "letters":  # bytes arrive as the network likes, and lines may end as in mail
        for one in b"".join(chunk({"content": piece}) for piece in pieces).replace(b"\n", b"\r\n"):
            yield bytes([one])
        pieces = []
    for at, piece in enumerate(pieces):
        if word in ("break", "cut") and at == 2:
            yield b"data: " + json.dumps({"error": BROKEN}).encode() + b"\n\n" if word == "break" else b""
            return
        yield chunk({"content": piece})
        await asyncio.sleep(0.03 if word != "markdown" else 0)
    yield chunk({}, "length" if body.get("max_tokens") == 6 else "stop")
    details = {"prompt_tokens": 20, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 16}}
    yield b"data: " + json.dumps({"choices": [], "usage": details}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def ready(tab: Tab) -> None:
    """It knows its model, and asks for answers that a slow machine gives quickly."""
    tab.wait("document.getElementById('model').value !== '…'")
    tab.run("document.getElementById('max_tokens').value = '16'")


def ask(tab: Tab, text: str, whole: bool = True) -> None:
    """Type it, press Enter and, if the whole answer is wanted, wait for its end."""
    tab.click("#question")
    tab.type(text)
    tab.press("Enter")
    if whole:
        tab.wait("document.getElementById('stop').hidden")


# ---- a description of an API

ITSELF = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/Value"}}]}
SPEC = {
    "openapi": "3.1.0",
    "info": {"title": "A test", "version": "1.2.3", "description": EVIL},
    "security": [{"key": []}],
    "paths": {
        "/v1/chat/completions": {
            "post": {
                "summary": "Answer `messages`.",
                "description": EVIL,
                "tags": ["Text"],
                "x-codeSamples": [{"lang": "Python", "source": 'ask("http://localhost:8000/v1", "it\'s me")'}],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Chat"}}}},
                "responses": {
                    "200": {"description": "An answer", "content": {"text/event-stream": {}}},
                    "429": {
                        "description": "Too many wait",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                    },
                },
            }
        },
        "/v1/models/{model}": {
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": "a b"},
                {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}, "description": "Which first."},
            ],
            "get": {"tags": ["Text"], "responses": {"200": {"description": "It"}, "404": {"description": "No such"}}},
        },
        "/health": {"get": {"security": [], "responses": {"200": {"description": "Up"}}}},
    },
    "components": {
        "schemas": {
            "Value": ITSELF,
            "Error": {"type": "object", "properties": {"error": {"type": "object"}}},
            "Message": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string", "enum": ["user", "system"]},
                    "content": {"type": "string", "example": "it's me"},
                },
            },
            "Chat": {
                "type": "object",
                "required": ["messages"],
                "properties": {
                    "messages": {"type": "array", "items": {"$ref": "#/components/schemas/Message"}},
                    "temperature": {
                        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2**40}, {"type": "null"}],
                        "description": EVIL,
                        "default": 1.0,
                    },
                    "anything": {"$ref": "#/components/schemas/Value"},
                    "unused": {"description": "Ignored.", "x-no-effect": True},
                    "within": {"$ref": "#/components/schemas/Chat"},
                },
            },
        }
    },
}
