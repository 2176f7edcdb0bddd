"""The plots: each draws any input, and agrees with the records."""

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.bench import (
    giant_plots,
    latency_plots,
    pass_plots,
    plot_runs,
    plot_style,
    plots,
    policy_plots,
    timeline_plots,
)
from shoal.bench.lanes import AGAIN, DECODE, PAD, PROMPT, VAIN, Piece, lanes, rectangle_width, spans
from shoal.bench.policies import Finding
from shoal.bench.record import PassRecord, RequestRecord, RunRecord
from tests.bench.conftest import PROMISE, Drawn
from tests.bench.made import PRESETS, empty_run, failed_run, giant_run, made_run

NAMES = [*PRESETS, "mine", "yours"]
ALL: dict[str, Callable[[list[RunRecord]], Any]] = {
    name: (lambda runs, draw=draw: draw(runs, PROMISE)) for name, draw in plots.PLOTS.items()
}
ALL["giant"] = lambda runs: giant_plots.giant_plot({run.label: run for run in runs[:3]})


def texts(svg: Path) -> str:
    return " ".join(ElementTree.fromstring(svg.read_text()).itertext())


def test_every_plot_is_written_as_svg_and_png(drawn: Drawn) -> None:
    assert set(drawn.svgs) == {*plots.PLOTS, "giant"}
    for path in drawn.svgs.values():
        root = ElementTree.fromstring(path.read_text())
        assert root.tag.endswith("svg")
        image = Image.open(path.with_suffix(".png")).convert("L")
        assert image.width > 1000
        assert image.getextrema()[0] < 80, f"{path.name} is blank"


@pytest.mark.parametrize("name", ["timeline", "kv", "tokens", "throughput", "latency", "waiting"])
def test_every_preset_is_named_in(drawn: Drawn, name: str) -> None:
    text = texts(drawn.svgs[name])
    for run in drawn.runs:
        assert run.label in text


def test_work_shows_one_run_for_each_prefill_policy(drawn: Drawn) -> None:
    text = texts(drawn.svgs["work"])
    assert all(name in text for name in ("inline", "exclusive", "chunked", "longest pass"))
    _, mine = plot_runs.at_middle(drawn.runs)
    assert all(run.settings["layout"] == "ragged" for run in pass_plots.one_per_prefill(mine))


def test_the_giants_figures_are_written_out(drawn: Drawn) -> None:
    text = texts(drawn.svgs["giant"])
    worst = max(gap for request in giant_run("inline").requests[:16] for gap in request.gaps_s)
    assert f"largest gap {worst * 1e3:,.0f} ms" in text
    ttft = giant_run("chunked").requests[16].ttft_s
    assert ttft is not None
    assert f"after {ttft:.2f} s" in text


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize(("presets", "rates"), [(1, 1), pytest.param(2, 6, marks=pytest.mark.slow), (14, 1)])
def test_few_and_many(name: str, presets: int, rates: int) -> None:
    runs = [made_run(preset, rate, count=8) for preset in NAMES[-presets:] for rate in range(rates)]
    ALL[name](runs).draw_without_rendering()


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("runs", [[], [empty_run("vllm", 1.0)]], ids=["nothing", "empty"])
def test_runs_without_a_request(name: str, runs: list[RunRecord]) -> None:
    ALL[name](runs).draw_without_rendering()


@pytest.mark.parametrize("name", list(ALL))
def test_runs_that_failed(name: str, tmp_path: Path) -> None:
    runs = [failed_run("vllm", 1.0), made_run("shoal", 1.0, count=3), empty_run("orca", 1.0)]
    assert ElementTree.fromstring(plot_style.save(ALL[name](runs), tmp_path, name).read_text()) is not None


STRANGE = ["$x$ $", "_hidden", "<script>&\"'", "a\nb\x00c", "\N{FISH}" * 40, "x" * 300, ""]


