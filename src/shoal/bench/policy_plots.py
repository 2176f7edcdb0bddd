"""Plots of the policy experiments: for each kind of request, the distribution of first-token times and gaps.

Knows findings and how they are drawn; knows no engine.
"""

from typing import TYPE_CHECKING

from shoal.bench import plot_style
from shoal.bench.cpu_noise import short_banner
from shoal.bench.policies import Finding
from shoal.bench.record import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROMISED = ("premium", "stream")  # the kinds of requests that have a promise


def finding_plot(finding: Finding) -> "Figure":
    """One row for each kind of request: first tokens on the left, gaps on the right, a line for each policy."""
    kinds = list(dict.fromkeys(kind for run in finding.kinds.values() for kind in run))
    figure = plot_style.new_figure(f"{finding.name}: {finding.title}", 0.8 + 2.9 * len(kinds))
    plot_style.add_to_title(figure, short_banner([run.noise for run in finding.runs.values()]))
    axes = plot_style.panels(figure, len(kinds), 2)
    looks = plot_style.styles(finding.runs)
    for number, kind in enumerate(kinds):
        left, right = axes[2 * number], axes[2 * number + 1]
        for name, run in finding.runs.items():
            requests = [one for one, its in zip(run.requests, finding.kinds[name], strict=True) if its == kind]
            _share_below(left, _first_tokens(requests), looks[name], name)
            _share_below(right, [gap for one in requests for gap in one.gaps_s], looks[name], name)
        plot_style.label(left, "seconds to the first token", "share of requests", f"{kind}: first token")
        plot_style.label(right, "seconds between tokens", "share of gaps", f"{kind}: gaps")
        if kind in PROMISED:
            for panel, promise in ((left, "ttft"), (right, "gap")):
                if promise in finding.promise_s:
                    panel.axvline(finding.promise_s[promise], color=plot_style.SOFT, linewidth=1, linestyle=":")
    handles, names = axes[0].get_legend_handles_labels()
    more, others = axes[-1].get_legend_handles_labels()
    known = dict(zip([*names, *others], [*handles, *more], strict=True))
    plot_style.legend(figure, list(known.values()), list(known))
    return figure


def _first_tokens(requests: list[RequestRecord]) -> list[float]:
    return [one.ttft_s for one in requests if one.ttft_s is not None]


def _share_below(axes: "Axes", values: list[float], style: plot_style.Style, name: str) -> None:
    if not values:
        return
    ordered = sorted(values)
    shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
    axes.step(
        [ordered[0], *ordered], [0.0, *shares], where="post", label=plot_style.safe_label(name), **style.as_line()
    )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
