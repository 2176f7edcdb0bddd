"""The live page in a real browser: on made-up engines with 1, 64 and 500 requests, on restarts, and on recordings."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.live_recording import write_recording
from shoal.cli.live import joined, make_handler
from tests.bench.recorded import recorded_run, requests
from tests.server.axe import LOOKS, serious
from tests.server.chromium import CHROMIUM, Browser, Tab
from tests.server.live_traffic import LiveServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
MODEL = "shoalLive.panes()[0].model"
ALIVE = f"[...{MODEL}.lanes.values()].filter((lane) => lane.end === Infinity)"


@contextmanager
def serving(**options: Any) -> Iterator[LiveServer]:
    server = LiveServer(**{"blocks": 600, "max_num_batched_tokens": 256, **options})
    try:
        yield server
    finally:
        server.close()


@contextmanager
def opened(browser: Browser, url: str, width: int = 1280, height: int = 860, dark: bool = False) -> Iterator[Tab]:
    """The page; at its end, nothing may have left the host, and the console may have no complaint."""
    tab = browser.open()
    tab.call("Network.enable")
    tab.look(width=width, height=height, dark=dark)
    tab.go(url)
    yield tab
    host = url.partition("/live")[0]
    for event in browser.events:
        if event.get("sessionId") == tab.session and event["method"] == "Network.requestWillBeSent":
            assert event["params"]["request"]["url"].startswith(host)
    assert tab.complaints() == []
    tab.close()


@pytest.fixture(scope="module")
def busy() -> Iterator[LiveServer]:
    """Some requests of several tenants that run for as long as the tests take, and some that wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.obs.live.WINDOW_S", 3600.0)  # first tokens come once, and percentiles tell of them
        with serving(max_num_seqs=8, max_model_len=200_000, blocks=40_000, pass_s=0.02) as server:
            server.submit(4, most=100_000, tenant="ada", tier="premium")
            server.submit(4, most=100_000, tenant="bob", tier="standard")
            server.submit(3, most=50, tenant="flood", tier="batch")
            yield server


def under(tab: Tab, tenant: str) -> tuple[float, float]:
    """Where a lane of this tenant is on the screen, once it is drawn."""
    part = f"[...pane.model.lanes.values()].find((lane) => lane.tenant === {json.dumps(tenant)})?.parts.at(-1)"
    tab.wait(
        f"""(() => {{
          const pane = shoalLive.panes()[0], part = {part};
          const band = pane.drawn?.layout.bands.find((one) => one.engine.number === part?.engine);
          return band?.slots.includes(part.slot);
        }})()"""
    )
    x, y = tab.run(
        f"""(() => {{
          const pane = shoalLive.panes()[0], {{layout, scale}} = pane.drawn, box = pane.lanes.getBoundingClientRect();
          const part = {part};
          const band = layout.bands.find((one) => one.engine.number === part.engine);
          const t = (Math.max(part.a, scale.from) + shoalLive.view.edge) / 2;
          return [box.left + scale.x(t), box.top + band.y + (band.slots.indexOf(part.slot) + 0.5) * layout.step];
        }})()"""
    )
    return x, y


def mouse(tab: Tab, kind: str, x: float, y: float) -> None:
    more = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
    tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def test_without_a_request_the_page_says_what_it_will_show(browser: Browser) -> None:
    with serving() as server, opened(browser, server.url) as tab:
        tab.wait("document.getElementById('state').dataset.is === 'live'")
        tab.wait("!document.querySelector('.empty').hidden")
        assert "No request in sight" in tab.text(".empty")
        assert "/v1/completions" in tab.text(".empty code")
        server.submit(1)
        tab.wait("document.querySelector('.empty').hidden")


