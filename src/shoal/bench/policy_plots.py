"""Plots of the policy experiments: for each kind of request, the distribution of first-token times and gaps.

Knows findings and how they are drawn; knows no engine.
"""

from typing import TYPE_CHECKING

import numpy as np

from shoal.bench import plot_style
from shoal.bench.cpu_noise import short_banner
from shoal.bench.policies import Finding
from shoal.bench.record import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROMISED = ("premium", "stream")  # the kinds of requests that have a promise
LEAST_S = 1e-3  # what is shorter is drawn as this long


def finding_plot(finding: Finding) -> "Figure":
    """One row for each kind of request: first tokens on the left, gaps on the right, a line for each policy."""
    kinds = list(dict.fromkeys(kind for run in finding.kinds.values() for kind in run))
    figure = plot_style.new_figure(f"{finding.name.capitalize()}: {finding.title}", 1.1 + 2.9 * len(kinds))
    plot_style.add_to_title(figure, short_banner([run.noise for run in finding.runs.values()]))
    axes = plot_style.panels(figure, len(kinds), 2)
    looks = plot_style.styles(finding.runs, finding.highlighted or list(finding.runs)[: plot_style.HIGHLIGHTED])
    for number, kind in enumerate(kinds):
        left, right = axes[2 * number], axes[2 * number + 1]
        for name, run in finding.runs.items():
            requests = [one for one, its in zip(run.requests, finding.kinds[name], strict=True) if its == kind]
            _share_within(left, _first_tokens(requests), looks[name])
            _share_within(right, [gap for one in requests for gap in one.gaps_s], looks[name])
        promised = finding.promise_s if kind in PROMISED else {}
        _finish(left, promised.get("ttft"))
        _finish(right, promised.get("gap"))
        plot_style.label(left, "time to first token (s)", "share of requests (%)", f"{kind}: first token within")
        plot_style.label(right, "gap between tokens (s)", "share of gaps (%)", f"{kind}: gaps at most")
    _legend(figure, looks)
    return figure


def _first_tokens(requests: list[RequestRecord]) -> list[float]:
    return [one.ttft_s for one in requests if one.ttft_s is not None]


def _share_within(axes: "Axes", values: list[float], style: plot_style.Style) -> None:
    if not values:
        return
    ordered = sorted(max(value, LEAST_S) for value in values)
    shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *shares], where="post", **style.as_line())


def _finish(axes: "Axes", promise_s: float | None) -> None:
    """The scales of a panel, and its promise."""
    if not axes.get_lines():
        plot_style.note_empty(axes, "no token was received")
        return
    shown = [float(at) for line in axes.get_lines() for at in np.asarray(line.get_xdata())]
    shown += [promise_s] if promise_s is not None else []
    axes.set_xlim(min(shown) / 1.2, max(shown) * 1.2)
    axes.set_ylim(0, 102)
    plot_style.log_axis(axes, "x")
    if promise_s is not None:
        plot_style.promise_line(axes, promise_s, f"promise: {promise_s:g} s")


def _legend(figure: "Figure", looks: dict[str, plot_style.Style]) -> None:
    from matplotlib.lines import Line2D

    order = sorted(looks, key=lambda name: not looks[name].strong)
    handles = [Line2D([], [], **looks[name].as_line()) for name in order]
    plot_style.legend(figure, handles, [plot_style.safe_label(name) for name in order])
