"""Which runs of a comparison a plot shows, and what all of its plots have in common.

Owns the choice of the rate, the names of presets in legends and the kinds of computed positions. Draws no data.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.bench import plot_style
from shoal.bench.lanes import AGAIN, DECODE, PAD, PROMPT
from shoal.bench.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Sequence[RunRecord]
LANES = 24
KINDS = {
    PROMPT: ("prompt", plot_style.PROMPT_COLOUR, False),
    DECODE: ("output, one token per pass", plot_style.DECODE_COLOUR, False),
    AGAIN: ("recomputed", plot_style.AGAIN_COLOUR, False),
    PAD: ("padding and finished rows", plot_style.WASTE_COLOUR, True),
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


def line_names(runs: Runs) -> dict[str, str]:
    """Each preset's name in a legend: its label, unless the label differs between rates."""
    names = {}
    for preset, mine in by_preset(runs).items():
        labels = {run.label for run in mine}
        names[preset] = plot_style.safe_label(labels.pop() if len(labels) == 1 else preset)
    return names


def preset_legend(figure: "Figure", runs: Runs, marked: bool = False) -> None:
    from matplotlib.lines import Line2D

    names = line_names(runs)
    looks = plot_style.styles(names)
    handles = [Line2D([], [], **(one.as_points() if marked else one.as_line())) for one in looks.values()]
    plot_style.legend(figure, handles, list(names.values()))


def evenly(count: int, most: int = 400) -> list[int]:
    """At most `most` of the numbers below count, evenly spread and including the last."""
    return sorted({int(at) for at in np.linspace(0, count - 1, min(count, most))}) if count else []