def test_nothing_moves_once_lanes_are_drawn(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url) as tab:
        slow = "{const real = requestAnimationFrame; requestAnimationFrame = (act) => real((now) => act(now / 10));}"
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=slow)  # all that is seen within the first moment
        tab.go(busy.url)
        where = "document.querySelector('.lanes').getBoundingClientRect().y"
        tab.wait("globalThis.shoalLive?.panes()[0].drawn")
        first = tab.run(where)
        tab.wait("document.querySelectorAll('#queue li').length === 3")  # the panels have been filled again
        assert tab.run(where) == first


@pytest.mark.parametrize("count", [1, 64, pytest.param(500, marks=pytest.mark.slow)])
def test_every_running_request_is_a_lane(browser: Browser, count: int) -> None:
    many = {"max_num_seqs": count, "max_num_batched_tokens": 1024, "blocks": 4000 + 200 * count}
    with serving(max_model_len=50_000, **many) as server:
        server.submit(count, prompt=20, most=40_000)
        with opened(browser, server.url) as tab:
            tab.wait(f"{MODEL}.engine(0).decoding.size === {count}")
            assert tab.run(f"{ALIVE}.length") == count
            tab.wait(f"document.querySelector('#tiles dd')?.textContent === '{count}'")
            drawn = tab.run("shoalLive.panes()[0].drawn.layout.bands[0].slots.length")
            assert drawn == count
            tab.wait(f"{PAINTED} > {0.001 if count == 1 else 0.02}")  # decodes are drawn


# the share of pixels of the lanes' canvas that are blue
PAINTED = """(() => {
  const {lanes} = shoalLive.panes()[0], {width, height} = lanes;
  const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
  copy.drawImage(lanes, 0, 0);
  const {data} = copy.getImageData(0, 0, width, height);
  let blue = 0;
  for (let at = 0; at < data.length; at += 4) blue += data[at + 3] > 0 && data[at + 2] > data[at] + 60;
  return blue / (width * height);
})()"""


def test_pause_scrub_and_zoom(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url) as tab:
        tab.wait(f"{MODEL}.end > {MODEL}.begin + 1.5")
        tab.click("#pause")
        edge = tab.run("shoalLive.view.edge")
        newest = tab.run(f"{MODEL}.end")
        tab.wait(f"{MODEL}.end > {newest} + 0.5")
        assert tab.run("shoalLive.view.edge") == edge, "time stands still, while lines still come"
        assert tab.text("#state") == "paused"
        tab.run(
            "(() => { const one = document.getElementById('scrub'); one.value = '0';"
            " one.dispatchEvent(new Event('input')); })()"
        )
        assert tab.run("shoalLive.view.edge") < edge, "back to the beginning, however long the page has been open"
        span = tab.run("shoalLive.view.span")
        tab.click("#in")
        assert tab.run("shoalLive.view.span") < span
        tab.click("#out")
        assert tab.run("shoalLive.view.span") == span
        tab.click("#pause")
        tab.wait(f"shoalLive.view.edge > {edge}")


def test_before_the_first_frame_is_drawn_it_pauses_at_the_newest_line(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url) as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source="requestAnimationFrame = () => 0;")
        tab.go(busy.url)
        tab.wait(f"globalThis.shoalLive && {MODEL}.end > 0.5")
        tab.click("#pause")
        assert tab.run("shoalLive.view.edge") > 0.5
        assert tab.run("shoalLive.frames()") == 0


def test_hover_and_click_tell_a_request(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url) as tab:
        tab.wait(f"{MODEL}.engine(0).decoding.size === 8 && shoalLive.panes()[0].drawn")
        under(tab, "ada")  # what is not drawn yet is not drawn while the page is paused
        tab.click("#pause")
        x, y = under(tab, "ada")
        mouse(tab, "mouseMoved", x, y)
        tab.wait("!document.getElementById('tip').hidden")
        assert re.search(r"· ada · premium\nprompt \d+, out [\d,]+ of 100,000\nengine 0 · running", tab.text("#tip"))
        for kind in ("mousePressed", "mouseReleased"):
            mouse(tab, kind, x, y)
        tab.wait("!document.getElementById('story').hidden")
        tab.wait("document.querySelectorAll('#story-list li').length >= 5")
        story = tab.text("#story")
        for part in ("tenant ada, tier premium", "arrived", "admitted on engine 0", "prompt computed", "first token"):
            assert part in story
        tab.click("#story-close")
        assert tab.run("document.getElementById('story').hidden")


