"""The chat page and the API page, in a real browser, against a small server that speaks the real protocol.

Tests that ask for `base_url` alone hold for any server: SHOAL_PAGES_URL points them at one that runs.
"""

import asyncio
import json
import os
import re
import shlex
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import shoal
from tests.server.chromium import CHROMIUM, PATIENCE_S, SHIFT, Browser, Tab

STATIC = Path(shoal.__file__).parent / "server" / "static"
STRICT = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

EVIL = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script><b>bold</b> & `code`'
WORDS = ["Fish ", "swim ", "in ", "a ", "shoal", "."]
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
    pieces = {"html": [EVIL[:9], EVIL[9:]], "letters": list(LETTERS), "nothing": []}.get(word, WORDS)
    yield chunk({"role": "assistant", "content": ""})
    if word == "letters":  # bytes arrive as the network likes, and lines may end as in mail
        for one in b"".join(chunk({"content": piece}) for piece in pieces).replace(b"\n", b"\r\n"):
            yield bytes([one])
        pieces = []
    for at, piece in enumerate(pieces):
        if word in ("break", "cut") and at == 2:
            yield b"data: " + json.dumps({"error": BROKEN}).encode() + b"\n\n" if word == "break" else b""
            return
        yield chunk({"content": piece})
        await asyncio.sleep(0.03)
    yield chunk({}, "length" if body.get("max_tokens") == 6 else "stop")
    details = {"prompt_tokens": 20, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 16}}
    yield b"data: " + json.dumps({"choices": [], "usage": details}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def fake(fake_server: FakeServer) -> FakeServer:
    fake_server.reset()
    return fake_server


@pytest.fixture
def base_url(request: pytest.FixtureRequest) -> str:
    given = os.environ.get("SHOAL_PAGES_URL", "").rstrip("/")
    return given or request.getfixturevalue("fake").url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser, base_url: str) -> Iterator[Tab]:
    tab = browser.open(f"{base_url}/")
    ready(tab)
    yield tab
    tab.close()


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


# ---- chatting, with any server


@needs_chromium
def test_an_answer_streams_into_the_page_with_its_figures(tab: Tab) -> None:
    ask(tab, "hello")
    assert tab.texts(".turn.user .text") == ["hello"]
    assert len(tab.text(".turn.assistant .text")) > 0
    assert re.search(r"first token [\d.]+ m?s · [\d.]+ tokens/s · \d+ tokens", tab.text(".figures"))
    assert tab.run("document.activeElement.id") == "question"
    assert tab.complaints() == []


@needs_chromium
def test_the_page_names_the_model_it_talks_to(tab: Tab, base_url: str) -> None:
    model = httpx.get(f"{base_url}/v1/models").json()["data"][0]["id"]
    assert tab.run("document.getElementById('model').value") == model
    assert tab.run("document.title") == f"{model} · Shoal"


@needs_chromium
def test_a_new_chat_forgets_the_old_one(tab: Tab) -> None:
    ask(tab, "hello")
    tab.click("#fresh")
    assert tab.texts(".turn") == []
    assert "Ask something" in tab.text("#talk")


@needs_chromium
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_every_control_has_a_name(browser: Browser, base_url: str, path: str) -> None:
    tab = browser.open(f"{base_url}{path}")
    if path == "/":
        tab.click("#settings summary")
    names = tab.names("button", "textbox", "combobox", "link", "spinbutton", "DisclosureTriangle", "log")
    assert len(names) >= 3
    assert all(names), names
    tab.close()


