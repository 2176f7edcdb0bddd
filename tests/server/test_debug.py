"""GET /debug/requests: access, and what `shoal top` makes of it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvloop

from shoal.cli import main
from shoal.cli.top import screen
from shoal.keys.api_key import ApiKey, digest_of
from shoal.server.app import Front
from tests.server.fake_client import FakeClient
from tests.server.fronts import error_of, front, listening

ADMIN, PLAIN = "sk-admin-key", "sk-plain-key"
KEYS = (
    ApiKey(name="ops", digest=digest_of(ADMIN), admin=True),
    ApiKey(name="plain", digest=digest_of(PLAIN)),
)
STATE: dict[str, Any] = {
    "epoch": 1,
    "places": 64,
    "running": 1,
    "waiting": 1,
    "in_flight": 2,
    "blocks": {"held": 30, "cached": 10, "total": 100},
    "fronts": {"front-0.0": 2},
    "requests": [
        {
            "id": "abc.0.0", "state": "running", "why": "output", "tenant": "alice", "tier": "gold",
            "prompt_tokens": 12, "output_tokens": 3, "max_tokens": 16, "cached_tokens": 0, "blocks": 2,
            "preemptions": 0, "age_s": 0.25, "slack_s": -0.5,
        },
        {"id": "abd.0.0", "state": "waiting", "why": "all 1 places are taken", "tenant": "bob\x1b[2J", "place": 0},
    ],
}  # fmt: skip


class Telling(FakeClient):
    async def ask(self, what: str, engine: int | None = None) -> Any:
        if what == "passes":
            return {"depth": 2, "passes": {"busy_s": [0.1]}}
        return json.loads(json.dumps(STATE)) if what == "state" else await super().ask(what)


def look(app: Front, host: str = "127.0.0.1", path: str = "/debug/requests", **headers: str) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=(host, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await http.get(path, headers=named)

    return asyncio.run(asked())


def test_without_keys_this_machine_may_look_and_no_other() -> None:
    app = front(Telling())
    for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        answer = look(app, host)
        assert answer.status_code == 200, host
        assert answer.headers["cache-control"] == "no-store"
    for host in ("10.0.0.5", "192.168.1.2", "::2", "::ffff:10.0.0.5", "", "unix"):
        assert error_of(look(app, host), 403)["code"] == "not_admin"


@pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "x_real_ip"])
def test_a_proxy_on_this_machine_does_not_make_its_clients_local(name: str) -> None:
    error_of(look(front(Telling()), **{name: "10.0.0.5"}), 403)


def test_with_keys_only_an_admin_has_access_and_from_anywhere() -> None:
    app = front(Telling(), api_keys=KEYS)
    assert look(app, "10.0.0.5", authorization=f"Bearer {ADMIN}").status_code == 200
    assert "admin: true" in error_of(look(app, authorization=f"Bearer {PLAIN}"), 403)["message"]
    error_of(look(app), 401)


def test_it_shows_what_the_engine_and_the_front_do() -> None:
    told = look(front(Telling())).json()
    assert told["requests"] == STATE["requests"]
    assert told["engine"]["blocks"]["held"] == 30
    assert told["front"] == {"active": 0, "streams": 0, "draining": False}


def test_the_latest_passes_are_for_the_same_people() -> None:
    path = "/debug/passes"
    assert look(front(Telling()), path=path).json() == {
        "engines": [{"engine": 0, "depth": 2, "passes": {"busy_s": [0.1]}}]
    }
    error_of(look(front(Telling()), "10.0.0.5", path), 403)
    app = front(Telling(), api_keys=KEYS)
    assert look(app, "10.0.0.5", path, authorization=f"Bearer {ADMIN}").status_code == 200
    error_of(look(app, path=path, authorization=f"Bearer {PLAIN}"), 403)
    error_of(look(app, path=path), 401)


@pytest.mark.parametrize("path", ["/debug/requests", "/debug/passes"])
def test_while_the_engine_is_down_it_is_a_503(path: str) -> None:
    client = FakeClient()
    client.go_down()
    error_of(look(front(client), path=path), 503)


# ---- shoal top ------------------------------------------------------------------------------------------------------


def test_the_screen_shows_all_requests_and_fits() -> None:
    told = {"engine": STATE, "requests": STATE["requests"]}
    lines = screen(told, "http://x", width=200, height=20)
    text = "\n".join(lines)
    for part in ("running 1/64", "waiting 1", "30%", "alice", "gold", "-0.5", "all 1 places are taken", "2 times"):
        assert part in text
    assert "\x1b" not in text, "no request can write to the terminal"
    small = screen({"engine": STATE, "requests": STATE["requests"] * 50}, "http://x", width=40, height=12)
    assert len(small) <= 12
    assert all(len(line) <= 40 for line in small)
    assert small[-1].endswith("more")


@contextmanager
def on_a_thread(app: Front) -> Iterator[str]:
    """The URL of a front that answers beside the test."""
    found: list[int] = []
    ready, done = threading.Event(), threading.Event()

    async def work() -> None:
        async with listening(app) as port:
            found.append(port)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.01)

    def live() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work())

    thread = threading.Thread(target=live)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        done.set()
        thread.join(30)


def test_top_prints_one_look(capsys: pytest.CaptureFixture[str]) -> None:
    with on_a_thread(front(Telling(), api_keys=KEYS)) as url:
        assert main(["top", "--url", url, "--api-key", ADMIN, "--once"]) == 0
        assert "alice" in capsys.readouterr().out
        assert main(["top", "--url", url, "--api-key", ADMIN, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["requests"] == STATE["requests"]
        assert main(["top", "--url", url, "--api-key", PLAIN, "--once"]) == 2
        assert "403" in capsys.readouterr().err
        assert main(["top", "--url", url, "--once"]) == 2
        assert "401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--url", "file:///etc/passwd"], "must begin with http"),
        (["--interval", "0"], "--interval must be"),
    ],
)
def test_top_says_what_is_wrong(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", *flags]) == 2
    assert says in capsys.readouterr().err
