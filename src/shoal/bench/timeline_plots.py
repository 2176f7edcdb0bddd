"""The batch over time: which requests are in which pass, and how much of a pass is padding.

Knows lanes of requests and how they are drawn. Does not know engines or pages.
"""

from typing import TYPE_CHECKING, Any

from shoal.bench import plot_style
from shoal.bench.lanes import Lane, lanes
from shoal.bench.plot_runs import KINDS, NOTHING, SINCE, Runs, at_highest, axis, wasted
from shoal.bench.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = 24


def timeline_plot(runs: Runs) -> "Figure":
    """Which requests each pass computed, and how much of it was waste: this plot explains the others."""
    rate, mine = at_highest(runs)
    mine = sorted(mine, key=group_first)
    figure = plot_style.new_figure(f"The batch over time, first {LANES} requests at {rate}: hatched is waste", 1.0)
    count = len(mine)
    figure.set_figheight(1.3 + (2.5 if count <= 3 else 2.1) * max(1, count if count <= 3 else (count + 1) // 2))
    until_s = window_s(mine)
    axes = plot_style.small_multiples(figure, count, SINCE, "one lane per request, by arrival")
    for one, run in zip(axes, mine, strict=False):
        timeline_panel(one, run, until_s)
    handles, names = plot_style.swatches(KINDS.values())
    more, their = timeline_marks()
    plot_style.legend(figure, handles + more, names + their)
    return figure


def group_first(run: RunRecord) -> tuple[int, int]:
    """Sort key, oldest technique first: groups, then padded continuous, then ragged."""
    batching, layout = ("static", "dynamic", "continuous"), ("padded", "shrink", "ragged")
    mine = axis(run, "batching"), axis(run, "layout")
    return (
        batching.index(mine[0]) if mine[0] in batching else len(batching),
        layout.index(mine[1]) if mine[1] in layout else len(layout),
    )


def window_s(runs: Runs) -> float:
    """Seconds to show: until the slowest run has served its first requests, at most three times the fastest run's."""
    ends = []
    for run in runs:
        first = sorted(run.requests, key=lambda request: request.arrived_s)[:LANES]
        ended = [request.ended_s for request in first if request.ended_s is not None and request.token_s]
        ends += [max(ended)] if ended else []
    return min(max(ends), 3 * min(ends)) if ends else 1.0


def timeline_panel(axes: "Axes", run: RunRecord, until_s: float) -> None:
    axes.set_xlim(0, until_s)
    axes.set_ylim(LANES, -0.4)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    padded, again, vain = wasted(run)
    share = (padded + again + vain) / max(padded + sum(one.useful for one in run.passes), 1)
    named = [text for text in (axis(run, "batching"), axis(run, "layout"), axis(run, "prefill")) if text]
    plot_style.panel_title(axes, plot_style.safe_label(run.label), " · ".join([*named, f"{share:.0%} wasted"]))
    if not run.passes:
        plot_style.note_empty(axes, NOTHING)
        return
    drawn = lanes(run, LANES, near_s=until_s / 1500)
    axes.set_ylim(max(len(drawn), 6), -0.4)
    wait_lines(axes, drawn, until_s)
    for kind, (_, colour, hatch) in KINDS.items():
        where = [
            (one.from_s, row + 0.08, min(one.to_s, until_s) - one.from_s, 0.84)
            for row, lane in enumerate(drawn)
            for one in lane.pieces
            if one.kind == kind and one.from_s < until_s
        ]
        plot_style.rectangles(axes, where, zorder=2, **plot_style.area(colour, hatch))


def wait_lines(axes: "Axes", drawn: list[Lane], until_s: float) -> None:
    """Thin lines while waiting, a pale band while in the batch, a dot where the client receives the first token."""
    dots, bands = [], []
    for row, lane in enumerate(drawn):
        request = lane.request
        started_s = until_s if request.started_s is None else request.started_s
        axes.plot([request.arrived_s, min(started_s, until_s)], [row + 0.5] * 2, color="#9A9A9A", linewidth=0.8)
        if started_s < until_s:
            ended_s = until_s if request.ended_s is None else min(request.ended_s, until_s)
            bands.append((started_s, row + 0.08, ended_s - started_s, 0.84))
        if request.token_s and request.token_s[0] <= until_s:
            dots.append((request.token_s[0], row + 0.5))
    plot_style.rectangles(axes, bands, zorder=1, **plot_style.area(plot_style.PALE))
    if dots:
        looks: dict[str, Any] = {"s": 9, "color": "white", "edgecolor": plot_style.TEXT, "linewidth": 0.7, "zorder": 4}
        axes.scatter([at_s for at_s, _ in dots], [row for _, row in dots], **looks)


def timeline_marks() -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot = Line2D(
        [], [], marker="o", color="none", markerfacecolor="white", markeredgecolor=plot_style.TEXT, markersize=4
    )
    line = Line2D([], [], color="#9A9A9A", linewidth=0.8)
    names = ["waiting", "in the batch, not computed", "client receives first token"]
    return [line, Patch(**plot_style.area(plot_style.PALE)), dot], names
