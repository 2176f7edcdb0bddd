"""What users of each preset experience: throughput against latency, first tokens, gaps, and time in the queue.

Knows request records and how they are drawn. Does not know engines or pages.
"""

from typing import TYPE_CHECKING

import numpy as np

from shoal.bench import plot_style
from shoal.bench.plot_runs import (
    NOTHING,
    SINCE,
    Runs,
    at_middle,
    by_preset,
    evenly,
    preset_legend,
    preset_styles,
    rates_of,
)
from shoal.bench.record import Promise, RunRecord, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sweep_plot(runs: Runs, promise: Promise) -> "Figure":
    """Throughput against latency, and the requests per second that met the promise."""
    figure = plot_style.new_figure("Throughput against latency: further right and lower is better", 5.4)
    tokens, requests, kept = plot_style.panels(figure, 1, 3)
    requests.sharey(tokens)
    ticks = {rate: tick for tick, rate in enumerate(rates_of(runs))}
    looks = preset_styles(runs)
    for preset, mine in by_preset(runs).items():
        sums = [summarise(run, promise, 0.0) for run in mine]
        done = [one for one in sums if one["normalised_s"]["p50"] > 0]
        latency = [one["normalised_s"]["p50"] * 1e3 for one in done]
        tokens.plot([one["output_tok_s"] for one in done], latency, **looks[preset].as_points())
        requests.plot([one["request_s"] for one in done], latency, **looks[preset].as_points())
        offered = [ticks[run.rate] for run in mine]
        kept.plot(offered, [one["goodput_request_s"] for one in sums], **looks[preset].as_points())
    latency_label = "median latency per output token (ms)"
    plot_style.label(tokens, "output tokens per second", latency_label, "Output tokens")
    plot_style.label(requests, "finished requests per second", "", "Finished requests")
    plot_style.label(kept, "offered requests per second", "requests per second", kept_title(promise))
    kept.set_xticks(list(ticks.values()), [f"{rate:g}" if rate else "all at\nonce" for rate in ticks])
    kept.set_ylim(bottom=0)
    for one in (tokens, requests):
        log_latency(one)
    preset_legend(figure, runs, looks, marked=True)
    return figure


def kept_title(promise: Promise) -> str:
    return f"Promise met: TTFT {promise.ttft_s:g} s, gap {promise.gap_s * 1e3:g} ms"


def log_latency(axes: "Axes") -> None:
    if not any(len(line.get_xdata()) for line in axes.get_lines()):  # type: ignore[arg-type]
        plot_style.note_empty(axes, "no request finished")
        return
    plot_style.log_axis(axes, "y")
    axes.set_xlim(0, 1.07 * axes.get_xlim()[1])


def latency_plot(runs: Runs, promise: Promise) -> "Figure":
    """Distributions of the time to the first token and of the gaps between tokens."""
    rate, mine = at_middle(runs)
    figure = plot_style.new_figure(f"Latency at {rate}: left is an earlier first token, low is fewer long gaps", 5.4)
    first, gaps = plot_style.panels(figure, 1, 2)
    looks = preset_styles(runs)
    for run in mine:
        ttft = [request.ttft_s for request in run.requests if request.ttft_s is not None]
        cumulative(first, [max(value, 1e-3) for value in ttft], looks[run.preset])
        between = [gap * 1e3 for request in run.requests for gap in request.gaps_s]
        if in_pieces(run):
            longer(gaps, [max(value, 0.1) for value in between], looks[run.preset])
    plot_style.label(first, "time to first token (s)", "share of requests (%)", "First token: share served within")
    plot_style.label(gaps, "gap between tokens (ms)", "share of gaps that are longer (%)", gaps_title(mine))
    with_promise(first, promise.ttft_s, f"promise: {promise.ttft_s:g} s")
    with_promise(gaps, promise.gap_s * 1e3, f"promise: {promise.gap_s * 1e3:g} ms on average", top=True)
    if gaps.get_lines():
        plot_style.log_axis(gaps, "y")
    preset_legend(figure, mine, looks)
    return figure


def in_pieces(run: RunRecord) -> bool:
    """Whether tokens were streamed: a static group returns each answer whole, so it has no gaps."""
    return any(gap > 1e-4 for request in run.requests for gap in request.gaps_s)


def gaps_title(runs: Runs) -> str:
    whole = sum(1 for run in runs if run.passes and not in_pieces(run))
    return "Gaps between tokens" + (f" ({whole} not drawn: answers are not streamed)" if whole else "")


def with_promise(axes: "Axes", limit: float, text: str, top: bool = False) -> None:
    if not axes.get_lines():
        plot_style.note_empty(axes, "no token was streamed")
        return
    plot_style.log_axis(axes, "x")
    plot_style.promise_line(axes, limit, text, top)


def cumulative(axes: "Axes", values: list[float], style: plot_style.Style) -> None:
    if values:
        shares = np.linspace(0, 100, 201)
        axes.plot(np.percentile(values, shares), shares, **style.as_line())


def longer(axes: "Axes", values: list[float], style: plot_style.Style) -> None:
    """The share of values above each value, down to the single longest."""
    if values:
        shares = np.logspace(2, np.log10(100 / len(values)), 200)
        axes.plot(np.percentile(values, np.clip(100 - shares, 0, 100)), shares, **style.as_line())


def waiting_plot(runs: Runs) -> "Figure":
    """Head-of-line waiting: the wait of each request and the length of the queue."""
    rate, mine = at_middle(runs)
    figure = plot_style.new_figure(
        f"Head-of-line waiting at {rate}: in a sawtooth, requests wait for a whole group", 7.4
    )
    waits, queue = plot_style.panels(figure, 2, 1, sharex=True)
    waits.tick_params(labelbottom=True)
    looks = preset_styles(runs)
    for run in mine:
        waited = sorted((one.arrived_s, one.waited_s) for one in run.requests if one.waited_s is not None)
        if waited:
            waits.plot(*zip(*waited, strict=True), **{**looks[run.preset].as_points(), "markersize": 4})
        shown = [run.passes[at] for at in evenly(len(run.passes), 300)]
        if shown:
            times, lengths = [one.planned_s for one in shown], [one.waiting for one in shown]
            queue.step(times, lengths, where="post", **looks[run.preset].as_line())
    queue.locator_params(axis="y", integer=True)
    plot_style.label(waits, "arrival of the request (s)", "wait before its first pass (s)", "Each request's wait")
    plot_style.label(queue, SINCE, "requests waiting", "The queue")
    for one in (waits, queue):
        if one.get_lines():
            one.set_xlim(left=0)
            one.set_ylim(bottom=0)
        else:
            plot_style.note_empty(one, NOTHING)
    preset_legend(figure, mine, looks, marked=True)
    return figure
