"""The plots of a comparison: the table of all of them, and how they are drawn into a folder.

Every plot takes RunRecords, one for each preset and rate, and returns a matplotlib Figure. A run that failed is shown
as failed, never left out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.bench import plot_style
from shoal.bench.cpu_noise import short_banner
from shoal.bench.latency_plots import latency_plot, sweep_plot, waiting_plot
from shoal.bench.pass_plots import kv_plot, tokens_plot, work_plot
from shoal.bench.plot_runs import Runs
from shoal.bench.record import Promise
from shoal.bench.timeline_plots import timeline_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Runs, Promise], "Figure"]
PLOTS: dict[str, Draw] = {
    "timeline": lambda runs, _: timeline_plot(runs),
    "throughput": sweep_plot,
    "latency": latency_plot,
    "tokens": lambda runs, _: tokens_plot(runs),
    "waiting": lambda runs, _: waiting_plot(runs),
    "work": lambda runs, _: work_plot(runs),
    "kv": lambda runs, _: kv_plot(runs),
}


def draw_all(runs: Runs, promise: Promise, folder: Path) -> dict[str, Path]:
    """Every plot as folder/name.svg and name.png; returns the path of each SVG, in the order to show them."""
    remark = short_banner([run.noise for run in runs])
    paths = {}
    for name, draw in PLOTS.items():
        figure = draw(runs, promise)
        plot_style.add_to_title(figure, remark)
        paths[name] = plot_style.save(figure, folder, name)
    return paths
