"""Plot style: the colours, labels and frames that all plots share, and how a figure is saved.

Knows matplotlib, not what the numbers mean. Nothing here uses pyplot or changes a global setting for longer than one
save. Matplotlib is imported by the first figure, not by this module.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind-safe palette, without its yellow, which is too faint on white.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#404040")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)))
MARKERS, DASHED_MARKERS = "osD^v<>", "PX*hdp8"
GREYS = ("#8F8F8F", "#6E6E6E", "#B3B3B3")  # of lines that are not highlighted
GREY_LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (3, 1.5, 1, 1.5, 1, 1.5)))
HIGHLIGHTED = 3  # most lines of a plot that have a colour, where others are grey
# Known presets have fixed colours, so that two reports can be compared. Presets with group batching are dashed.
KNOWN = ("shoal", "vllm", "sglang", "sarathi", "tgi", "orca", "lmdeploy")
KNOWN_DASHED = ("transformers", "fastertransformer", "classic-dynamic", "trtllm-no-evict", "trtllm-max-utilization")

PROMPT_COLOUR, DECODE_COLOUR, AGAIN_COLOUR, WASTE_COLOUR = "#E69F00", "#0072B2", "#CC3311", "#8C8C8C"
PADDING_HATCH, VAIN_HATCH = "//////", "xxxxxx"  # hatched is waste, in every plot
TEXT, SOFT, PALE = "#262626", "#6B6B6B", "#E3E8EE"
TITLE: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": TEXT}
WIDE_IN = 12.0
LONGEST_LABEL = 28
NARROW = 5.0  # a logarithmic axis spans this factor at least


@dataclass(frozen=True)
class Style:
    """How one preset is drawn, in every plot."""

    colour: str
    line: Any
    marker: str
    strong: bool = True  # highlighted: thicker, and above the others

    def as_line(self) -> dict[str, Any]:
        wide, above = (1.9, 3) if self.strong else (1.1, 2.2)
        return {"color": self.colour, "linestyle": self.line, "linewidth": wide, "zorder": above}

    def as_points(self) -> dict[str, Any]:
        return {
            **self.as_line(),
            "marker": self.marker,
            "markersize": 6 if self.strong else 4.5,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
        }


def styles(names: Iterable[str], highlighted: Iterable[str] = ()) -> dict[str, Style]:
    """A style for each name: the fixed one of a known preset, else the next free one.

    If some of more than three names are highlighted, the others are grey.

    >>> styles(["mine", "vllm"])["vllm"].colour
    '#0072B2'
    """
    table = []
    for number, (line, marks) in enumerate(zip(LINES, (MARKERS, DASHED_MARKERS, MARKERS), strict=True)):
        turned = COLOURS[3 * number :] + COLOURS[: 3 * number]  # so that shoal and the first dashed one differ
        table += [Style(colour, line, mark) for colour, mark in zip(turned, marks, strict=True)]
    known = dict(zip(KNOWN + KNOWN_DASHED, table, strict=False))
    wanted, strong = list(dict.fromkeys(names)), list(highlighted)
    if len(wanted) > HIGHLIGHTED and strong:
        lines = list(zip(GREY_LINES, MARKERS, strict=False))
        pale = [Style(grey, line, mark, False) for grey in GREYS for line, mark in lines]
        others = [name for name in wanted if name not in strong]
        grey = {name: pale[number % len(pale)] for number, name in enumerate(others)}
        return {name: (grey | styles(strong))[name] for name in wanted}
    free = [style for name, style in known.items() if name not in wanted]
    spare = table[len(known) :] + free if any(name in known for name in wanted) else table
    unknown = [name for name in wanted if name not in known]
    return {name: known[name] if name in known else spare[unknown.index(name) % len(spare)] for name in wanted}


def safe_label(text: object, longest: int = LONGEST_LABEL) -> str:
    """Text that is safe in any plot: printable, no math markup, short, and not hidden from the legend by a leading _.

    >>> safe_label("a$b$" + "c" * 99, longest=8)
    'a\\\\$b\\\\$ccc…'
    """
    plain = "".join(one if one.isprintable() and ord(one) < 0x250 else "?" for one in str(text))
    short = plain if len(plain) <= longest else plain[: longest - 1] + "…"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def new_figure(title: str, tall_in: float) -> "Figure":
    """An empty figure under a title that states what it shows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE_IN, tall_in), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.008, ha="left", **TITLE)
    return figure


def add_to_title(figure: "Figure", remark: str) -> None:
    """A second line of the title, if there is something to remark."""
    if remark:
        figure.suptitle(f"{figure.get_suptitle()}\n{remark}", x=0.008, ha="left", **TITLE)


def panels(figure: "Figure", rows: int, columns: int, **share: Any) -> "list[Axes]":
    """Its axes, row by row, in the shared style."""
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color("#B0B0B0")
        one.tick_params(labelsize=8.5, labelcolor=TEXT, color="#B0B0B0")
        one.grid(color="#E6E6E6", linewidth=0.7)
        one.set_axisbelow(True)
    return axes


