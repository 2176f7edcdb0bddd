"""Screenshots and the animation of the live page, taken with Chromium from a real run of `shoal demo`.

    .venv/bin/python -m benchmarks.live_pictures docs/img [MODEL]

Writes live.png, live-dark.png, live-phone.png, live-story.png and live.gif; with --film FILE (a recording of shoal demo
with a crash) live.gif alone, with --panes FILE (a recording of shoal compare or simulate) live-panes.png instead.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor

from shoal.cli.live import joined, make_handler
from tests.server.chromium import Browser, Tab

SIZE = (1440, 900)
FRAMES, FRAME_S, SHOWN_MS, BEFORE_S = 56, 0.4, 160, 6.0
MOST_BYTES = 1_950_000
SMOOTH = Image.Resampling.LANCZOS
SIZES = ((960, 160), (960, 96), (960, 64), (960, 48), (880, 48), (800, 48), (720, 48))  # width and colours to try
CLEAR, BITS = 255, 6  # what leaves a pixel as it was; of a colour's parts

Colours = np.ndarray[Any, np.dtype[np.int32]]  # one in each row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--panes", metavar="FILE", help="a recording with several runs")
    parser.add_argument("--names", metavar="NAMES", help="which of them")
    parser.add_argument("--film", type=Path, metavar="FILE", help="only the animation, of a recording of shoal demo")
    parser.add_argument("--crash-at", type=float, default=34.0, help="second of the crash (default: 34)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            if args.panes:
                take_panes(browser, args)
            elif args.film:
                take_film(browser, args)
            else:
                args.film = Path(profile) / "demo.jsonl"
                take_demo(browser, args)
        finally:
            browser.close()


def take_demo(browser: Browser, args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "shoal", "demo", *([args.model] if args.model else []), "--no-open"]
    command += ["--seconds", "600", "--crash-at", str(args.crash_at), "--record", str(args.film)]
    demo = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert demo.stdout is not None
    assert demo.stdin is not None
    try:
        found = re.search(r"(http\S+)", demo.stdout.readline())
        assert found is not None, "the demo did not start"
        begun_s = time.monotonic()
        tab = browser.open()
        tab.look(width=SIZE[0], height=SIZE[1], dark=False)
        tab.go(found[1])
        wait(begun_s + args.crash_at - 6)
        tab.shot(args.folder / "live.png")
        wait(begun_s + args.crash_at + FRAMES * FRAME_S)
        pick_giant(tab)
        tab.shot(args.folder / "live-story.png")
        tab.run("document.getElementById('story-close').click()")
        tab.look(dark=True)
        time.sleep(1.0)
        tab.shot(args.folder / "live-dark.png")
        tab.look(width=390, height=844, dark=False)
        time.sleep(1.0)
        tab.shot(args.folder / "live-phone.png")
        assert tab.complaints() == []
        demo.stdin.write("q\n")
        demo.stdin.flush()
        print(demo.stdout.read())
    finally:
        demo.terminate()
        demo.wait(60)
    take_film(browser, args)


def wait(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))


def take_film(browser: Browser, args: argparse.Namespace) -> None:
    """The animation, of a recording: so that each frame is of its time, however long a picture takes."""
    lines = list(joined([str(args.film)]))
    events = [event for line in lines for event in json.loads(line).get("ev", ())]
    crashed_s = next(event[1] for event in events if event[0] == "down")
    with replaying(lines) as url:
        tab = browser.open()
        tab.look(width=SIZE[0], height=SIZE[1], dark=False)
        tab.go(url)
        tab.wait("shoalLive.panes().length === 1")
        tab.run("document.getElementById('explain').click()")
        while tab.run("shoalLive.view.span") > 20:
            tab.run("document.getElementById('in').click()")
        write_gif(film(tab, crashed_s - BEFORE_S), args.folder / "live.gif")
        assert tab.complaints() == []


def film(tab: Tab, begin_s: float) -> list[Image.Image]:
    frames = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FRAMES):
            drawn = tab.run(f"(shoalLive.scrub({begin_s + number * FRAME_S}), shoalLive.frames())")
            if not number:  # what a viewer of the animation sees
                tab.run("document.getElementById('state').dataset.is = 'live'")
                tab.run("document.getElementById('state').textContent = 'playing'")
                tab.run("document.getElementById('pause').textContent = 'Pause'")
            tab.wait(f"shoalLive.frames() > {drawn}")
            time.sleep(0.35)  # the panels follow
            path = Path(folder) / "frame.png"
            tab.shot(path)
            frames.append(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))
    return frames


@contextmanager
def replaying(lines: list[str]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler("\n".join(lines).encode()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/live#replay"
    server.shutdown()


def write_gif(frames: list[Image.Image], path: Path) -> None:
    """One palette for all frames: the page's own colours, and the most frequent blends of them, as many as there is
    room for. What stands still is transparent in the next frame and takes none. No dithering: flat areas stay flat."""
    levels = np.arange(2**BITS) * 255 // (2**BITS - 1)
    cells = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
    for width, colours in SIZES:
        small = [frame.resize((width, frame.height * width // frame.width), SMOOTH) for frame in frames]
        places = (np.stack([np.asarray(frame, np.int32) for frame in small]) * (2**BITS - 1) + 127) // 255
        places = (places[..., 0] << 2 * BITS) | (places[..., 1] << BITS) | places[..., 2]
        counts = np.bincount(places.ravel(), minlength=len(cells))
        palette = choose_palette(page_colours(), cells, counts, colours)
        drawn = nearest(palette, cells)[places]
        still = drawn[1:] == drawn[:-1]
        drawn[1:][still] = CLEAR
        save_frames(drawn, palette, path)
        if path.stat().st_size < MOST_BYTES:
            break
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {width} pixels wide, {colours} colours")


def save_frames(drawn: "np.ndarray[Any, np.dtype[np.uint8]]", palette: Colours, path: Path) -> None:
    images = []
    for one in drawn:
        image = Image.fromarray(one)
        image.putpalette([*palette.ravel().tolist(), *[0] * (768 - palette.size)])
        images.append(image)
    how: dict[str, Any] = {"duration": SHOWN_MS, "loop": 0, "disposal": 1, "transparency": CLEAR, "optimize": False}
    images[0].save(path, save_all=True, append_images=images[1:], **how)


def page_colours() -> Colours:
    """Of the light theme."""
    style = (files("shoal.server") / "static" / "live.css").read_text()
    light, rest = style.split(':root[data-theme="dark"]', 1)
    tints = "".join(line for line in rest.splitlines() if ".tint" in line)
    found = dict.fromkeys(re.findall(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b", light + tints))
    return np.array([ImageColor.getrgb(one) for one in found], dtype=np.int32)


def choose_palette(fixed: Colours, cells: Colours, counts: "np.ndarray[Any, np.dtype[np.int64]]", most: int) -> Colours:
    """The fixed colours, and again and again the one that is worst served by those chosen so far, by how often it is
    seen and how far off it is."""
    seen = np.flatnonzero(counts)
    colours, weights = cells[seen], np.sqrt(counts[seen])
    chosen = list(fixed)
    off = ((colours[:, None, :] - fixed[None]) ** 2).sum(axis=2).min(axis=1)
    while len(chosen) < most and off.any():
        worst = int((off * weights).argmax())
        chosen.append(colours[worst])
        off = np.minimum(off, ((colours - colours[worst]) ** 2).sum(axis=1))
    return np.array(chosen, dtype=np.int32)


def nearest(palette: Colours, cells: Colours) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The number of the closest colour, for each cell."""
    parts = np.array_split(cells, 64)
    found = [((part[:, None, :] - palette[None]) ** 2).sum(axis=2).argmin(axis=1) for part in parts]
    return np.concatenate(found).astype(np.uint8)


