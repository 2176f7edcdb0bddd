"""A long prompt arrives among running streams: the streams' gaps and the prompt's first token, drawn.

Knows the records of that experiment. Does not know engines or pages.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.bench import plot_style
from shoal.bench.cpu_noise import short_banner
from shoal.bench.plot_runs import NOTHING, SINCE
from shoal.bench.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def giant_plot(runs_by_prefill: Mapping[str, RunRecord]) -> "Figure":
    """One giant prompt arrives among running streams: the streams' gaps and the giant's first token.

    The longest prompt is the giant, all others are streams. Names are shown as given: inline, exclusive, chunked.
    """
    figure = plot_style.new_figure("A long prompt among running streams: their stalls and its first token", 1.0)
    count = max(len(runs_by_prefill), 1)
    figure.set_figheight(1.3 + 2.1 * count)
    axes = plot_style.small_multiples(figure, count, SINCE, "gap before each token (ms)", columns=1, sharey=True)
    for one, (prefill, run) in zip(axes, runs_by_prefill.items(), strict=False):
        giant_panel(one, prefill, run)
    if any(one.collections for one in axes):
        plot_style.log_axis(axes[0], "y")
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(low, high * 2.5)
    giant_legend(figure)
    plot_style.add_to_title(figure, short_banner([run.noise for run in runs_by_prefill.values()]))
    return figure


def giant_panel(axes: "Axes", prefill: str, run: RunRecord) -> None:
    giant = max(run.requests, key=lambda request: request.prompt, default=None)
    others = [request for request in run.requests if request is not giant]
    points = [
        (at_s, max(gap * 1e3, 0.1))
        for request in others
        for at_s, gap in zip(request.token_s[1:], request.gaps_s, strict=True)
    ]
    if giant is None or not points:
        plot_style.panel_title(axes, plot_style.safe_label(prefill), "")
        plot_style.note_empty(axes, NOTHING)
        return
    big = len(points) > 1500  # as vectors they would make up most of the page
    looks: dict[str, Any] = {
        "s": 7,
        "color": plot_style.DECODE_COLOUR,
        "alpha": 0.55,
        "linewidth": 0,
        "rasterized": big,
    }
    axes.scatter([at_s for at_s, _ in points], [gap for _, gap in points], **looks)
    worst = max(points, key=lambda point: point[1])
    remark = f"largest gap {worst[1]:,.0f} ms"
    axes.plot(
        *worst, marker="o", markersize=9, color="none", markeredgecolor=plot_style.AGAIN_COLOUR, markeredgewidth=1.6
    )
    late = worst[0] > 0.7 * run.seconds
    shift, side = ((-2, 8), "right") if late else ((2, 8), "left")
    axes.annotate(remark, worst, shift, textcoords="offset points", fontsize=9, color=plot_style.AGAIN_COLOUR, ha=side)
    if giant.ttft_s is not None:
        axes.axvspan(
            giant.arrived_s, giant.token_s[0], color=plot_style.PROMPT_COLOUR, alpha=0.18, linewidth=0, zorder=0
        )
        axes.axvline(giant.token_s[0], color=plot_style.PROMPT_COLOUR, linewidth=1.6)
        remark += f" · first token of the giant ({giant.prompt:,} tokens) after {giant.ttft_s:,.2f} s"
    plot_style.panel_title(axes, plot_style.safe_label(prefill), remark)


def giant_legend(figure: "Figure") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot = Line2D(
        [], [], marker="o", color="none", markerfacecolor=plot_style.DECODE_COLOUR, markeredgecolor="none", markersize=5
    )
    span = Patch(facecolor=plot_style.PROMPT_COLOUR, alpha=0.3)
    ring = Line2D(
        [], [], marker="o", color="none", markeredgecolor=plot_style.AGAIN_COLOUR, markersize=8, markeredgewidth=1.6
    )
    names = ["a token of another stream", "the giant, from arrival to first token", "largest gap"]
    plot_style.legend(figure, [dot, span, ring], names)
