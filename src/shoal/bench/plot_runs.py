"""Which runs of a comparison a plot shows, and what all of its plots have in common.

Owns the choice of the rate, the names of presets in legends and the kinds of computed positions. Draws no data.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.bench import plot_style
from shoal.bench.lanes import AGAIN, DECODE, PAD, PROMPT, VAIN
from shoal.bench.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Sequence[RunRecord]
LANES = 24
KINDS = {
    PROMPT: ("prompt", plot_style.PROMPT_COLOUR, ""),
    DECODE: ("output, one token per pass", plot_style.DECODE_COLOUR, ""),
    AGAIN: ("recomputed", plot_style.AGAIN_COLOUR, ""),
    VAIN: ("in vain: after its end, or a rejected draft", plot_style.AGAIN_COLOUR, plot_style.VAIN_HATCH),
    PAD: ("padding and finished rows", plot_style.WASTE_COLOUR, plot_style.PADDING_HATCH),
}
NOTHING = "no pass was run"
SINCE = "seconds since the run began"


def by_preset(runs: Runs) -> dict[str, list[RunRecord]]:
    """Each preset's runs from the lowest rate to the highest; "all at once" counts as the highest."""
    found: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: run.rate or float("inf")):
        found.setdefault(run.preset, []).append(run)
    return {preset: found[preset] for preset in dict.fromkeys(run.preset for run in runs)}


def rates_of(runs: Runs) -> list[float]:
    return sorted({run.rate for run in runs}, key=lambda rate: rate or float("inf"))


def at_middle(runs: Runs) -> tuple[str, list[RunRecord]]:
    """The middle rate of the sweep, as text, and each preset's run at it."""
    rates = rates_of(runs)
    return at_rate(runs, rates[len(rates) // 2]) if rates else ("no rate", [])


def at_highest(runs: Runs) -> tuple[str, list[RunRecord]]:
    """The highest rate, where the batch is fullest, and each preset's run at it."""
    rates = rates_of(runs)
    return at_rate(runs, rates[-1]) if rates else ("no rate", [])


def at_rate(runs: Runs, rate: float) -> tuple[str, list[RunRecord]]:
    return in_words(rate), [run for run in runs if run.rate == rate]


def in_words(rate: float) -> str:
    return f"{rate:g} requests/s" if rate else "all at once"


def axis(run: RunRecord, name: str) -> str:
    """The run's setting on one axis, or an empty string if it has none."""
    value = run.settings.get(name, "")
    return value if isinstance(value, str) else ""


def wasted(run: RunRecord) -> tuple[int, int, int]:
    """Positions that were padding, recomputed, and computed in vain."""
    sums = [sum(getattr(one, name) for one in run.passes) for name in ("padded", "recomputed", "vain")]
    return sums[0], sums[1], sums[2]


def line_names(runs: Runs) -> dict[str, str]:
    """Each preset's name in a legend: its label, unless the label differs between rates."""
    names = {}
    for preset, mine in by_preset(runs).items():
        labels = {run.label for run in mine}
        names[preset] = plot_style.safe_label(labels.pop() if len(labels) == 1 else preset)
    return names


def highlighted(runs: Runs) -> list[str]:
    """The presets whose lines have a colour: shoal, the fastest with groups, and the fastest of the others."""
    _, last = at_highest(runs)
    speed = {run.preset: sum(len(one.token_s) for one in run.requests) / max(run.seconds, 1e-9) for run in last}
    fastest = sorted(speed, key=lambda preset: -speed[preset])
    grouped = {run.preset for run in last if axis(run, "batching") in ("static", "dynamic")}
    ours, groups = ([preset for preset in fastest if preset in some][:1] for some in ({"shoal"}, grouped))
    return list(dict.fromkeys([*ours, *groups, *fastest]))[: plot_style.HIGHLIGHTED]


def preset_styles(runs: Runs) -> dict[str, plot_style.Style]:
    """How each preset is drawn, in every plot with a line for each."""
    return plot_style.styles((run.preset for run in runs), highlighted(runs))


def preset_legend(figure: "Figure", runs: Runs, looks: Mapping[str, plot_style.Style], marked: bool = False) -> None:
    """Highlighted presets first."""
    from matplotlib.lines import Line2D

    names = line_names(runs)
    order = sorted(names, key=lambda preset: (not looks[preset].strong, preset != "shoal"))
    lines = [looks[preset].as_points() if marked else looks[preset].as_line() for preset in order]
    plot_style.legend(figure, [Line2D([], [], **one) for one in lines], [names[preset] for preset in order])


def evenly(count: int, most: int = 400) -> list[int]:
    """At most `most` of the numbers below count, evenly spread and including the last."""
    return sorted({int(at) for at in np.linspace(0, count - 1, min(count, most))}) if count else []
