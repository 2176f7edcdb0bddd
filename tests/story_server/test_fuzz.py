"""Thousands of requests that went wrong on their way: none is a 500, and the server is well afterwards.

A case is made of a seed and its number, so that a failure can be repeated: `case(SEED, number)`.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server.app import Front
from shoal.server.response_store import SqliteStore
from shoal.text.grammar import Grammars
from tests.server.fake_client import INFO, FakeClient, until
from tests.server.fronts import EOS, complete, front, listening, run, tokenizer
from tests.story_server.mutate import Case, case, json_case, raw_case
from tests.story_server.servers import SMALL, Server, connect, running

SEED = 20
EXPECTED = {200, 204, 304, 400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 503}
# in `make test`, and in `make test-all`: 100,000 in all
FRONT = [pytest.param(2_500, id="some"), pytest.param(50_000, id="many", marks=pytest.mark.slow)]
WIRE = [pytest.param(300, id="some"), pytest.param(5_000, id="many", marks=pytest.mark.slow)]
SERVER = [pytest.param(250, id="some"), pytest.param(25_000, id="many", marks=pytest.mark.slow)]
LINES = [pytest.param(100, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]
AT_ONCE = 16


class Answer:
    """What the application sent."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.done = False

    def check(self, one: Case) -> None:
        where = f"case {one.number}: {one.method} {one.path} {one.headers} {one.body[:300]!r} → {self.body[:300]!r}"
        if one.leaves and not self.status:
            return
        assert self.status in EXPECTED, f"status {self.status}, {where}"
        assert b"internal_error" not in self.body, where
        ours = one.method not in ("HEAD", "OPTIONS") and one.path != "/health"  # OPTIONS is answered by the CORS layer
        if self.status >= 400 and ours:
            assert set(json.loads(self.body)) - {"type"} == {"error"}, where


async def ask(app: Front, one: Case) -> Answer:
    """Hand a request to the application as a server would, in one piece."""
    answer = Answer()
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": one.body, "more_body": False}]
    if one.leaves:
        messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not answer.status, f"case {one.number} was answered twice"
            answer.status = message["status"]
        else:
            answer.body += message.get("body", b"")
            answer.done = not message.get("more_body", False)

    path = one.path.encode("utf-8", "replace")
    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": one.method,
            "scheme": "http",
            "path": one.path,
            "raw_path": path,
            "query_string": b"",
            "root_path": "",
            "headers": one.headers,
            "client": ("127.0.0.1", 5000),
            "server": ("127.0.0.1", 8000),
        },
        receive,
        send,
    )
    return answer


def assert_well(app: Front, client: FakeClient) -> None:
    assert not app.active
    assert not app.calls
    assert not app.streams
    assert not client.running
    assert complete(app, prompt="x").status_code == 200


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", FRONT)
def test_bodies_and_headers_against_the_front(count: int, tmp_path: Path) -> None:
    client = FakeClient()
    app = front(
        client,
        grammars=Grammars(tokenizer(), INFO.vocab_size, [EOS]),
        store=SqliteStore(tmp_path / "responses.sqlite", 2**20, 1000.0),
        allowed_origins=("https://a.example",),
    )
    statuses: dict[int, int] = {}

    async def work() -> None:
        for number in range(count):
            one = case(SEED, number)
            answer = await ask(app, one)
            answer.check(one)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            client.submitted.clear()
        await until(lambda: not app.active and not client.running)

    run(work)
    assert_well(app, client)
    assert statuses[200] > count / 20, "some are still good"
    assert statuses[400] > count / 10, "and many are not"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", WIRE)
def test_bytes_on_the_line(count: int) -> None:
    client = FakeClient()
    app = front(client, slow_client_timeout_s=0.3)

    async def one(port: int, number: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(raw_case(SEED, number))
                reply = b""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        while piece := await reader.read(65536):
                            reply += piece
                where = f"case {number}: {reply[:300]!r}"
                assert not reply.startswith(b"HTTP/1.1 5") or b" 503 " in reply[:20], where
                assert b"internal_error" not in reply, where
            except ConnectionError:
                pass  # hung up on: a good answer to noise
            finally:
                writer.close()
                await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def work() -> None:
        turn = asyncio.Semaphore(AT_ONCE)
        async with listening(app) as port:
            await asyncio.gather(*(one(port, number, turn) for number in range(count)))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                assert (await http.get("/health")).status_code == 200
            await until(lambda: not app.active and not client.running)

    run(work)
    assert_well(app, client)


@pytest.fixture(scope="module")
def small(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "16", "--max-model-len", "256", "--check", "--log-level", "warning")
    flags += ("--slow-client-timeout", "1")
    with running(tmp_path_factory.mktemp("fuzzed"), tiny_model, *SMALL, *flags) as server:
        yield server


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", SERVER)
def test_bodies_against_a_whole_server(small: Server, count: int) -> None:
    engine = small.engine_pids()

    def one(number: int) -> int:
        path, body = json_case(SEED, number)
        content = json.dumps(body).encode()
        answer = small.http.post(f"{small.url}{path}", content=content, headers={"Content-Type": "application/json"})
        where = f"case {number}: {path} {content[:300]!r} → {answer.text[:300]}"
        assert answer.status_code in EXPECTED, where
        assert "internal_error" not in answer.text, where
        return answer.status_code

    with ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = list(pool.map(one, range(count)))
    assert statuses.count(200) > count / 20
    assert_server_well(small, engine)


def assert_server_well(server: Server, engine: list[int]) -> None:
    server.wait_until_idle()
    assert server.engine_pids() == engine, "the engine did not have to be started again"
    assert server.complete(max_tokens=2).status_code == 200
    assert "Traceback" not in server.log(10**9)


def answer_to(server: Server, request: bytes) -> bytes:
    """All that comes until the server hangs up or has no more to say; nothing if it hung up at once, as it may."""
    reply = b""
    with connect(server) as line, contextlib.suppress(ConnectionError, TimeoutError):
        line.settimeout(3.0)
        line.sendall(request)
        while piece := line.recv(65536):
            reply += piece
    return reply


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", LINES)
def test_bytes_on_the_line_of_a_whole_server(small: Server, count: int) -> None:
    engine = small.engine_pids()

    def one(number: int) -> int:
        reply = answer_to(small, raw_case(SEED, number))
        where = f"case {number}: {reply[:300]!r}"
        assert b"internal_error" not in reply, where
        if not reply:
            return 0
        status = int(reply.split(b" ", 2)[1])
        assert status in EXPECTED or status == 100, where
        return status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = list(pool.map(one, range(count)))
    assert statuses.count(200) > count / 50
    assert statuses.count(400) > count / 10
    assert_server_well(small, engine)