def test_blocks_say_whose_they_are_and_the_queue_why_it_waits(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url) as tab:
        tab.wait("document.querySelector('#maps canvas')?.grid && document.querySelector('#queue li')")
        assert "all 8 places are taken" in tab.text("#queue")
        assert "3 wait" in tab.text("#queue-count")
        box = tab.run(
            "(({x, y}) => [x, y])(document.querySelector('#maps canvas').getBoundingClientRect())"
        )  # block 0 is held by the first request
        mouse(tab, "mouseMoved", box[0] + 1, box[1] + 1)
        tab.wait("!document.getElementById('tip').hidden")
        assert re.search(r"blocks? 0.*: held\n\w+ · (ada|bob)", tab.text("#tip"))


def test_a_filter_leaves_the_lanes_of_one_tenant(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url) as tab:
        tab.wait("document.querySelectorAll('#tenant option').length === 4")
        tab.run(
            "(() => { const one = document.getElementById('tenant'); one.value = 'bob';"
            " one.dispatchEvent(new Event('change')); })()"
        )
        tab.wait("shoalLive.panes()[0].drawn.layout.bands[0].slots.length === 4")
        tab.wait("/bob/.test(document.getElementById('tenants').innerText)")
        promises = tab.text("#promises")
        assert "premium" in promises
        assert "TTFT" in promises


def test_light_and_dark(browser: Browser, busy: LiveServer) -> None:
    with opened(browser, busy.url, dark=True) as tab:
        tab.wait(f"{MODEL}.engine(0).decoding.size === 8")
        paper = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        tab.wait(f"{paper} < 60")
        tab.click("#theme")
        tab.wait(f"{paper} > 200")
        tab.go(busy.url)
        tab.wait(f"{paper} > 200")  # the choice is kept


def test_two_watchers_see_the_same(browser: Browser, busy: LiveServer) -> None:
    ids = f"JSON.stringify({ALIVE}.map((lane) => lane.id).sort())"
    with opened(browser, busy.url) as one, opened(browser, busy.url) as other:
        for tab in (one, other):
            tab.wait(f"{MODEL}.engine(0).decoding.size === 8")
        assert one.run(ids) == other.run(ids)


# some captions are only shown for seconds
KEEP_CAPTIONS = """(() => {
  const caption = document.getElementById("caption");
  window.captions = [caption.textContent];
  new MutationObserver(() => captions.push(caption.textContent)).observe(
    caption, {childList: true, characterData: true, subtree: true});
})()"""


def test_requests_go_on_in_their_lanes_after_a_restart(browser: Browser) -> None:
    with serving(max_num_seqs=4, max_model_len=3000) as server:
        server.submit(4, prompt=40, most=2000)
        with opened(browser, f"{server.url}#demo") as tab:
            tab.wait(f"{MODEL}.engine(0).decoding.size === 4")
            server.kill()
            tab.wait(f"{MODEL}.engine(0).outages.length === 1")
            tab.wait("/The engine has died/.test(document.getElementById('caption').textContent)")
            assert tab.run(f"{ALIVE}.length") == 4
            tab.run(KEEP_CAPTIONS)
            server.restart()
            tab.wait(f"{MODEL}.engine(0).outages[0].b < Infinity && {MODEL}.engine(0).decoding.size === 4")
            assert tab.run(f"{MODEL}.lanes.size") == 4, "no new lane: they go on"
            assert tab.run(f"{ALIVE}.every((lane) => lane.again > 40)"), "what they had is computed again"
            tab.wait("captions.some((text) => /no token is lost/.test(text))")