@pytest.mark.parametrize(
    "labels", [STRANGE, *(pytest.param([label], marks=pytest.mark.slow) for label in STRANGE)], ids=repr
)
def test_strange_labels(labels: list[str], tmp_path: Path) -> None:
    runs = [made_run("shoal", 2.0, count=3) for _ in labels]
    for run, label in zip(runs, labels, strict=True):
        run.preset = run.label = label
    for name in ("timeline", "tokens", "throughput"):
        ElementTree.fromstring(plot_style.save(ALL[name](runs), tmp_path, name).read_text())


def test_titles_and_legends_do_not_overlap() -> None:
    runs = [made_run(preset, 6.0, count=24) for preset in NAMES]
    for run in runs:
        run.label = f"{run.preset}(group=16, window=0.05)"
    for draw in (timeline_plots.timeline_plot, pass_plots.kv_plot):
        figure = draw(runs)
        figure.draw_without_rendering()
        for axes in figure.axes:
            left, right = axes._left_title.get_window_extent(), axes._right_title.get_window_extent()  # type: ignore[attr-defined]
            assert left.x1 < right.x0 or not right.width
            assert axes.get_window_extent().y0 > figure.legends[0].get_window_extent().y1


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    runs = [made_run(preset, 4.0, count=6) for preset in ("orca", "transformers")]
    once, again = (plot_style.save(timeline_plots.timeline_plot(runs), tmp_path / folder, "t") for folder in "ab")
    assert once.read_bytes() == again.read_bytes()
    assert once.with_suffix(".png").read_bytes() == again.with_suffix(".png").read_bytes()


def test_no_global_state_is_left_behind(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot_style.save(pass_plots.tokens_plot([made_run("orca", 1.0, count=3)]), tmp_path, "tokens")
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = "import sys, shoal.bench.plots, shoal.bench.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_at_most_three_lines_are_highlighted_and_all_are_named() -> None:
    runs = [made_run(preset, rate, count=12) for preset in PRESETS for rate in (2.0, 6.0)]
    chosen = plot_runs.highlighted(runs)
    assert chosen[0] == "shoal"
    assert chosen[1] in ("transformers", "fastertransformer", "classic-dynamic")
    assert len(chosen) == 3
    looks = plot_runs.preset_styles(runs)
    assert [name for name, style in looks.items() if style.strong] == [name for name in PRESETS if name in chosen]
    assert len({(style.colour, str(style.line)) for style in looks.values()}) == len(PRESETS)
    for draw in (latency_plots.sweep_plot, latency_plots.latency_plot):
        figure = draw(runs, PROMISE)
        strong = {line.get_color() for one in figure.axes for line in one.get_lines()} & set(plot_style.COLOURS)
        assert len(strong) == 3
        assert {text.get_text() for text in figure.legends[0].get_texts()} == {run.label for run in runs}
    few = plot_runs.preset_styles(runs[:6])
    assert all(style.strong for style in few.values()), "of three lines none is grey"


def a_finding(runs: int, scale: float) -> Finding:
    names = [f"policy {number}" for number in range(runs)]
    made = {name: made_run("shoal", 4.0, count=12) for name in names}
    for run in made.values():
        for request in run.requests:
            request.token_s = [request.arrived_s + scale * (at - request.arrived_s) for at in request.token_s]
    kinds = dict.fromkeys(names, ["premium", "batch"] * 6)
    return Finding("overload", "a load", made, kinds, [], {}, {"ttft": 2.0, "gap": 0.5})


@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])
def test_policies_are_drawn_as_everything_else_is(scale: float) -> None:
    figure = policy_plots.finding_plot(a_finding(5, scale))
    figure.draw_without_rendering()
    assert len(figure.axes) == 4
    colours = {line.get_color() for one in figure.axes for line in one.get_lines()}
    assert len(colours & set(plot_style.COLOURS)) == 3
    notes = [text.get_text() for one in figure.axes for text in one.texts]
    assert notes == ["promise: 2 s", "promise: 0.5 s"], "only premium requests have a promise"
    assert len(figure.legends[0].get_texts()) == 5


