"""The report: complete, escaped, self-contained, and visible in a real browser."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal.bench import page, plots
from tests.bench.conftest import Drawn, rows_of
from tests.bench.made import empty_run, failed_run, made_run
from tests.server.chromium import Browser
from tests.server.page_server import needs_chromium

META = {
    "model": "a-model in float32",
    "machine": {"cores": 2, "memory": "8 GiB"},
    "trace": "fitted to a chat trace",
    "scale": 0.25,
    "capped share": "4% of requests",
    "command": "shoal compare --rates 2,6 --out report",
}
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Collects tags, attributes and text; complains about tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def write(drawn: Drawn, path: Path, meta: dict[str, Any] = META) -> str:
    page.write_html(path, meta, drawn.rows, {name: svg.read_text() for name, svg in drawn.svgs.items()})
    return path.read_text()


def test_the_page_holds_every_preset_and_every_plot(drawn: Drawn, tmp_path: Path) -> None:
    read = Reader(write(drawn, tmp_path / "report.html"))
    assert len(read.named("svg")) == len(drawn.svgs) == len(read.named("figure"))
    for run in drawn.runs:
        assert run.label in read.text
    for name in drawn.svgs:
        heading, how = page.CAPTIONS[name]
        assert heading in read.text
        assert how in read.text
    for text in ("a-model in float32", "cores 2", "4% of requests", "0.25", META["command"]):
        assert str(text) in read.text


def test_every_plot_has_a_caption() -> None:
    assert set(page.CAPTIONS) == {*plots.PLOTS, "giant"}


def test_the_page_fetches_nothing(drawn: Drawn, tmp_path: Path) -> None:
    text = write(drawn, tmp_path / "report.html")
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"url\((?!#)|@import", text)
    for tag, attrs in Reader(text).tags:
        assert tag not in ("link", "iframe", "object", "embed")
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith(("#", "data:image/png"))


def test_ids_are_unique_and_found(drawn: Drawn, tmp_path: Path) -> None:
    text = write(drawn, tmp_path / "report.html")
    ids = [str(attrs["id"]) for _, attrs in Reader(text).tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)) <= {(one, "") for one in ids} | {
        ("", one) for one in ids
    }


def test_all_input_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"&|`*\n_"
    run = made_run("shoal", 1.0, count=3)
    run.preset = run.label = evil
    svg = '<svg xmlns="http://www.w3.org/2000/svg" onload="x()"><script>x()</script><a href="http://x">t</a></svg>'
    meta = dict.fromkeys(("title", "summary", "command", evil), evil)
    page.write_html(tmp_path / "report.html", meta, rows_of([run]), {evil: svg})
    read = Reader((tmp_path / "report.html").read_text())
    assert len(read.named("script")) == 1
    assert "onload" not in read.named("svg")[0]
    assert "href" not in read.named("a")[-1]
    page.write_markdown(tmp_path / "report.md", meta, rows_of([run]), {evil: tmp_path / "a b(c).png"})
    text = (tmp_path / "report.md").read_text()
    assert "\n<" not in text
    assert "](a%20b%28c%29.png)" in text


def test_the_best_of_each_rate_is_marked() -> None:
    rows = [{"label": name, "rate": rate, "finished": 1, "output_tok_s": value} for name, rate, value in WORTH]
    column = next(column for column in page.COLUMNS if column.key == "output_tok_s")
    assert page.best(rows, column) == {1, 3}


WORTH = [("a", 1.0, 5.0), ("b", 1.0, 9.0), ("a", 2.0, 7.0), ("b", 2.0, 8.0), ("alone", 3.0, 1.0)]


def test_an_answer_that_is_not_streamed_is_never_best_in_gaps(drawn: Drawn) -> None:
    column = next(column for column in page.COLUMNS if column.key == "gap_s.p99")
    winners = {drawn.rows[at]["preset"] for at in page.best(drawn.rows, column)}
    assert winners
    assert not winners & {"transformers", "fastertransformer", "classic-dynamic"}


def test_no_row_is_best_when_most_are_equal() -> None:
    rows = [{"label": "x", "rate": 1.0, "finished": 1, "wasted_share": value} for value in (0.0, 0.0, 0.0, 0.4)]
    assert page.best(rows, next(column for column in page.COLUMNS if column.key == "wasted_share")) == set()


@pytest.mark.parametrize(
    "runs", [[], [empty_run("vllm", 0.0)], [failed_run("orca", 1.0), made_run("shoal", 1.0, count=2)]]
)
def test_runs_that_failed(runs: list[Any], tmp_path: Path) -> None:
    page.write_html(tmp_path / "report.html", {}, rows_of(runs), {})
    page.write_markdown(tmp_path / "report.md", {}, rows_of(runs), {})
    found = Reader((tmp_path / "report.html").read_text()).text
    assert ("Nothing was run" if not runs else "No request finished with") in found


def test_the_markdown_table_is_aligned(drawn: Drawn, tmp_path: Path) -> None:
    images = {name: svg.with_suffix(".png") for name, svg in drawn.svgs.items()}
    page.write_markdown(tmp_path / "report.md", META, drawn.rows, images)
    lines = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == len(drawn.rows) + 2
    bars = {tuple(at for at, sign in enumerate(line) if sign == "|") for line in lines}
    assert len(bars) == 1
    assert len(bars.pop()) == len(page.COLUMNS) + 1
    for link in re.findall(r"!\[.*?\]\((.*?)\)", (tmp_path / "report.md").read_text()):
        assert (tmp_path / link).is_file()


# ---- in a real browser

MEASURE = """[...document.querySelectorAll("figure svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll("path, use, text")].filter((one) => {
    const {width, height, left, right} = one.getBoundingClientRect();
    return width + height > 0 && right > box.left && left < box.right;
  }).length;
  return [svg.closest("section").id, box.left, box.width, box.height, shapes];
})"""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_plot_is_visible_in_chromium(drawn: Drawn, browser: Browser, tmp_path: Path, dark: bool) -> None:
    write(drawn, tmp_path / "report.html")
    tab = browser.open()
    tab.look(width=1400, height=6000, dark=dark)
    tab.go((tmp_path / "report.html").as_uri())
    boxes = tab.run(MEASURE)
    assert [box[0] for box in boxes] == [f"plot-{name}" for name in drawn.svgs]
    for name, left, width, height, shapes in boxes:
        assert left >= 0
        assert width > 500
        assert height > 150
        assert shapes > 30, f"{name}: nothing drawn"
    tab.shot(shot := tmp_path / "shot.png")
    assert_not_blank(shot, dark)
    tab.click("table.figures thead th:nth-child(3) button")
    top = tab.run("document.querySelector('table.figures tbody tr').cells[2].dataset.v")
    assert float(top) == max(row["output_tok_s"] for row in drawn.rows), "a click sorts the table"
    assert tab.complaints() == []
    tab.close()


def assert_not_blank(shot: Path, dark: bool) -> None:
    """Something is drawn at every height of the page, on paper of the right colour."""
    image = Image.open(shot).convert("L")
    assert image.size == (1400, 6000)
    corner = image.getpixel((2, 2))
    assert isinstance(corner, int)
    assert corner < 60 if dark else corner > 200
    for top in range(0, 5000, 500):
        shades = image.crop((0, top, 1400, top + 500)).histogram()
        seen = [shade for shade, many in enumerate(shades) if many]
        assert seen[-1] - seen[0] > 100, f"blank from {top} to {top + 500}"
