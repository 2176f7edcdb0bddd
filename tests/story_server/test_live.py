"""The live page of a real server: requests appear as lanes, go on when the engine is killed, and are recorded; and the
demo, with its own crash."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.cli.live import joined
from tests.server.chromium import CHROMIUM, Browser
from tests.story_server.servers import SMALL, Server, family_of, name_of, running

MODEL = "shoalLive.panes()[0].model"
ALIVE = f"[...{MODEL}.lanes.values()].filter((lane) => lane.end === Infinity)"


def ask(server: Server, most: int, told: list[str]) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7] * 9, "max_tokens": most, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        told.extend(answer.iter_lines())


def kill_engine(server: Server) -> None:
    engines = [pid for pid in family_of(server.process.pid) if name_of(pid) == "shoal-engine"]
    assert len(engines) == 1
    os.kill(engines[0], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_streams_go_on_in_their_lanes_when_the_engine_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    record, told = tmp_path / "run.jsonl", [list[str]() for _ in range(3)]
    with running(tmp_path, tiny_model, *SMALL, "--max-model-len", "8192", "--record", str(record)) as server:
        asked = [threading.Thread(target=ask, args=(server, 6000, one)) for one in told]
        for one in asked:
            one.start()
        browser = Browser(tmp_path / "profile")
        try:
            tab = browser.open(f"{server.url}/live")
            tab.wait(f"{MODEL}.engine(0).decoding.size === 3")
            tab.wait("/3 held|\\d+ held/.test(document.getElementById('blocks-count').textContent)")
            kill_engine(server)
            tab.wait(f"{MODEL}.engine(0).outages.length === 1")
            tab.wait(f"{MODEL}.engine(0).outages[0].b < Infinity && {MODEL}.engine(0).decoding.size === 3")
            assert tab.run(f"{MODEL}.lanes.size") == 3
            assert tab.run(f"{ALIVE}.every((lane) => lane.again > 0)")
            assert "tiny" in tab.text("#model")
            assert tab.complaints() == []
        finally:
            browser.close()
        for one in asked:
            one.join()
    assert all(one[-2] == "data: [DONE]" or "data: [DONE]" in one for one in told)
    check_recording(record)


async def hold_streams(url: str, count: int, seen: threading.Event) -> None:
    """So many streams at once, which are left when the page has been looked at."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "tiny",
            "prompt": [5, 6, 7 + number % 90],
            "max_tokens": 7000,
            "ignore_eos": True,
            "stream": True,
        }
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                if seen.is_set():
                    return

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        await asyncio.gather(*(one(http, number) for number in range(count)))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("count", [1, 64, 500])
def test_every_stream_of_a_real_server_is_a_lane(tiny_model: Path, tmp_path: Path, count: int) -> None:
    more = ("--max-model-len", "8192", "--max-num-seqs", str(count), "--kv-memory", "1GiB")
    seen = threading.Event()
    with running(tmp_path, tiny_model, *SMALL, *more) as server:
        asking = threading.Thread(target=lambda: asyncio.run(hold_streams(server.url, count, seen)))
        asking.start()
        browser = Browser(tmp_path / "profile")
        try:
            tab = browser.open(f"{server.url}/live")
            tab.wait(f"{MODEL}.engine(0).decoding.size === {count}")
            assert tab.run(f"{ALIVE}.length") == count
            tab.wait(f"shoalLive.panes()[0].drawn.layout.bands[0].slots.length >= {count}")
            tab.wait(f"document.querySelector('#tiles dd')?.textContent === '{count}'")
            tab.wait("document.querySelector('#maps canvas')?.grid")
            assert tab.complaints() == []
        finally:
            seen.set()
            browser.close()
            asking.join(120)
        assert not asking.is_alive()


def check_recording(path: Path) -> None:
    head, *lines = [json.loads(line) for line in joined([str(path)])]
    assert head["panes"] == ["run"]
    events = [one for line in lines for one in line.get("ev", ())]
    assert {one[0] for one in events} >= {"up", "down", "move", "admit", "first"}
    lanes: dict[str, Any] = {one[1]: one for line in lines for one in line.get("new", ())}
    assert len(lanes) == 3
    assert sum(one["d"] for line in lines for one in line.get("passes", ())) > 3 * 1000
    assert "data" not in path.read_text(), "no text of a request"


@pytest.mark.slow
def test_the_demo_loses_no_request_in_a_crash(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "demo", str(tiny_model), "--no-open", "--giant-tokens", "300"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [*command, "--seconds", "30", "--crash-at", "8"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, env=env, check=True,
    ).stdout  # fmt: skip
    assert "/live#demo" in told
    assert "was killed" in told
    found = re.search(r"(\d+) requests were answered, (\d+) failed", told)
    assert found is not None
    assert int(found[1]) > 0
    assert int(found[2]) == 0