def small_multiples(figure: "Figure", count: int, x: str, y: str, columns: int = 0, **share: Any) -> "list[Axes]":
    """`count` panels on one time axis, in two columns if there are more than three; unused panels are hidden."""
    count = max(count, 1)
    columns = columns or (1 if count <= 3 else 2)
    axes = panels(figure, math.ceil(count / columns), columns, sharex=True, **share)
    for one in axes[count:]:
        one.set_axis_off()
    for one in axes[count - columns : count]:  # the lowest of each column
        one.tick_params(labelbottom=True)
        one.set_xlabel(x, fontsize=9.5, color=TEXT)
    figure.supylabel(y, fontsize=9.5, color=TEXT)
    return axes[:count]


def label(axes: "Axes", x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x, fontsize=9.5, color=TEXT)
    axes.set_ylabel(y, fontsize=9.5, color=TEXT)
    if title:
        axes.set_title(title, fontsize=10.5, loc="left", color=TEXT)


def log_axis(axes: "Axes", which: str) -> None:
    """A logarithmic axis with numbers people read: 0.5, 20, 3,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale, one = (axes.set_yscale, axes.yaxis) if which == "y" else (axes.set_xscale, axes.xaxis)
    scale("log")
    low, high = (max(float(end), 1e-9) for end in one.get_view_interval())
    if high / low < NARROW:  # too few round numbers
        wider = (NARROW * low / high) ** 0.5
        low, high = low / wider, high * wider
        (axes.set_ylim if which == "y" else axes.set_xlim)(low, high)
    decades = np.log10(high / low)
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 0.9 else (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    one.set_major_locator(LogLocator(subs=subs, numticks=12))
    one.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    one.set_minor_formatter(NullFormatter())


def tick(value: float) -> str:
    """
    >>> tick(0.05), tick(1.5), tick(3000.0), tick(15000.0)
    ('0.05', '1.5', '3,000', '15,000')
    """
    return f"{value:g}" if value < 10 else f"{value:,.0f}"


def panel_title(axes: "Axes", name: str, remark: str) -> None:
    """Title of a small panel: the name on the left, a remark on the right."""
    axes.set_title(name, fontsize=9.5, fontweight="bold", loc="left", color=TEXT, pad=4)
    axes.set_title(remark, fontsize=8.5, loc="right", color=SOFT, pad=4)


def promise_line(axes: "Axes", at: float, text: str, top: bool = False) -> None:
    """A vertical line at a promised time, with a label on the side that has more room, low where lines rise."""
    axes.axvline(at, color=SOFT, linewidth=1, linestyle=(0, (2, 3)), zorder=1.5)
    to_left = axes.transData.transform((at, 0))[0] > axes.transAxes.transform((0.7, 0))[0]
    side, shift = ("right", -4) if to_left else ("left", 4)
    looks: dict[str, Any] = {"fontsize": 8.5, "color": SOFT, "ha": side, "textcoords": "offset points"}
    axes.annotate(text, (at, float(top)), (shift, -11 if top else 5), xycoords=("data", "axes fraction"), **looks)


def note_empty(axes: "Axes", text: str) -> None:
    """A note in place of data that does not exist."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9.5, color=SOFT)


def legend(figure: "Figure", handles: Sequence[Any], names: Sequence[str]) -> None:
    """Below everything, in as many columns as the longest name allows."""
    if not handles:
        return
    columns = max(1, min(len(handles), 7, 120 // (max(len(name) for name in names) + 6)))
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, fontsize=9, frameon=False, handlelength=2.8
    )


def swatches(kinds: Iterable[tuple[str, str, str]]) -> tuple[list[Any], list[str]]:
    """Handles and names for a legend of areas: (name, colour, hatch)."""
    from matplotlib.patches import Patch

    wanted = list(kinds)
    return [Patch(**area(colour, hatch)) for _, colour, hatch in wanted], [name for name, _, _ in wanted]


def area(colour: str, hatch: str = "") -> dict[str, Any]:
    """How an area is filled: with a colour, or hatched in it."""
    if not hatch:
        return {"facecolor": colour, "edgecolor": "none", "linewidth": 0}
    return {"facecolor": "#EDEDED", "edgecolor": colour, "hatch": hatch, "linewidth": 0}


def rectangles(axes: "Axes", where: Sequence[tuple[float, float, float, float]], **looks: Any) -> None:
    """Many rectangles at once: (left, bottom, width, height)."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in where]
    if corners:
        axes.add_collection(PolyCollection(corners, **looks))


def save(figure: "Figure", folder: Path, name: str) -> Path:
    """Write name.svg and name.png; return the SVG's path. Equal figures give equal bytes."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shoal", "hatch.linewidth": 0.6}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        figure.set_layout_engine(
            "none"
        )  # the layout is computed already, and computing it again takes most of the time
        figure.savefig(path.with_suffix(".png"), format="png", dpi=110, metadata={"Software": None})
    return path