def test_requests_that_move_to_another_engine_jump(browser: Browser) -> None:
    with serving(engines=2, max_num_seqs=4, max_model_len=3000) as server:
        server.submit(2, prompt=40, most=2000, engine=0)
        server.submit(2, prompt=40, most=2000, engine=1)
        with opened(browser, server.url) as tab:
            tab.wait(f"{MODEL}.engine(0).decoding.size === 2 && {MODEL}.engine(1).decoding.size === 2")
            server.kill(0)
            server.restart(0, onto=1)
            tab.wait(f"{MODEL}.engine(1).decoding.size === 4")
            assert tab.run(f"{ALIVE}.filter((lane) => lane.parts.length === 2).length") == 2
            tab.wait("/2 of 2/.test(document.getElementById('tiles').innerText)")


@contextmanager
def recorded(path: Path, *labels: str, count: int = 6) -> Iterator[str]:
    arriving = requests(count, rate=60.0)
    runs = [recorded_run(label, arriving, max_num_seqs=slots) for label, slots in zip(labels, (1, 2, 3), strict=False)]
    write_recording(path, runs, model="made up")
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler("\n".join(joined([str(path)])).encode()))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/live#replay"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_recording_plays_in_three_panes_on_one_clock(browser: Browser, tmp_path: Path) -> None:
    with recorded(tmp_path / "r.jsonl", "one", "two", "three") as url, opened(browser, url) as tab:
        tab.wait("shoalLive.panes().length === 3")
        assert tab.texts(".pane h2 > span:first-child") == ["one", "two", "three"]
        tab.wait("document.getElementById('state').dataset.is === 'paused'")  # it has played to its end
        tab.wait("/6 done/.test(document.querySelector('.pane h2 .note').textContent)")
        ends = tab.run(
            "shoalLive.panes().map((pane) => Math.max(...[...pane.model.lanes.values()].map((one) => one.end)))"
        )
        assert ends == sorted(ends, reverse=True), "more slots, sooner done"
        tab.run(
            "(() => { const one = document.getElementById('scrub'); one.value = '500';"
            " one.dispatchEvent(new Event('input')); })()"
        )
        done = "shoalLive.panes().map((pane) => pane.model.markAt(shoalLive.view.edge).finished)"
        first, _, last = tab.run(done)
        assert first < last, "one clock for all panes"


def test_a_recording_of_a_run_shows_its_blocks_queue_and_tenants(browser: Browser, tmp_path: Path) -> None:
    """As complete as that of a server; of several panes, those of the one that is chosen."""
    with recorded(tmp_path / "r.jsonl", "one", "two", count=12) as url, opened(browser, url) as tab:
        tab.wait("shoalLive.panes().length === 2")
        assert not tab.text("#queue-count"), "beside several panes figures are shown on request"
        tab.click(".pane:nth-child(2) h2 button")
        scrub = "(() => {{ const one = document.getElementById('scrub'); one.value = '{}';"
        tab.run(scrub.format(300) + " one.dispatchEvent(new Event('input')); })()")
        tab.wait("/all 2 places are taken/.test(document.getElementById('queue').textContent)")
        tab.wait("/(left|late)/.test(document.getElementById('queue').textContent)")
        tab.wait("document.querySelector('#maps canvas')?.grid.count > 100")
        assert {"ada", "bob", "cleo"} >= {text.split("\n")[0] for text in tab.texts("#tenants li")} != set()
        tab.click(".pane:nth-child(2) h2 button")
        assert not tab.text("#queue-count")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_it_fits_and_axe_finds_no_serious_issue(browser: Browser, busy: LiveServer, width: int, dark: bool) -> None:
    with opened(browser, f"{busy.url}#demo", width=width, height=800, dark=dark) as tab:
        tab.wait("document.querySelector('#maps canvas')?.grid && document.querySelector('#promises td')")
        assert tab.run("document.documentElement.scrollWidth") <= width, "it must not scroll sideways"
        assert serious(tab) == []
