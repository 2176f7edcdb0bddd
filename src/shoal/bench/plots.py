"""The pictures of a comparison: what each preset did with the same requests, and why it took that long.

Knows records and what is worth seeing in them. Does not know engines or pages. Every function takes RunRecords, one for
each preset and rate, and answers a matplotlib Figure; runs that failed are said to have failed, never left out.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.bench import ink
from shoal.bench.lanes import AGAIN, DECODE, PAD, PROMPT, Lane, lanes, spans
from shoal.bench.record import PassRecord, Promise, RequestRecord, RunRecord, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Sequence[RunRecord]
Timed = tuple[float, float, PassRecord]
LANES = 24
KINDS = {
    PROMPT: ("prompt", ink.PROMPT_INK, False),
    DECODE: ("output, one token per pass", ink.DECODE_INK, False),
    AGAIN: ("computed again", ink.AGAIN_INK, False),
    PAD: ("padding and dead rows", ink.WASTE_INK, True),
}
NOTHING = "no pass was run"
SINCE = "seconds since the run began"


def draw_all(runs: Runs, promise: Promise, folder: Path) -> dict[str, Path]:
    """Every plot as folder/name.svg and name.png; answers where each SVG is, in the order to show them."""
    return {name: ink.save(draw(runs, promise), folder, name) for name, draw in PLOTS.items()}


# ---- which runs a plot is about


def by_preset(runs: Runs) -> dict[str, list[RunRecord]]:
    """Each preset's runs from the lowest rate to the highest; "all at once" is the highest of all."""
    found: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: run.rate or float("inf")):
        found.setdefault(run.preset, []).append(run)
    return {preset: found[preset] for preset in dict.fromkeys(run.preset for run in runs)}


def rates_of(runs: Runs) -> list[float]:
    return sorted({run.rate for run in runs}, key=lambda rate: rate or float("inf"))