@needs_chromium
@pytest.mark.parametrize("path", ["/", "/docs"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(360, 640), (1280, 800)], ids=["phone", "desk"])
def test_it_fits_every_screen_in_both_colours(
    browser: Browser, base_url: str, path: str, dark: bool, size: tuple[int, int], tmp_path: Path
) -> None:
    tab = browser.open()
    tab.look(width=size[0], height=size[1], dark=dark)
    tab.go(f"{base_url}{path}")
    if path == "/":
        ready(tab)
        ask(tab, "hello " + "and a long word: " + "x" * 300)
        tab.click("#settings summary")
    else:
        tab.wait("document.querySelector('.endpoint')")
    assert tab.run("document.documentElement.scrollWidth") <= size[0], "it must not scroll sideways"
    paper = [int(part) for part in re.findall(r"\d+", tab.run("getComputedStyle(document.body).backgroundColor"))]
    assert max(paper) < 60 if dark else min(paper) > 200
    assert tab.complaints() == []
    shots = Path(os.environ.get("SHOAL_PAGES_SHOTS", tmp_path))  # set it to look at them
    tab.shot(shots / f"{'docs' if path == '/docs' else 'chat'}-{'dark' if dark else 'light'}-{size[0]}.png")
    tab.close()


# ---- chatting, with a server that misbehaves on demand


@needs_chromium
def test_the_whole_conversation_is_sent_and_as_it_was_set(tab: Tab, fake: FakeServer) -> None:
    tab.click("#settings summary")
    tab.fill("#system", "Be brief.")
    tab.fill("#temperature", "0.5")
    tab.fill("#max_tokens", "6")
    ask(tab, "first")
    ask(tab, "second")
    assert tab.texts(".turn.assistant .text") == ["".join(WORDS)] * 2
    assert fake.asked[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "".join(WORDS)},
        {"role": "user", "content": "second"},
    ]
    assert (fake.asked[-1]["temperature"], fake.asked[-1]["max_tokens"]) == (0.5, 6)
    assert (fake.asked[-1]["model"], fake.asked[-1]["stream"]) == ("tiny-model", True)
    figures = tab.text(".figures")
    assert "6 tokens · 20 in the prompt, 16 of them cached · stopped at the limit" in figures
    tab.go(f"{fake.url}/")
    assert tab.run("document.getElementById('system').value") == "Be brief."
    ask(tab, "third")
    assert [one["role"] for one in fake.asked[-1]["messages"]] == ["system", "user"]


@needs_chromium
def test_empty_settings_are_left_to_the_server(tab: Tab, fake: FakeServer) -> None:
    tab.click("#settings summary")
    tab.run("document.getElementById('max_tokens').value = ''")
    ask(tab, "hello")
    assert set(fake.asked[-1]) == {"model", "messages", "stream", "stream_options"}


@needs_chromium
def test_shift_and_enter_begin_a_new_line(tab: Tab, fake: FakeServer) -> None:
    tab.click("#question")
    tab.type("one")
    tab.press("Enter", modifiers=SHIFT)
    ask(tab, "two")
    assert fake.asked[-1]["messages"][-1]["content"] == "one\ntwo"
    tab.press("Enter")
    assert len(fake.asked) == 1, "an empty message is not sent"


@needs_chromium
def test_html_in_an_answer_or_a_question_is_text(tab: Tab, fake: FakeServer) -> None:
    fake.models = [EVIL, "another"]
    tab.go(f"{fake.url}/")
    tab.wait("document.getElementById('model').options.length === 2")
    ask(tab, EVIL)
    ask(tab, "html")
    assert tab.texts(".turn.user .text") == [EVIL, "html"]
    assert tab.texts(".turn.assistant .text")[1] == EVIL
    assert tab.run("document.querySelectorAll('#talk b, #talk script, #talk .turn img').length") == 0
    assert tab.run("window.hacked === undefined")
    assert fake.asked[0]["model"] == EVIL
    assert tab.complaints() == []


@needs_chromium
def test_letters_may_arrive_byte_by_byte(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "letters")
    assert tab.text(".turn.assistant .text") == LETTERS
    assert tab.complaints() == []


