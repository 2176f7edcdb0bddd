"""The live page in the report: one file, a strict policy, and a timeline that plays in a real browser."""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from shoal.bench.live_recording import panes_of, recording
from shoal.bench.page import write_html
from shoal.bench.page_replay import ReplayFrame, joined, replay_frame
from tests.bench.conftest import rows_of
from tests.bench.made import made_run
from tests.bench.recorded import recorded_run
from tests.server.chromium import CHROMIUM, Browser

STATIC = files("shoal.server") / "static"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M0 0h9"/></svg>'


@pytest.fixture(scope="module")
def frame() -> ReplayFrame:
    runs = [recorded_run("shoal"), recorded_run("orca", max_num_seqs=2)]
    panes = panes_of(runs)
    return replay_frame(recording(panes, model="a <model>"), STATIC, len(panes))


@pytest.fixture(scope="module")
def report(frame: ReplayFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(path, {}, rows_of([made_run("shoal", 1.0, count=3)]), {"timeline": SVG, "kv": SVG}, frame)
    return path


def test_the_report_is_one_file_with_a_strict_policy(report: Path) -> None:
    text = report.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "script-src 'sha256-" in policy[1]
    assert "script-src 'unsafe-inline'" not in policy[1]
    assert policy[1].count("'sha256-") == 2
    assert text.count("<iframe") == 1
    assert not re.search(r" src=(?!&quot;data:)", text)
    assert not re.search(r"https?:", text)


def test_modules_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"odd\.js cannot be joined"):
        joined([("odd", 'export * from "./other.js";')])


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_timeline_plays(report: Path, browser: Browser) -> None:
    tab = browser.open(report.as_uri())
    tab.look(width=1280, height=900)
    tab.wait("frames[0].shoalLive?.panes().length === 2")
    tab.wait("frames[0].document.getElementById('state').textContent === 'paused'")
    tab.wait("frames[0].shoalLive.panes()[1].drawn?.layout.bands[0].slots.length > 2")
    names = "[...frames[0].document.querySelectorAll('.pane h2 > span:first-child')].map((one) => one.textContent)"
    assert tab.run(names) == ["orca", "shoal"]
    assert tab.run("frames[0].document.getElementById('model').textContent") == "a <model>"
    edge = tab.run("frames[0].shoalLive.view.edge")
    assert tab.run("frames[0].document.scrollingElement.scrollWidth <= frames[0].innerWidth")
    tab.run("frames[0].document.getElementById('pause').click()")  # from the beginning
    tab.wait(f"frames[0].shoalLive.view.edge < {edge} && frames[0].shoalLive.view.edge > 0.1")
    assert tab.complaints() == []
    assert {url.partition(":")[0] for url in tab.requests()} <= {"file", "data"}
    for place in ("document", "frames[0].document"):
        tab.run(f"{place}.body.append(Object.assign({place}.createElement('script'), {{text: 'top.evil = 1'}}))")
    assert tab.run("typeof top.evil") == "undefined", "no other script runs, in the frame neither"
