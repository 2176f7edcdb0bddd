"""Pictures of speculation.py: tokens a pass and speed by kind of text, and what is left of them under load.

Knows the figures that speculation.py keeps, and how they are drawn; knows no engine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench import plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
OFF_COLOUR, TARGET_COLOUR = plot_style.SOFT, plot_style.TEXT
KIND_NAMES = {"chat": "open chats", "quote": "samples of a quotation"}


def draw(kept: dict[str, Any], folder: Path) -> list[Path]:
    """The pictures that these figures are enough for."""
    found = []
    if kept["rows"]:
        found.append(plot_style.save(by_workload(kept), folder, "speculation"))
    if kept["load"]:
        found.append(plot_style.save(by_load(kept), folder, "speculation-load"))
    return found


def about(kept: dict[str, Any]) -> str:
    return f"{kept['model']}, {kept['dtype']}, {kept['threads']} CPU thread{'s' * (kept['threads'] > 1)}"


def by_workload(kept: dict[str, Any]) -> "Figure":
    """Tokens a pass on the left, speed on the right; one bar for each kind of text."""
    rows: Sequence[Row] = kept["rows"]
    figure = plot_style.new_figure(
        f"One request with --speculate {kept['speculate']}: {about(kept)}", 1.3 + 0.42 * len(rows)
    )
    left, right = plot_style.panels(figure, 1, 2, sharey=True)
    bars(left, rows, [row["tokens_a_pass"] for row in rows], [share(row) for row in rows])
    plot_style.label(left, "tokens a pass (1 without drafts)", "", "tokens a pass, and how many drafts were right")
    bars(right, rows, [row["cpu_ratio"] for row in rows], [f"{row['cpu_ratio']:.2f}" for row in rows])
    plot_style.label(right, "speed by CPU time, as a ratio to --speculate off", "",
                     "speed; the dots are rounds, the ticks targets")  # fmt: skip
    for place, row in enumerate(rows):
        right.plot([row["target"]] * 2, [place - 0.42, place + 0.42], color=TARGET_COLOUR, linewidth=1.6)
        right.scatter(row["cpu_ratios"], [place + 0.2] * len(row["cpu_ratios"]), s=9, color=TARGET_COLOUR, alpha=0.55)
    left.invert_yaxis()
    return figure


def share(row: Row) -> str:
    right = f"{row['accepted'] / row['proposed']:.0%} right" if row["proposed"] else "no drafts"
    return f"{row['tokens_a_pass']:.2f}   {right}"


def bars(axes: "Axes", rows: Sequence[Row], values: Sequence[float], notes: Sequence[str]) -> None:
    axes.barh(range(len(rows)), values, height=0.62, color=plot_style.DECODE_COLOUR)
    axes.axvline(1.0, color=OFF_COLOUR, linewidth=1.2, linestyle="--")
    axes.set_yticks(range(len(rows)), [plot_style.safe_label(row["name"]) for row in rows])
    axes.grid(visible=False, axis="y")
    for place, (value, note) in enumerate(zip(values, notes, strict=True)):
        axes.text(value, place - 0.02, f"  {note}", va="center", fontsize=8.5, color=plot_style.TEXT)
    axes.set_xlim(0, 1.32 * max(values))


def by_load(kept: dict[str, Any]) -> "Figure":
    """Speed on the left, drafts on the right; a line for each kind of text, over the requests at a time."""
    rows: Sequence[Row] = kept["load"]
    figure = plot_style.new_figure(f"Many requests with --speculate {kept['speculate']}: {about(kept)}", 4.2)
    left, right = plot_style.panels(figure, 1, 2)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    looks = plot_style.styles(kinds)
    for kind in kinds:
        mine = [row for row in rows if row["kind"] == kind]
        counts = [row["requests"] for row in mine]
        style, name = looks[kind].as_points(), KIND_NAMES.get(kind, kind)
        left.plot(counts, [row["cpu_ratio"] for row in mine], label=name, **style)
        right.plot(counts, [row["proposed"] / row["row_passes"] for row in mine], **style)
    left.axhline(1.0, color=OFF_COLOUR, linewidth=1.2, linestyle="--")
    left.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        counts = sorted({row["requests"] for row in rows})
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    plot_style.label(left, "requests at a time", "speed by CPU time, as a ratio to --speculate off", "speed")
    plot_style.label(right, "requests at a time", "draft tokens verified per request and pass", "drafts")
    handles, names = left.get_legend_handles_labels()
    plot_style.legend(figure, handles, names)
    return figure