def pick_giant(tab: Tab) -> None:
    """Click the lane of the giant prompt, if it is in sight, or of the request that is oldest."""
    x, y = tab.run(
        """(() => {
          const pane = shoalLive.panes()[0], {layout, scale} = pane.drawn, box = pane.lanes.getBoundingClientRect();
          const seen = [...pane.model.lanes.values()].filter((lane) => lane.end > scale.from + 1);
          const lane = seen.find((one) => one.tenant === "giant") ?? seen[0], part = lane.parts.at(-1);
          const band = layout.bands.find((one) => one.engine.number === part.engine);
          const t = (Math.max(part.a, scale.from) + Math.min(part.b, shoalLive.view.edge)) / 2;
          return [box.left + scale.x(t), box.top + band.y + (band.slots.indexOf(part.slot) + 0.5) * layout.step];
        })()"""
    )
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    time.sleep(0.8)


def take_panes(browser: Browser, args: argparse.Namespace) -> None:
    with replaying(list(joined([args.panes], args.names.split(",") if args.names else None))) as url:
        tab = browser.open()
        tab.look(width=1600, height=800, dark=False)
        tab.go(url)
        tab.wait("shoalLive.panes().length > 0")
        tab.run(
            "(() => { const one = document.getElementById('scrub'); one.value = '320';"
            " one.dispatchEvent(new Event('input')); })()"
        )
        time.sleep(1.0)
        tab.shot(args.folder / "live-panes.png")


if __name__ == "__main__":
    main()