@pytest.mark.parametrize("name", ["throughput", "latency", "giant", "policies"])
@pytest.mark.parametrize("stretch", [0.02, 30.0])
def test_ticks_can_be_read(name: str, stretch: float) -> None:
    """There are two at least, and none overlaps another."""
    runs = [made_run(preset, rate, count=10) for preset in ("transformers", "orca", "shoal") for rate in (1.0, 8.0)]
    for run in runs:
        for request in run.requests:
            request.token_s = [request.arrived_s + stretch * (at - request.arrived_s) for at in request.token_s]
    figure = ALL[name](runs) if name in ALL else policy_plots.finding_plot(a_finding(3, stretch))
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis, which in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            low, high = sorted(axis.get_view_interval())
            inside = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            shown = [tick.label1 for tick in inside if tick.label1.get_visible() and tick.label1.get_text()]
            ends = sorted((box.x0, box.x1) if which == "x" else (box.y0, box.y1)
                          for box in (text.get_window_extent() for text in shown))  # fmt: skip
            assert all(before[1] < after[0] for before, after in pairwise(ends)), f"{name}: {which} ticks overlap"
            told = axis.get_label_text() and axes.axison and axes.get_lines()
            assert len(shown) >= 2 or not told, f"{name}: one tick tells no scale"


def test_fourteen_presets_can_be_told_apart() -> None:
    looks = plot_style.styles(NAMES)
    assert len({(style.colour, str(style.line)) for style in looks.values()}) == 14
    assert looks["shoal"] == plot_style.styles(["shoal"])["shoal"], "the same colour in every report"
    for name in ("transformers", "fastertransformer", "classic-dynamic"):  # a single point has no line
        assert looks[name].colour != looks["shoal"].colour
        assert looks[name].marker not in plot_style.MARKERS


# ---- lanes


def a_pass(from_s: float, to_s: float, *rows: tuple[int, int, int], padded: int = 0, dead: int = 0) -> PassRecord:
    return PassRecord(from_s, to_s, rows, sum(row[2] for row in rows), padded, 0, dead, 64, 0, len(rows), 0, 0, 1)


def a_run(requests: list[RequestRecord], *passes: PassRecord) -> RunRecord:
    return RunRecord("p", "p", 1.0, {}, 4, requests, list(passes), 9.0, 9.0)


def test_a_prompt_that_joins_a_rectangle_pads_every_row() -> None:
    run = a_run(
        [RequestRecord(0, 2, 3), RequestRecord(0, 4, 1)],
        a_pass(0, 1, (0, 0, 2)),
        a_pass(1, 5, (0, 2, 1), (1, 0, 4), padded=3),
        a_pass(5, 6, (0, 3, 1), padded=1, dead=1),
    )
    old, new = lanes(run, 2)
    assert old.pieces == [Piece(PROMPT, 0, 1), Piece(DECODE, 1, 2), Piece(PAD, 2, 5), Piece(DECODE, 5, 6)]
    assert new.pieces == [Piece(PROMPT, 1, 5), Piece(PAD, 5, 6)]


def test_lost_positions_are_recomputed() -> None:
    run = a_run([RequestRecord(0, 4, 3)], a_pass(0, 1, (0, 0, 4)), a_pass(2, 3, (0, 0, 4)), a_pass(3, 4, (0, 4, 1)))
    assert [piece.kind for piece in lanes(run, 1)[0].pieces] == [PROMPT, AGAIN, DECODE]


def test_rounding_carries_no_piece_into_the_next_pass() -> None:
    assert 0.07 + (0.85 - 0.07) > 0.85
    run = a_run([RequestRecord(0, 4, 2)], a_pass(0.07, 0.85, (0, 0, 4)), a_pass(0.85, 1, (0, 4, 1)))
    assert lanes(run, 1)[0].pieces == [Piece(PROMPT, 0.07, 0.85), Piece(DECODE, 0.85, 1)]