@needs_chromium
@pytest.mark.parametrize("how", ["#stop", "Escape", "#fresh"])
def test_a_page_that_stops_reading_disconnects_from_the_server(tab: Tab, fake: FakeServer, how: str) -> None:
    ask(tab, "forever", whole=False)
    tab.wait("/tokens\\/s/.test(document.querySelector('.figures')?.innerText)")  # live, while it comes
    assert tab.run("document.getElementById('talk').getAttribute('aria-busy')") == "true"
    tab.type("typed meanwhile")
    tab.press("Enter")
    assert len(fake.asked) == 1, "one answer at a time"
    tab.press("Escape") if how == "Escape" else tab.click(how)
    assert fake.gone.wait(PATIENCE_S)
    tab.wait("document.getElementById('stop').hidden")
    assert tab.run("document.getElementById('question').value") == "typed meanwhile"
    if how == "#fresh":
        assert tab.texts(".turn") == []
    else:
        assert tab.text(".turn.assistant .text").startswith("more more")
        assert tab.text(".figures").endswith("stopped")
    tab.run("document.getElementById('question').value = ''")
    ask(tab, "hello")
    assert tab.texts(".turn.assistant .text")[-1] == "".join(WORDS)
    assert tab.complaints() == []


@needs_chromium
def test_a_refusal_is_shown_and_the_question_is_not_lost(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "full")
    assert FULL["message"] in tab.text("#problem")
    assert "429. Try again in 3 s." in tab.text("#problem")
    assert tab.texts(".turn") == []
    assert tab.run("document.getElementById('question').value") == "full"
    assert tab.complaints(network=False) == []
    tab.run("document.getElementById('question').value = ''")
    ask(tab, "hello")
    assert not tab.text("#problem")
    assert [one["content"] for one in fake.asked[-1]["messages"]] == ["hello"]


@needs_chromium
@pytest.mark.parametrize(
    ("word", "told"), [("break", BROKEN["message"]), ("cut", "The connection ended before the answer did.")]
)
def test_an_answer_that_breaks_off_keeps_what_came(tab: Tab, fake: FakeServer, word: str, told: str) -> None:
    ask(tab, word)
    assert told in tab.text("#problem")
    assert tab.text(".turn.assistant .text") == "".join(WORDS[:2])
    ask(tab, "hello")
    assert [one["role"] for one in fake.asked[-1]["messages"]] == ["user", "assistant", "user"]
    assert tab.complaints() == []


@needs_chromium
def test_an_empty_answer_is_an_answer(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "nothing")
    assert len(tab.texts(".turn")) == 2
    ask(tab, "hello")
    assert [one["role"] for one in fake.asked[-1]["messages"]] == ["user", "assistant", "user"]


@needs_chromium
def test_an_error_that_is_not_json_is_shown_as_text(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "not json")
    assert "<h1>Bad gateway</h1>" in tab.text("#problem")
    assert "The server answered 502." in tab.text("#problem")


@needs_chromium
def test_a_key_is_asked_for_sent_and_kept_in_the_tab(browser: Browser, fake: FakeServer) -> None:
    fake.key = "secret-key"
    tab = browser.open(f"{fake.url}/")
    tab.wait("!document.getElementById('problem').hidden")
    assert "no API key, or a wrong one" in tab.text("#problem")
    assert "Enter the API key under Settings." in tab.text("#problem")
    tab.fill("#key", "secret-key")
    tab.press("Tab")
    tab.wait("document.getElementById('model').value === 'tiny-model'")
    assert not tab.text("#problem")
    ask(tab, "hello")
    assert tab.text(".turn.assistant .text") == "".join(WORDS)
    tab.go(f"{fake.url}/docs")
    tab.wait("document.querySelector('.endpoint')")
    assert tab.run("localStorage.length") == 0
    tab.close()
    other = browser.open(f"{fake.url}/docs")
    other.wait("!document.getElementById('problem').hidden")
    other.fill("#key", "secret-key")
    other.press("Enter")
    other.wait("document.querySelector('.endpoint')")
    other.close()


@needs_chromium
def test_a_lost_connection_is_shown(browser: Browser) -> None:
    server = FakeServer()
    tab = browser.open(f"{server.url}/")
    tab.wait("document.getElementById('model').value === 'tiny-model'")
    server.close()
    ask(tab, "hello")
    assert "The connection to the server was lost." in tab.text("#problem")
    tab.close()


