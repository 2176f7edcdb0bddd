"""The plots of a plan: cost against the promise, and latency against the load of one replica.

Knows the figures of shoal plan (its JSON) and how they are drawn. Does not know the simulator.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.bench import plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plan_plot(plan: Mapping[str, Any]) -> "Figure":
    """Cost against the promise on the left, the knee on the right."""
    figure = plot_style.new_figure(f"{plan['replicas']} replicas keep the promise: what a stricter one costs", 4.8)
    cost, knee = plot_style.panels(figure, 1, 2)
    cost_panel(cost, plan)
    knee_panel(knee, plan)
    return figure


def cost_panel(axes: "Axes", plan: Mapping[str, Any]) -> None:
    kept = [one for one in plan["by_promise"] if one["replicas"] is not None]
    factors, costs = [one["factor"] for one in kept], [one["cost_per_million_tokens"] for one in kept]
    axes.step(factors, costs, where="post", color=plot_style.COLOURS[1], linewidth=1.7)
    axes.plot(factors, costs, "o", color=plot_style.COLOURS[1], markersize=5)
    for one in kept:
        axes.annotate(str(one["replicas"]), (one["factor"], one["cost_per_million_tokens"]), xytext=(4, 5),
                      textcoords="offset points", fontsize=8.5, color=plot_style.SOFT)  # fmt: skip
    impossible = [one["factor"] for one in plan["by_promise"] if one["replicas"] is None]
    if impossible:
        axes.axvspan(min(impossible) / 1.2, max(impossible), color=plot_style.PALE)
    plot_style.log_axis(axes, "x")
    axes.set_ylim(0, 1.1 * max(costs, default=1.0))
    plot_style.promise_line(axes, 1.0, "the promise")
    plot_style.label(
        axes,
        "promised times, as multiples of the promise (grey: none will do)",
        "price per million output tokens",
        "Cost, and replicas",
    )


def knee_panel(axes: "Axes", plan: Mapping[str, Any]) -> None:
    points = plan["points"]
    rates = [one["rate"] for one in points]
    for (kind, name), colour in zip((("ttft", "TTFT"), ("gap", "gap")), plot_style.COLOURS, strict=False):
        for percent, line in ((99, "-"), (50, plot_style.LINES[1])):
            looks: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.5, "marker": "o"}
            times_ms = [one[f"{kind}_p{percent}_s"] * 1e3 for one in points]
            axes.plot(rates, times_ms, markersize=4, label=f"{name} p{percent}", **looks)
    axes.axvline(plan["knee"]["rate"], color=plot_style.SOFT, linewidth=1.0, label="knee")
    plot_style.log_axis(axes, "y")
    plot_style.label(axes, "requests per second of one replica", "milliseconds", "Load of one replica")
    axes.legend(fontsize=8.5, frameon=False)