def test_what_is_computed_after_the_end_or_rejected_is_in_vain() -> None:
    late = PassRecord(3, 4, ((0, 4, 1), (1, 4, 1)), 2, 0, 0, 0, 64, 0, 2, 0, 0, 1, vain=1, late=(0,))
    run = a_run(
        [RequestRecord(0, 2, 3), RequestRecord(0, 2, 4)],
        a_pass(0, 1, (0, 0, 2), (1, 0, 2)),
        a_pass(1, 3, (0, 2, 4), (1, 2, 2)),  # three drafts, of which one is right; one that is right
        late,
    )
    ended, alive = lanes(run, 2)
    assert ended.pieces == [Piece(PROMPT, 0, 1), Piece(DECODE, 1, 2), Piece(VAIN, 2, 4)]
    assert alive.pieces == [Piece(PROMPT, 0, 1), Piece(DECODE, 1, 4)]


def test_work_in_vain_is_hatched_and_not_blue() -> None:
    rows = tuple((number, 4, 1) for number in range(4))
    one = PassRecord(0, 1, rows, 4, 2, 0, 0, 64, 0, 4, 0, 0, 1, vain=3, late=(0, 1, 2))
    run = a_run([RequestRecord(0, 2, 3)] * 3 + [RequestRecord(0, 2, 9)], one)
    assert pass_plots.split(one, run.requests) == {DECODE: 1, PROMPT: 0, AGAIN: 0, VAIN: 3, PAD: 2}
    figure = pass_plots.tokens_plot([run])
    bars = {bar.get_hatch(): bar.get_width() for bar in figure.axes[0].patches if bar.get_width()}
    assert bars == {None: 1, plot_style.VAIN_HATCH: 3, plot_style.PADDING_HATCH: 2}
    assert "50% in vain" in [text.get_text().split(", ")[1] for text in figure.axes[0].texts]


def test_a_pass_planned_early_starts_when_the_last_one_ends() -> None:
    passes = [a_pass(0, 2, (0, 0, 1)), a_pass(1, 3, (0, 1, 1)), a_pass(7, 8, (0, 2, 1))]
    assert [(from_s, to_s) for from_s, to_s, _ in spans(passes)] == [(0, 2), (2, 3), (7, 8)]


def test_padding_without_a_rectangle_is_in_no_lane() -> None:
    assert rectangle_width(a_pass(0, 1, (0, 0, 8), (1, 9, 1), padded=7)) == 8
    assert rectangle_width(a_pass(0, 1, (0, 0, 8), (1, 9, 1), padded=3)) == 0, "rounded up, not a rectangle"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=14),
    st.sampled_from(sorted(PRESETS)),
)
def test_grey_is_exactly_the_padding_counted(drawn_requests: list[tuple[float, int, int]], preset: str) -> None:
    requests = [RequestRecord(*one) for one in drawn_requests]
    run = made_run(preset, 1.0, requests=requests)
    drawn = lanes(run, len(requests))
    grey_s = sum(piece.to_s - piece.from_s for lane in drawn for piece in lane.pieces if piece.kind == PAD)
    due_s = 0.0
    for from_s, to_s, one in spans(run.passes):
        due_s += (to_s - from_s) * one.padded / max(rectangle_width(one), 1)
    assert grey_s == pytest.approx(due_s, abs=1e-6)
    for lane in drawn:
        edges = [edge for piece in lane.pieces for edge in (piece.from_s, piece.to_s)]
        assert edges == sorted(edges), "pieces of a lane overlap"


def test_the_toy_reproduces_the_known_case() -> None:
    """400/50/200/30 outputs in one static group: 680 of 1,600."""
    requests = [RequestRecord(0.0, 1, output) for output in (400, 50, 200, 30)]
    run = made_run("transformers", 0.0, requests=requests)
    assert sum(one.useful for one in run.passes) == 680
    assert sum(one.useful + one.padded for one in run.passes) == 1600
