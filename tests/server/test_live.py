"""GET /live and /live/events: access, the ring, watchers, and an engine over the real wire."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shoal.core.live import LiveBatch, LivePass, LiveRequest
from shoal.keys.api_key import ApiKey, digest_of
from shoal.obs.live import FORMAT
from shoal.server import live
from shoal.server.app import Front
from shoal.server.live import LiveHub, LiveRing
from shoal.server.live_routes import record
from tests.engine.hosts import EngineThread, Notes, connected, make_job
from tests.engine.hosts import until as eventually
from tests.server.fake_client import FakeClient
from tests.server.fronts import error_of, front, listening, run

ADMIN, PLAIN = "sk-admin-key", "sk-plain-key"
KEYS = (
    ApiKey(name="ops", digest=digest_of(ADMIN), admin=True),
    ApiKey(name="plain", digest=digest_of(PLAIN)),
)


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def now_s(self) -> float:
        return self.now

    def wait_until(self, at_s: float) -> None:
        self.now = max(self.now, at_s)


def batch(at_s: float, came: list[LiveRequest], passes: list[LivePass], gone: list[int] | None = None) -> LiveBatch:
    return LiveBatch(at_s, came, gone or [], msgspec.msgpack.encode(passes))


def look(app: Front, path: str, host: str = "127.0.0.1", key: str = "") -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=(host, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})

    return asyncio.run(asked())


@pytest.mark.parametrize("path", ["/live", "/live/events"])
def test_only_operators_may_watch(path: str) -> None:
    open_app, keyed = front(), front(api_keys=KEYS)
    error_of(look(open_app, path, host="10.1.2.3"), 403)
    error_of(look(keyed, path, key=PLAIN), 403)
    answer = look(keyed, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic"), "so that a browser prompts for the key"


@pytest.mark.parametrize("key", ["", ADMIN])
def test_the_page_has_a_strict_policy(key: str) -> None:
    answer = look(front(api_keys=KEYS if key else ()), "/live", key=key)
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_a_page_that_asks_whether_it_may_watch_keeps_its_connection() -> None:
    """HEAD has no body, so the browser sends its next request on the same connection at once."""

    async def story() -> None:
        async with listening(front()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for what in (b"HEAD /live/events", b"GET /live"):
                writer.write(what + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
                assert head.startswith(b"HTTP/1.1 200")
            writer.close()

    run(story)


@asynccontextmanager
async def watching(port: int) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("GET", f"http://127.0.0.1:{port}/live/events") as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def lines() -> AsyncIterator[dict[str, Any]]:
            async for line in answer.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield lines()


def test_two_watchers_see_the_past_and_what_comes() -> None:
    async def story() -> None:
        app = front()
        ring = app.live.ring
        now_s = ring.clock.now_s()
        ring.up(0, 0)
        first = LivePass(1, now_s, now_s, [1], [0], [5], first=[1])
        ring.batch(0, 0, batch(now_s, [LiveRequest(1, "job.0", now_s, prompt=5)], [first]))
        assert ring.listener is None, "nothing is summarised while nothing watches"
        async with listening(app) as port, watching(port) as one, watching(port) as other:
            for lines in (one, other):
                head = await anext(lines)
                assert head["shoal_live"] == FORMAT
                assert head["model"] == "tiny"
                assert (await until_found(lines, "new"))[0][1] == "job.0"
            now_s = ring.clock.now_s()
            ring.batch(0, 0, batch(now_s, [], [LivePass(2, now_s, now_s, [1], [5], [1])]))
            for lines in (one, other):
                found = [entry for entry in await until_found(lines, "passes") if "in" in entry]
                assert not found or found[0]["in"] == [1]

    run(story)


async def until_found(lines: AsyncIterator[dict[str, Any]], name: str) -> Any:
    async for line in lines:
        if name in line:
            return line[name]
    raise AssertionError(f"the stream ended without {name}")


def test_the_ring_is_bounded_and_keeps_what_is_needed_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "RING_BYTES", 20_000)
    clock = HandClock()
    ring = LiveRing(clock)
    ring.up(0, 3)
    ring.batch(0, 3, batch(100.0, [LiveRequest(1, "stays", 100.0), LiveRequest(2, "goes", 100.0)], []))
    for number in range(200):
        clock.now += 0.1
        gone = [2] if number == 0 else None
        ring.batch(0, 3, batch(clock.now, [], [LivePass(number, clock.now, clock.now, [1] * 50)], gone))
    assert ring.size <= 20_000
    assert ring.states == {0: (3, True)}
    assert [one.id for one in ring.base[0, 3].values()] == ["stays"]
    clock.now += live.RING_S + 1
    ring.down(0)
    assert len(ring.entries) == 1


def test_an_engine_on_another_machine_has_its_own_clock() -> None:
    clock = HandClock()
    ring = LiveRing(clock)
    ring.batch(0, 0, batch(5000.0, [LiveRequest(1, "a", 4999.0)], [LivePass(1, 4999.5, 5000.0, [1], [0], [3])]))
    summary = live.LiveSummary(0.0)
    live.take(summary, ring.entries[0])
    line = summary.line(100.0)
    assert line["new"][0][3] == 99.0
    assert line["passes"][0]["b"] == 100.0


def test_an_engine_tells_fronts_that_follow_and_a_restart_is_seen(tmp_path: Path) -> None:
    async def story() -> None:
        engine = EngineThread(tmp_path)
        ring = LiveRing()
        try:
            async with connected(tmp_path) as client:
                client.live = ring
                ring.up(0, 0)
                engine.kill()
                await eventually(lambda: client.info is None, "the engine is gone")
                engine = EngineThread(tmp_path, epoch=1)
                await eventually(lambda: client.info, "the engine is back")
                notes = Notes()
                client.submit(make_job("job"), notes)
                await notes.done.wait()
                hub = LiveHub(ring, client, dict)
                lines: list[dict[str, Any]] = []
                async with hub.watch() as queue:
                    while not any(one[0] == "end" for line in lines for one in line.get("ev", ())):
                        lines.append(json.loads(await queue.get() or b""))
                kinds = [one[0] for line in lines for one in line.get("ev", ())]
                assert kinds == ["up", "down", "up", "admit", "first", "end"]
                assert [one[1] for line in lines for one in line.get("new", ())] == ["job.0"]
                assert any("views" in line for line in lines)
        finally:
            engine.kill()

    run(story)


def test_a_recording_is_a_file_of_lines(tmp_path: Path) -> None:
    async def story() -> None:
        ring = LiveRing()
        ring.up(0, 0)
        hub = LiveHub(ring, FakeClient(), lambda: {"model": "tiny"})
        path = tmp_path / "run.jsonl"
        task = asyncio.create_task(record(hub, path, again=False))
        await eventually(lambda: path.exists() and path.read_text().count("\n") >= 2, "lines are written")
        task.cancel()
        await asyncio.wait({task})
        head, *lines = map(json.loads, path.read_text().splitlines())
        assert head["shoal_live"] == FORMAT
        assert lines[0]["ev"][0][0] == "up"

    run(story)
