"""Pictures of experiments on policies: for each kind of request, how long the first token and the gaps took.

Knows findings and how they are drawn; knows no engine.
"""

from typing import TYPE_CHECKING

from shoal.bench import ink
from shoal.bench.policies import Finding
from shoal.bench.record import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROMISED = ("premium", "speaker")  # the kinds of requests that promises are for


def finding_plot(finding: Finding) -> "Figure":
    """One row for each kind of request: first tokens at the left, gaps at the right, a line for each policy."""
    kinds = list(dict.fromkeys(kind for run in finding.kinds.values() for kind in run))
    figure = ink.sheet(f"{finding.name}: {finding.title}", 0.8 + 2.9 * len(kinds))
    axes = ink.panels(figure, len(kinds), 2)
    looks = ink.styles(finding.runs)
    for number, kind in enumerate(kinds):
        left, right = axes[2 * number], axes[2 * number + 1]
        for name, run in finding.runs.items():
            requests = [one for one, its in zip(run.requests, finding.kinds[name], strict=True) if its == kind]
            _share_below(left, _first_tokens(requests), looks[name], name)
            _share_below(right, [gap for one in requests for gap in one.gaps_s], looks[name], name)
        ink.label(left, "seconds to the first token", "share of requests", f"{kind}: first token")
        ink.label(right, "seconds between tokens", "share of gaps", f"{kind}: gaps")
        if kind in PROMISED:
            for panel, promise in ((left, "ttft"), (right, "gap")):
                if promise in finding.promise_s:
                    panel.axvline(finding.promise_s[promise], color=ink.SOFT, linewidth=1, linestyle=":")
    handles, names = axes[0].get_legend_handles_labels()
    more, others = axes[-1].get_legend_handles_labels()
    known = dict(zip([*names, *others], [*handles, *more], strict=True))
    ink.legend(figure, list(known.values()), list(known))
    return figure


def _first_tokens(requests: list[RequestRecord]) -> list[float]:
    return [one.ttft_s for one in requests if one.ttft_s is not None]


def _share_below(axes: "Axes", values: list[float], style: ink.Style, name: str) -> None:
    if not values:
        return
    ordered = sorted(values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *shares], where="post", label=ink.words(name), **style.as_line())
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
