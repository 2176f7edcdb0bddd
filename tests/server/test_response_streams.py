"""Responses that are made in the background and streamed: their events are kept, and followed from any point on."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server import response_log
from shoal.server.app import Front
from shoal.server.response_store import SqliteStore
from tests.server.fake_client import FakeClient
from tests.server.fronts import ask, ask_async, error_of, listening, run
from tests.server.test_responses import PATH, events, made, post

BODY = {"input": "Warm?", "background": True, "stream": True, "max_output_tokens": 500}


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "responses.sqlite", 2**20, 1000.0)


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta")


def by_hand(store: SqliteStore) -> tuple[Front, FakeClient]:
    app, client = made("Yes, it is warm.", store=store)
    client.tick_s = None
    return app, client


async def begun(app: Front) -> str:
    while not app.responses.running._running:
        await asyncio.sleep(0.01)
    (id,) = app.responses.running._running
    return id


async def ticks(client: FakeClient, count: int = 10**6) -> None:
    while client.running and count:
        client.tick()
        count -= 1
        await asyncio.sleep(0.01)


def test_events_come_at_once_and_can_be_read_again(store: SqliteStore) -> None:
    app, client = made("Yes, it is warm.", store=store)
    answer = post(app, **BODY)
    found = events(answer)
    assert [one["type"] for one in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["background"] is True
    assert found[-1]["type"] == "response.completed"
    assert text_of(found) == "Yes, it is warm."
    id = found[0]["response"]["id"]
    assert ask(app, "GET", f"{PATH}/{id}").json() == found[-1]["response"]
    other = made(store=SqliteStore(store.path, 2**20, 1000.0))[0]
    for front in (app, other):
        again = ask(front, "GET", f"{PATH}/{id}?stream=true")
        assert again.text == answer.text
        rest = ask(front, "GET", f"{PATH}/{id}?stream=true&starting_after=4")
        assert rest.text == "".join(f"{one}\n\n" for one in answer.text.split("\n\n")[5:-1])
    assert len(client.submitted) == 1


def test_other_fronts_follow_while_it_is_made(store: SqliteStore) -> None:
    app, client = by_hand(store)
    other = made(store=SqliteStore(store.path, 2**20, 1000.0))[0]

    async def work() -> None:
        asked = asyncio.create_task(ask_async(app, "POST", PATH, json=BODY))
        id = await begun(app)
        followers = [asyncio.create_task(ask_async(one, "GET", f"{PATH}/{id}?stream=true")) for one in (app, other)]
        await ticks(client)
        whole = await asked
        assert text_of(events(whole)) == "Yes, it is warm."
        for one in followers:
            assert (await one).text == whole.text

    run(work)


def over_http(app: Front, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with listening(app) as port:
            headers = {"host": "front"}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as http:
                await work(http)

    run(whole)


def test_a_client_that_leaves_goes_on_where_it_was(store: SqliteStore) -> None:
    app, client = by_hand(store)

    async def work(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", PATH, json=BODY) as stream:
            pieces = stream.aiter_bytes()
            seen = b""
            while seen.count(b"output_text.delta") < 4:
                client.tick()
                seen += await anext(pieces)
            await stream.aclose()
        (id,) = app.responses.running._running
        head = await http.head(f"{PATH}/{id}?stream=true")  # ends, although more events come
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")
        await ticks(client)
        number = seen.count(b"event: ") - 1
        rest = (await http.get(f"{PATH}/{id}?stream=true&starting_after={number}")).content
        assert (await http.get(f"{PATH}/{id}?stream=true")).content == seen + rest
        assert rest.count(b"event: response.completed") == 1
        assert not client.aborted

    over_http(app, work)


def test_one_that_is_cancelled_ends_its_streams(store: SqliteStore) -> None:
    app, client = by_hand(store)

    async def work() -> None:
        asked = asyncio.create_task(ask_async(app, "POST", PATH, json=BODY))
        id = await begun(app)
        await ticks(client, 3)
        assert (await ask_async(app, "POST", f"{PATH}/{id}/cancel")).json()["status"] == "cancelled"
        found = events(await asked)
        assert found[-1]["type"] == "response.failed"
        assert found[-1]["response"]["status"] == "cancelled"
        again = await ask_async(app, "GET", f"{PATH}/{id}?stream=true")
        assert events(again) == found

    run(work)


def test_events_beyond_a_limit_are_left_out_before_the_last(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "MOST_BYTES", 3000)
    app, _ = made("Yes, it is warm. " * 9, store=store)
    answer = post(app, **BODY)
    last = answer.text.strip().split("\n\n")[-1]
    assert last.startswith("event: response.completed")
    assert "Yes, it is warm. " * 9 in last
    assert answer.text.count("output_text.delta") < 100


def test_what_has_no_events_is_refused(store: SqliteStore) -> None:
    app, _ = made(store=store)
    for body in ({}, {"stream": True}, {"background": True}):
        answer = post(app, **body)
        id = events(answer)[0]["response"]["id"] if "stream" in body else answer.json()["id"]
        assert error_of(ask(app, "GET", f"{PATH}/{id}?stream=true"), 400)["param"] == "stream"
        assert ask(app, "GET", f"{PATH}/{id}?stream=false").status_code == 200
    id = events(post(app, **BODY))[0]["response"]["id"]
    assert error_of(ask(app, "GET", f"{PATH}/{id}?starting_after=1"), 400)["param"] == "starting_after"
    for wrong in ("x", "-1", "²"):
        url = f"{PATH}/{id}?stream=true&starting_after={wrong}"
        assert error_of(ask(app, "GET", url), 400)["param"] == "starting_after"
    assert error_of(ask(app, "GET", f"{PATH}/resp_none?stream=true"), 404)


def test_events_count_towards_the_store_and_go_with_their_response(store: SqliteStore) -> None:
    app, _ = made("Yes, it is warm. " * 9, store=store)
    id = events(post(app, **BODY))[0]["response"]["id"]
    assert store._file is not None

    def held() -> tuple[int, int]:
        (stored,) = store._thread.submit(lambda: rows("SELECT total(bytes) FROM tenants")).result()
        (parts,) = store._thread.submit(lambda: rows("SELECT count(*) FROM events")).result()
        return int(stored[0]), int(parts[0])

    def rows(query: str) -> list[tuple[int, ...]]:
        assert store._file is not None
        return store._file.execute(query).fetchall()

    with_events, parts = held()
    assert parts >= 2
    plain = post(made("Yes, it is warm. " * 9, store=store)[0], background=True).json()["id"]
    both, _ = held()
    assert both - with_events < with_events, "events are counted"
    for one in (id, plain):
        assert ask(app, "DELETE", f"{PATH}/{one}").status_code == 200
    assert held() == (0, 0)
