"""A thousand lanes at a hundred passes a second: the page stays right, and what it is sent stays small."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server.live import LINE_S
from tests.server.chromium import CHROMIUM, Browser
from tests.server.live_events import MadeUpPasses, MadeUpServer

LANES, BATCHES = 1000, 50  # five seconds
MOST_BYTES = 256_000  # of a line; one with all lanes has about 90,000
MODEL = "shoalLive.panes()[0].model"


@pytest.fixture
def server() -> Iterator[MadeUpServer]:
    server = MadeUpServer(MadeUpPasses(LANES), BATCHES)
    yield server
    server.close()


def read_lines(url: str, found: list[bytes], until: threading.Event) -> None:
    with httpx.stream("GET", f"{url}/events", timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                found.append(line.removeprefix("data: ").encode())
            if until.is_set():
                return


def test_lines_are_few_and_small(server: MadeUpServer) -> None:
    """However fast the engine is: at most ten a second, each bounded by the number of lanes."""
    found: list[bytes] = []
    reader = threading.Thread(target=read_lines, args=(server.url, found, server.told))
    reader.start()
    server.go()
    assert server.told.wait(60)
    reader.join(30)
    assert not reader.is_alive()
    lines: list[dict[str, Any]] = [json.loads(line) for line in found[1:]]
    times = [line["t"] for line in lines]
    assert min(later - earlier for earlier, later in pairwise(times)) > 0.99 * LINE_S
    assert max(map(len, found)) < MOST_BYTES
    assert sum(len(line.get("passes", ())) for line in lines) > 10 * len(lines) / 2, "a line has many passes"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_stays_right(server: MadeUpServer, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        tabs = [browser.open(server.url) for _ in range(2)]
        for tab in tabs:
            tab.look(width=1280, height=860, dark=False)
            tab.wait("document.getElementById('state').dataset.is === 'live'")
        server.go()
        assert server.told.wait(60)
        made = server.passes
        for tab in tabs:
            tab.wait(f"{MODEL}.engine(0).passes.length === {made.step}")
            assert tab.run(f"{MODEL}.engine(0).decoding.size") == LANES
            assert tab.run(f"{MODEL}.finished") == made.ended
            tokens = tab.run(
                f"Object.fromEntries([...{MODEL}.lanes.values()].filter((lane) => lane.end === Infinity)"
                f".map((lane) => [lane.id, {MODEL}.tokensOf(lane)]))"
            )
            assert tokens == {f"{number:06x}.0": count for number, count in made.outputs.items()}
            tab.wait(f"shoalLive.panes()[0].drawn.layout.bands[0].slots.length >= {LANES}")
            tab.wait("document.querySelector('#tiles dd')?.textContent === '1,000'")
            tab.wait("document.querySelectorAll('#queue li').length === 6")
            assert tab.complaints() == []
    finally:
        browser.close()