# ---- the API page

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
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": "a b"}
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
                    "within": {"$ref": "#/components/schemas/Chat"},
                },
            },
        }
    },
}


@needs_chromium
def test_the_api_page_shows_every_endpoint_of_the_schema(browser: Browser, base_url: str) -> None:
    spec = httpx.get(f"{base_url}/openapi.json").json()
    tab = browser.open(f"{base_url}/docs")
    tab.wait("document.querySelector('.endpoint')")
    shown = {" ".join(text.split()) for text in tab.texts(".endpoint h4")}
    every = {(method, path) for path, item in spec["paths"].items() for method in item if method in ("get", "post")}
    assert shown >= {f"{method.upper()} {path}" for method, path in every}
    statuses = tab.texts(".endpoint tbody tr > th code")
    for item in spec["paths"].values():
        for method in ("get", "post"):
            assert set(item.get(method, {}).get("responses", {})) <= set(statuses)
    examples = [shlex.split(text) for text in tab.texts(".curl pre")]
    assert len(examples) == len(shown)
    for words in examples:
        assert words[0] == "curl"
        assert words[1].startswith(base_url)
        if "-d" in words:
            assert isinstance(json.loads(words[words.index("-d") + 1]), dict)
    assert tab.complaints() == []
    tab.close()


@needs_chromium
def test_the_api_page_reads_references_limits_and_schemas_that_hold_themselves(
    browser: Browser, fake: FakeServer
) -> None:
    tab = browser.open(f"{fake.url}/docs")
    tab.wait("document.querySelector('.endpoint')")
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    chat = tab.text("#post-v1-chat-completions")
    assert "messages required" in chat
    assert "list of object" in chat
    assert '"user" or "system"' in chat
    assert "number" in chat
    assert "or null" not in chat
    assert "default 1, at least 0\n" in chat, "and no limit that nobody meets"
    assert EVIL.replace("`", "") in chat, "a description is text; only `code` is set apart"
    assert tab.run("document.querySelectorAll('#endpoints b, #endpoints img, #about img').length") == 0
    curl = shlex.split(tab.text("#post-v1-chat-completions .curl pre"))
    assert json.loads(curl[curl.index("-d") + 1]) == {"messages": [{"role": "user", "content": "it's me"}]}
    assert "Authorization: Bearer $SHOAL_API_KEY" in curl
    assert f"{fake.url}/v1/models/a%20b" in tab.text("#get-v1-models-model- .curl pre")
    assert "Authorization" not in tab.text("#get-health .curl pre")
    assert tab.run("window.hacked === undefined")
    tab.close()


# ---- the files themselves


class Reader(HTMLParser):
    """Collects tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


PAGES = sorted(STATIC.glob("*.html"))


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_a_page_holds_no_script_no_style_and_nothing_from_elsewhere(path: Path) -> None:
    tags = Reader(path.read_text()).tags
    for tag, attrs in tags:
        assert tag != "style"
        assert tag != "script" or "src" in attrs
        assert not [name for name in attrs if name.startswith("on") or name == "style"], f"{tag} {attrs}"
        for link in (attrs.get("src"), attrs.get("href")):
            if link and link.startswith("static/"):
                assert (STATIC / link.removeprefix("static/")).is_file()
    labelled = {attrs["for"] for tag, attrs in tags if tag == "label"}
    assert {attrs["id"] for tag, attrs in tags if tag in ("input", "textarea", "select")} <= labelled


def test_no_file_asks_another_host_or_writes_html() -> None:
    files = [path for path in STATIC.iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    for path in files:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        found = re.findall(
            r"https?:|@import|\burl\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bimport\b", text
        )
        assert not found, f"{path.name}: {found}"


def test_the_files_are_part_of_the_package() -> None:
    project = (STATIC.parents[3] / "pyproject.toml").read_text()
    assert re.search(r'^shoal = \[.*"server/static/\*".*\]$', project, re.MULTILINE)