def at_middle(runs: Runs) -> tuple[str, list[RunRecord]]:
    """The rate in the middle of the sweep, in words, and each preset's run at it."""
    rates = rates_of(runs)
    return at_rate(runs, rates[len(rates) // 2]) if rates else ("no rate", [])


def at_highest(runs: Runs) -> tuple[str, list[RunRecord]]:
    """… and the highest, where the batch is fullest."""
    rates = rates_of(runs)
    return at_rate(runs, rates[-1]) if rates else ("no rate", [])


def at_rate(runs: Runs, rate: float) -> tuple[str, list[RunRecord]]:
    return in_words(rate), [run for run in runs if run.rate == rate]


def in_words(rate: float) -> str:
    return f"{rate:g} requests/s" if rate else "all at once"


def axis(run: RunRecord, name: str) -> str:
    """The run's setting on one axis, or nothing if it does not say."""
    value = run.settings.get(name, "")
    return value if isinstance(value, str) else ""


def line_names(runs: Runs) -> dict[str, str]:
    """What to call each preset in a legend: its label, unless the label changes from rate to rate."""
    names = {}
    for preset, mine in by_preset(runs).items():
        labels = {run.label for run in mine}
        names[preset] = ink.words(labels.pop() if len(labels) == 1 else preset)
    return names


def preset_legend(figure: "Figure", runs: Runs, marked: bool = False) -> None:
    from matplotlib.lines import Line2D

    names = line_names(runs)
    looks = ink.styles(names)
    handles = [Line2D([], [], **(one.as_points() if marked else one.as_line())) for one in looks.values()]
    ink.legend(figure, handles, list(names.values()))


def evenly(count: int, most: int = 400) -> list[int]:
    """At most `most` of the numbers below count, evenly spread, the last among them."""
    return sorted({int(at) for at in np.linspace(0, count - 1, min(count, most))}) if count else []


# ---- the sweep


def sweep_plot(runs: Runs, promise: Promise) -> "Figure":
    """Throughput against latency, and how much of it kept the promise."""
    figure = ink.sheet("Throughput against latency: further right and lower is better", 5.4)
    tokens, requests, kept = ink.panels(figure, 1, 3)
    requests.sharey(tokens)
    places = {rate: place for place, rate in enumerate(rates_of(runs))}
    looks = ink.styles(run.preset for run in runs)
    for preset, mine in by_preset(runs).items():
        sums = [summarise(run, promise, 0.0) for run in mine]
        done = [one for one in sums if one["normalised_s"]["p50"] > 0]
        latency = [one["normalised_s"]["p50"] * 1e3 for one in done]
        tokens.plot([one["output_tok_s"] for one in done], latency, **looks[preset].as_points())
        requests.plot([one["request_s"] for one in done], latency, **looks[preset].as_points())
        offered = [places[run.rate] for run in mine]
        kept.plot(offered, [one["goodput_request_s"] for one in sums], **looks[preset].as_points())
    latency_label = "median latency per output token (ms)"
    ink.label(tokens, "output tokens per second", latency_label, "Output tokens")
    ink.label(requests, "finished requests per second", "", "Finished requests")
    ink.label(kept, "offered requests per second", "requests per second", kept_title(promise))
    kept.set_xticks(list(places.values()), [f"{rate:g}" if rate else "all at\nonce" for rate in places])
    kept.set_ylim(bottom=0)
    for one in (tokens, requests):
        log_latency(one)
    preset_legend(figure, runs, marked=True)
    return figure


def kept_title(promise: Promise) -> str:
    return f"Kept: first token {promise.ttft_s:g} s, mean gap {promise.gap_s * 1e3:g} ms"


def log_latency(axes: "Axes") -> None:
    if not any(len(line.get_xdata()) for line in axes.get_lines()):  # type: ignore[arg-type]
        ink.say(axes, "no request finished")
        return
    plain_log(axes, "y")
    axes.set_xlim(left=0)


def plain_log(axes: "Axes", which: str) -> None:
    """A logarithmic axis with numbers people read: 0.5, 20, 3,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale, one = (axes.set_yscale, axes.yaxis) if which == "y" else (axes.set_xscale, axes.xaxis)
    scale("log")
    low, high = one.get_view_interval()
    decades = np.log10(max(high, 1e-9) / max(low, 1e-9))
    one.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,), numticks=12))
    one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    one.set_minor_formatter(NullFormatter())


# ---- distributions


def latency_plot(runs: Runs, promise: Promise) -> "Figure":
    """How long readers waited for the first token, and from token to token."""
    rate, mine = at_middle(runs)
    figure = ink.sheet(f"What readers felt at {rate}: first token early (curve to the left), long gaps rare (low)", 5.4)
    first, gaps = ink.panels(figure, 1, 2)
    looks = ink.styles(run.preset for run in runs)
    for run in mine:
        ttft = [request.ttft_s for request in run.requests if request.ttft_s is not None]
        cumulative(first, [max(value, 1e-3) for value in ttft], looks[run.preset])
        between = [gap * 1e3 for request in run.requests for gap in request.gaps_s]
        if in_pieces(run):
            longer(gaps, [max(value, 0.1) for value in between], looks[run.preset])
    ink.label(first, "time to first token (s)", "share of requests (%)", "First token: share served within")
    ink.label(gaps, "gap between tokens (ms)", "share of gaps that are longer (%)", gaps_title(mine))
    for one, limit in ((first, promise.ttft_s), (gaps, promise.gap_s * 1e3)):
        with_promise(one, limit)
    if gaps.get_lines():
        plain_log(gaps, "y")
    preset_legend(figure, mine)
    return figure


def in_pieces(run: RunRecord) -> bool:
    """Whether its readers got any token before the last; a group that holds its results back has no gaps."""
    return any(gap > 1e-4 for request in run.requests for gap in request.gaps_s)


def gaps_title(runs: Runs) -> str:
    whole = sum(1 for run in runs if run.passes and not in_pieces(run))
    return "Gaps between tokens" + (f" ({whole} not drawn: the answer comes in one piece)" if whole else "")


def with_promise(axes: "Axes", limit: float) -> None:
    if not axes.get_lines():
        ink.say(axes, "no token was streamed")
        return
    plain_log(axes, "x")
    axes.axvline(limit, color=ink.SOFT, linewidth=1, linestyle=(0, (2, 3)))
    axes.annotate(
        "promise",
        (limit, 1.0),
        (4, -9),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=8.5,
        color=ink.SOFT,
    )


def cumulative(axes: "Axes", values: list[float], style: ink.Style) -> None:
    if values:
        shares = np.linspace(0, 100, 201)
        axes.plot(np.percentile(values, shares), shares, **style.as_line())


def longer(axes: "Axes", values: list[float], style: ink.Style) -> None:
    """The share of values above each value, down to the single longest."""
    if values:
        shares = np.logspace(2, np.log10(100 / len(values)), 200)
        axes.plot(np.percentile(values, np.clip(100 - shares, 0, 100)), shares, **style.as_line())


# ---- the timeline


def timeline_plot(runs: Runs) -> "Figure":
    """Who was in which pass, and what was computed for nobody: the picture that explains the rest."""
    rate, mine = at_highest(runs)
    mine = sorted(mine, key=group_first)
    figure = ink.sheet(f"The batch over time, first {LANES} requests at {rate}: hatched grey is work for nobody", 1.0)
    count = len(mine)
    figure.set_figheight(1.3 + (2.5 if count <= 3 else 2.1) * max(1, count if count <= 3 else (count + 1) // 2))
    until_s = window_s(mine)
    axes = ink.small_multiples(figure, count, SINCE, "one lane per request, by arrival")
    for one, run in zip(axes, mine, strict=False):
        timeline_panel(one, run, until_s)
    handles, names = ink.swatches(KINDS.values())
    more, their = timeline_marks()
    ink.legend(figure, handles + more, names + their)
    return figure


def group_first(run: RunRecord) -> tuple[int, int]:
    """From the oldest idea to the newest: groups, then padded continuous, then ragged."""
    batching, layout = ("static", "dynamic", "continuous"), ("padded", "shrink", "ragged")
    mine = axis(run, "batching"), axis(run, "layout")
    return (
        batching.index(mine[0]) if mine[0] in batching else len(batching),
        layout.index(mine[1]) if mine[1] in layout else len(layout),
    )


def window_s(runs: Runs) -> float:
    """How much time to show: until the slowest has served its first requests, but at most 3 times the fastest."""
    ends = []
    for run in runs:
        first = sorted(run.requests, key=lambda request: request.arrived_s)[:LANES]
        ended = [request.ended_s for request in first if request.ended_s is not None and request.token_s]
        ends += [max(ended)] if ended else []
    return min(max(ends), 3 * min(ends)) if ends else 1.0


def timeline_panel(axes: "Axes", run: RunRecord, until_s: float) -> None:
    axes.set_xlim(0, until_s)
    axes.set_ylim(LANES, -0.4)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    padded = sum(one.padded for one in run.passes)
    share = padded / max(padded + sum(one.useful for one in run.passes), 1)
    named = [text for text in (axis(run, "batching"), axis(run, "layout"), axis(run, "prefill")) if text]
    ink.head(axes, ink.words(run.label), " · ".join([*named, f"{share:.0%} padding"]))
    if not run.passes:
        ink.say(axes, NOTHING)
        return
    drawn = lanes(run, LANES, near_s=until_s / 1500)
    axes.set_ylim(max(len(drawn), 6), -0.4)
    wait_lines(axes, drawn, until_s)
    for kind, (_, colour, waste) in KINDS.items():
        where = [
            (one.from_s, row + 0.08, min(one.to_s, until_s) - one.from_s, 0.84)
            for row, lane in enumerate(drawn)
            for one in lane.pieces
            if one.kind == kind and one.from_s < until_s
        ]
        ink.boxes(axes, where, zorder=2, **ink.area(colour, waste))


def wait_lines(axes: "Axes", drawn: list[Lane], until_s: float) -> None:
    """Thin lines while waiting, a pale band while in the batch, a dot where the reader saw the first token."""
    dots, bands = [], []
    for row, lane in enumerate(drawn):
        request = lane.request
        started_s = until_s if request.started_s is None else request.started_s
        axes.plot([request.arrived_s, min(started_s, until_s)], [row + 0.5] * 2, color="#9A9A9A", linewidth=0.8)
        if started_s < until_s:
            ended_s = until_s if request.ended_s is None else min(request.ended_s, until_s)
            bands.append((started_s, row + 0.08, ended_s - started_s, 0.84))
        if request.token_s and request.token_s[0] <= until_s:
            dots.append((request.token_s[0], row + 0.5))
    ink.boxes(axes, bands, zorder=1, **ink.area(ink.PALE, False))
    if dots:
        looks: dict[str, Any] = {"s": 9, "color": "white", "edgecolor": ink.TEXT, "linewidth": 0.7, "zorder": 4}
        axes.scatter([at_s for at_s, _ in dots], [row for _, row in dots], **looks)


def timeline_marks() -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot = Line2D([], [], marker="o", color="none", markerfacecolor="white", markeredgecolor=ink.TEXT, markersize=4)
    line = Line2D([], [], color="#9A9A9A", linewidth=0.8)
    names = ["waiting", "in the batch, not computed", "reader sees first token"]
    return [line, Patch(**ink.area(ink.PALE, False)), dot], names


# ---- memory


def kv_plot(runs: Runs) -> "Figure":
    """KV held and KV used over time."""
    rate, mine = at_middle(runs)
    figure = ink.sheet(f"KV memory at {rate}: hatched is held, but nothing is in it", 1.0)
    count = len(mine)
    figure.set_figheight(1.3 + 1.55 * max(1, count if count <= 3 else (count + 1) // 2))
    axes = ink.small_multiples(figure, count, SINCE, "share of all KV memory (%)", sharey=True)
    for one, run in zip(axes, mine, strict=False):
        kv_panel(one, run)
    most = max((each.kv_held / max(each.kv_total, 1) for run in mine for each in run.passes), default=0.0)
    axes[0].set_ylim(0, min(max(115 * most, 1), 105))
    used, waste = ("used", ink.DECODE_INK, False), ("held and not used", ink.WASTE_INK, True)
    ink.legend(figure, *ink.swatches([used, waste]))
    return figure


def kv_panel(axes: "Axes", run: RunRecord) -> None:
    held = sum(one.kv_held for one in run.passes)
    waste = 1 - sum(one.kv_used for one in run.passes) / held if held else 0.0
    memory = axis(run, "memory")
    ink.head(axes, ink.words(run.label), f"{memory} · {waste:.0%} wasted" if memory else f"{waste:.0%} wasted")
    if not run.passes:
        ink.say(axes, NOTHING)
        return
    times, used, held_share = kv_course(run)
    axes.fill_between(times, used, held_share, **ink.area(ink.WASTE_INK, True))
    axes.fill_between(times, used, **ink.area(ink.DECODE_INK, False))


def kv_course(run: RunRecord) -> tuple[list[float], list[float], list[float]]:
    """(times, used %, held %), as flat steps; nothing is held while nothing runs."""
    times, used, held = [0.0], [0.0], [0.0]
    for group in neighbours(list(spans(run.passes)), 150):
        from_s, to_s = group[0][0], group[-1][1]
        total = max(sum(one.kv_total for _, _, one in group), 1)
        if from_s - times[-1] > run.seconds / 100:
            times, used, held = [*times, times[-1], from_s], [*used, 0.0, 0.0], [*held, 0.0, 0.0]
        times += [from_s, to_s]
        used += [100 * sum(one.kv_used for _, _, one in group) / total] * 2
        held += [100 * sum(one.kv_held for _, _, one in group) / total] * 2
    return times, used, held


# ---- work per pass


def work_plot(runs: Runs) -> "Figure":
    """How big the passes were: one preset for each way of prefill."""
    rate, mine = at_middle(runs)
    mine = one_per_prefill(mine)
    figure = ink.sheet(f"Work per pass at {rate}: every peak is a pause for everybody in the batch", 1.0)
    figure.set_figheight(1.3 + 1.9 * max(len(mine), 1))
    axes = ink.small_multiples(figure, len(mine), SINCE, "positions computed in a pass", columns=1, sharey=True)
    for one, run in zip(axes, mine, strict=False):
        work_panel(one, run)
    most = max((each.useful + each.padded for run in mine for each in run.passes), default=0)
    axes[0].set_ylim(0, 1.15 * most or 1)
    ink.legend(figure, *ink.swatches([KINDS[DECODE], KINDS[PROMPT], KINDS[PAD]]))
    return figure


def one_per_prefill(runs: Runs) -> list[RunRecord]:
    """For each way of prefill the run that differs least in all else: continuous and ragged if there is one."""
    found: dict[str, RunRecord] = {}
    for run in sorted(
        runs, key=lambda run: (not run.passes, axis(run, "batching") != "continuous", axis(run, "layout") != "ragged")
    ):
        found.setdefault(axis(run, "prefill"), run)
    order = ("inline", "exclusive", "chunked")
    return sorted(found.values(), key=lambda run: (*order, axis(run, "prefill")).index(axis(run, "prefill")))


def work_panel(axes: "Axes", run: RunRecord) -> None:
    timed = list(spans(run.passes))
    prefill = axis(run, "prefill")
    if not timed:
        ink.head(axes, prefill or ink.words(run.label), ink.words(run.label))
        ink.say(axes, NOTHING)
        return
    longest = max(timed, key=lambda one: one[1] - one[0])
    least_s = run.passes[-1].committed_s / 900
    stacks: dict[str, list[tuple[float, float, float, float]]] = {DECODE: [], PROMPT: [], PAD: []}
    for from_s, to_s, one in largest_of(timed, 500):
        height = 0
        for kind, positions in split(one, run.requests).items():
            if positions:
                stacks[kind].append((from_s, height, max(to_s - from_s, least_s), positions))
            height += positions
    for kind, where in stacks.items():
        ink.boxes(axes, where, **ink.area(*KINDS[kind][1:]))
    from_s, to_s, one = longest
    work = one.useful + one.padded
    told = f"longest pass {(to_s - from_s) * 1e3:,.0f} ms, {work:,} positions"
    ink.head(axes, prefill or ink.words(run.label), f"{ink.words(run.label)} · {told}")
    axes.plot([(from_s + to_s) / 2], [work], marker="v", markersize=7, color=ink.TEXT, clip_on=False, zorder=5)
    axes.autoscale_view(scaley=False)


def neighbours(timed: list[Timed], most: int) -> list[list[Timed]]:
    """At most `most` groups of passes that follow one another."""
    step = max(-(-len(timed) // most), 1)
    return [timed[at : at + step] for at in range(0, len(timed), step)]


def largest_of(timed: list[Timed], most: int) -> list[Timed]:
    """At most `most` passes: of neighbours the largest, so that thinning never hides a peak."""
    return [max(group, key=lambda one: one[2].useful + one[2].padded) for group in neighbours(timed, most)]


def split(one: PassRecord, requests: Sequence[RequestRecord]) -> dict[str, int]:
    """The positions of a pass by kind."""
    prompt = sum(count for number, position, count in one.rows if position < requests[number].prompt)
    return {DECODE: max(one.useful - prompt, 0), PROMPT: min(prompt, one.useful), PAD: one.padded}


# ---- waiting


def waiting_plot(runs: Runs) -> "Figure":
    """Head-of-line waiting: who stood in the queue, how long, and how long the queue was."""
    rate, mine = at_middle(runs)
    figure = ink.sheet(f"Head-of-line waiting at {rate}: a saw means that latecomers wait for a whole group", 7.4)
    waits, queue = ink.panels(figure, 2, 1, sharex=True)
    waits.tick_params(labelbottom=True)
    looks = ink.styles(run.preset for run in runs)
    for run in mine:
        waited = sorted((one.arrived_s, one.waited_s) for one in run.requests if one.waited_s is not None)
        if waited:
            waits.plot(*zip(*waited, strict=True), **{**looks[run.preset].as_points(), "markersize": 4})
        shown = [run.passes[at] for at in evenly(len(run.passes), 300)]
        if shown:
            times, lengths = [one.planned_s for one in shown], [one.waiting for one in shown]
            queue.step(times, lengths, where="post", **looks[run.preset].as_line())
    queue.locator_params(axis="y", integer=True)
    ink.label(waits, "arrival of the request (s)", "waited before its first pass (s)", "Each request's wait")
    ink.label(queue, SINCE, "requests waiting", "The queue")
    for one in (waits, queue):
        if one.get_lines():
            one.set_xlim(left=0)
            one.set_ylim(bottom=0)
        else:
            ink.say(one, NOTHING)
    preset_legend(figure, mine, marked=True)
    return figure


# ---- tokens


def tokens_plot(runs: Runs) -> "Figure":
    """What was computed, and for whom."""
    rate, mine = at_middle(runs)
    figure = ink.sheet(f"Positions computed for the same requests at {rate}: only the blue part was needed", 1.0)
    figure.set_figheight(1.5 + 0.36 * max(len(mine), 1))
    (axes,) = ink.panels(figure, 1, 1)
    for row, run in enumerate(mine):
        padded, again = sum(one.padded for one in run.passes), sum(one.recomputed for one in run.passes)
        useful = sum(one.useful for one in run.passes) - again
        axes.barh(row, useful, height=0.66, **ink.area(ink.DECODE_INK, False))
        axes.barh(row, again, left=useful, height=0.66, **ink.area(ink.AGAIN_INK, False))
        axes.barh(row, padded, left=useful + again, height=0.66, **ink.area(ink.WASTE_INK, True))
        total = useful + again + padded
        shares = [f"{part / total:.0%} {what}" for part, what in ((padded, "padding"), (again, "again")) if part]
        remark = ", ".join(shares) if total else NOTHING
        looks: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": ink.SOFT}
        axes.annotate(remark, (total, row), (6, 0), **looks)
    axes.set_yticks(range(len(mine)), [ink.words(run.label) for run in mine])
    axes.set_ylim(max(len(mine), 1) - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * max((sum(one.useful + one.padded for one in run.passes) for run in mine), default=0) or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", visible=False)
    ink.label(axes, "positions computed", "")
    used, again_too = ("needed", ink.DECODE_INK, False), KINDS[AGAIN]
    ink.legend(figure, *ink.swatches([used, again_too, KINDS[PAD]]))
    return figure


# ---- the giant


def giant_plot(runs_by_prefill: Mapping[str, RunRecord]) -> "Figure":
    """One giant prompt arrives among running streams: their gaps, and its first token.

    The longest prompt is the giant, all others are streams. Names are shown as given: inline, exclusive, chunked.
    """
    figure = ink.sheet("A giant prompt among running streams: how long the others stall, how long it waits", 1.0)
    count = max(len(runs_by_prefill), 1)
    figure.set_figheight(1.3 + 2.1 * count)
    axes = ink.small_multiples(figure, count, SINCE, "gap before each token (ms)", columns=1, sharey=True)
    for one, (prefill, run) in zip(axes, runs_by_prefill.items(), strict=False):
        giant_panel(one, prefill, run)
    if any(one.collections for one in axes):
        plain_log(axes[0], "y")
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(low, high * 2.5)
    giant_legend(figure)
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
        ink.head(axes, ink.words(prefill), "")
        ink.say(axes, NOTHING)
        return
    big = len(points) > 1500  # as vectors they would be most of the page
    looks: dict[str, Any] = {"s": 7, "color": ink.DECODE_INK, "alpha": 0.55, "linewidth": 0, "rasterized": big}
    axes.scatter([at_s for at_s, _ in points], [gap for _, gap in points], **looks)
    worst = max(points, key=lambda point: point[1])
    told = f"largest gap {worst[1]:,.0f} ms"
    axes.plot(*worst, marker="o", markersize=9, color="none", markeredgecolor=ink.AGAIN_INK, markeredgewidth=1.6)
    late = worst[0] > 0.7 * run.seconds
    shift, side = ((-2, 8), "right") if late else ((2, 8), "left")
    axes.annotate(told, worst, shift, textcoords="offset points", fontsize=9, color=ink.AGAIN_INK, ha=side)
    if giant.ttft_s is not None:
        axes.axvspan(giant.arrived_s, giant.token_s[0], color=ink.PROMPT_INK, alpha=0.18, linewidth=0, zorder=0)
        axes.axvline(giant.token_s[0], color=ink.PROMPT_INK, linewidth=1.6)
        told += f" · first token of the giant ({giant.prompt:,} tokens) after {giant.ttft_s:,.2f} s"
    ink.head(axes, ink.words(prefill), told)


def giant_legend(figure: "Figure") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot = Line2D([], [], marker="o", color="none", markerfacecolor=ink.DECODE_INK, markeredgecolor="none", markersize=5)
    span = Patch(facecolor=ink.PROMPT_INK, alpha=0.3)
    ring = Line2D([], [], marker="o", color="none", markeredgecolor=ink.AGAIN_INK, markersize=8, markeredgewidth=1.6)
    names = ["a token of another stream", "the giant, from arrival to first token", "largest gap"]
    ink.legend(figure, [dot, span, ring], names)


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
