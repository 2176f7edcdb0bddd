"""How long does the live page take to draw? Frame times in Chromium, by the number of running requests.

    .venv/bin/python -m benchmarks.live_frames --lanes 64,500,1000 --seconds 20

A real front, told of made-up passes (a hundred a second, some requests replaced every few passes), and a page in
headless Chromium without a GPU. `draw` is the time of the page's script in a frame in which it drew something, `line`
the time it takes to read a summary, `apart` the time between two such frames (the page draws at most 30 a second).
`bytes` are those of a summary. Times in ms. `cpu` is the CPU time of the page's main thread for one drawn frame,
summaries and panels included, over the whole run: it says more than times where other programs run. Needs Chromium and
the packages of the tests.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.server.chromium import Browser, Tab
from tests.server.live_events import BATCH_S, MadeUpPasses, MadeUpServer

# wraps what the page calls, before its scripts run
PROBE = """
globalThis.probe = {draw: [], line: [], at: [], bytes: []};
const later = requestAnimationFrame.bind(window);
globalThis.requestAnimationFrame = (act) => later((now) => {
  const drawn = globalThis.shoalLive?.frames?.() ?? 0, begun = performance.now();
  act(now);
  if ((globalThis.shoalLive?.frames?.() ?? 0) === drawn) return;
  probe.draw.push(performance.now() - begun);
  probe.at.push(begun);
});
Object.defineProperty(EventSource.prototype, "onmessage", {set(act) {
  this.addEventListener("message", (event) => {
    const begun = performance.now();
    act(event);
    probe.line.push(performance.now() - begun);
    probe.bytes.push(event.data.length);
  });
}});
"""


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    at = [statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1]]
    return " ".join(f"{value:>8.1f}" for value in at)


def measure(tab: Tab, lanes: int, seconds: float, span_s: float, output: int) -> None:
    every = max(1, output // lanes)  # so many passes until the first of them ends
    made = MadeUpPasses(lanes, every=every, turn=max(1, every * lanes // output))
    server = MadeUpServer(made, round(seconds / BATCH_S))
    try:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=PROBE)
        tab.look(width=1440, height=900, dark=False)
        tab.call("Performance.enable", timeDomain="threadTicks")
        tab.go(server.url)
        tab.wait("document.getElementById('state').dataset.is === 'live'")
        server.go()
        while tab.run("shoalLive.view.span") < span_s:
            tab.run("document.getElementById('out').click()")
        before_s = busy_s(tab)
        while not server.told.is_set():
            time.sleep(0.2)
        found, cpu_s = tab.run("probe"), busy_s(tab) - before_s
    finally:
        server.close()
    half = len(found["draw"]) // 2  # the second half has the most to draw
    apart = [later - earlier for earlier, later in zip(found["at"][half:], found["at"][half + 1 :], strict=False)]
    parts = [spread(found["draw"][half:]), spread(found["line"][len(found["line"]) // 2 :]), spread(apart)]
    cpu_ms = 1000 * cpu_s / len(found["draw"])
    print(f"{lanes:>5}   {'   '.join(parts)}   {max(found['bytes']):>8,}   {cpu_ms:>6.1f}", flush=True)


def busy_s(tab: Tab) -> float:
    """CPU seconds of the page's main thread."""
    metrics = {one["name"]: one["value"] for one in tab.call("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="64,500,1000")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--span", type=float, default=20.0, help="seconds shown (default: 20)")
    parser.add_argument("--output", type=int, default=1000, help="tokens of an answer (default: 1000)")
    args = parser.parse_args()
    three = f"{'p50':>8} {'p95':>8} {'max':>8}"
    print(f"{'':5}   {'draw':<26}   {'line':<26}   {'apart':<26}   {'bytes':>8}   {'cpu':>6}")
    print(f"lanes   {three}   {three}   {three}   {'max':>8}", flush=True)
    for lanes in map(int, args.lanes.split(",")):
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(Path(profile) / "profile")
            try:
                measure(browser.open(), lanes, args.seconds, args.span, args.output)
            finally:
                browser.close()


if __name__ == "__main__":
    main()
