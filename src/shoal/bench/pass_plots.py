"""What each preset's passes computed and held: KV memory, positions per pass, positions in all.

Knows pass records and how they are drawn. Does not know engines or pages.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.bench import plot_style
from shoal.bench.lanes import AGAIN, DECODE, PAD, PROMPT, VAIN, spans
from shoal.bench.plot_runs import KINDS, NOTHING, SINCE, Runs, at_middle, axis, wasted
from shoal.bench.record import PassRecord, RequestRecord, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Timed = tuple[float, float, PassRecord]
STACKED = (DECODE, PROMPT, AGAIN, VAIN, PAD)  # from the bottom


def kv_plot(runs: Runs) -> "Figure":
    """KV held and KV used over time."""
    rate, mine = at_middle(runs)
    figure = plot_style.new_figure(f"KV memory at {rate}: hatched is held but unused", 1.0)
    count = len(mine)
    figure.set_figheight(1.3 + 1.55 * max(1, count if count <= 3 else (count + 1) // 2))
    axes = plot_style.small_multiples(figure, count, SINCE, "share of all KV memory (%)", sharey=True)
    for one, run in zip(axes, mine, strict=False):
        kv_panel(one, run)
    most = max((each.kv_held / max(each.kv_total, 1) for run in mine for each in run.passes), default=0.0)
    axes[0].set_ylim(0, min(max(115 * most, 1), 105))
    used, waste = ("used", plot_style.DECODE_COLOUR, ""), ("held and not used", *KINDS[PAD][1:])
    plot_style.legend(figure, *plot_style.swatches([used, waste]))
    return figure


def kv_panel(axes: "Axes", run: RunRecord) -> None:
    held = sum(one.kv_held for one in run.passes)
    waste = 1 - sum(one.kv_used for one in run.passes) / held if held else 0.0
    memory = axis(run, "memory")
    plot_style.panel_title(
        axes, plot_style.safe_label(run.label), f"{memory} · {waste:.0%} wasted" if memory else f"{waste:.0%} wasted"
    )
    if not run.passes:
        plot_style.note_empty(axes, NOTHING)
        return
    times, used, held_share = kv_course(run)
    axes.fill_between(times, used, held_share, **plot_style.area(*KINDS[PAD][1:]))
    axes.fill_between(times, used, **plot_style.area(plot_style.DECODE_COLOUR))
    axes.set_xlim(left=0)


def kv_course(run: RunRecord) -> tuple[list[float], list[float], list[float]]:
    """(times, used %, held %) as steps; both are 0 while no pass runs."""
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


def work_plot(runs: Runs) -> "Figure":
    """Positions per pass, one preset for each prefill policy."""
    rate, mine = at_middle(runs)
    mine = one_per_prefill(mine)
    figure = plot_style.new_figure(f"Work per pass at {rate}: a peak delays every request in the batch", 1.0)
    figure.set_figheight(1.3 + 1.9 * max(len(mine), 1))
    axes = plot_style.small_multiples(figure, len(mine), SINCE, "positions computed in a pass", columns=1, sharey=True)
    for one, run in zip(axes, mine, strict=False):
        work_panel(one, run)
    most = max((each.useful + each.padded for run in mine for each in run.passes), default=0)
    axes[0].set_ylim(0, 1.15 * most or 1)
    plot_style.legend(figure, *plot_style.swatches(KINDS[kind] for kind in STACKED))
    return figure


def one_per_prefill(runs: Runs) -> list[RunRecord]:
    """For each prefill policy one run that is alike in all else: continuous and ragged if there is one."""
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
        plot_style.panel_title(axes, prefill or plot_style.safe_label(run.label), plot_style.safe_label(run.label))
        plot_style.note_empty(axes, NOTHING)
        return
    longest = max(timed, key=lambda one: one[1] - one[0])
    least_s = run.passes[-1].committed_s / 900
    stacks: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in STACKED}
    for from_s, to_s, one in largest_of(timed, 500):
        height = 0
        for kind, positions in split(one, run.requests).items():
            if positions:
                stacks[kind].append((from_s, height, max(to_s - from_s, least_s), positions))
            height += positions
    for kind, where in stacks.items():
        plot_style.rectangles(axes, where, **plot_style.area(*KINDS[kind][1:]))
    from_s, to_s, one = longest
    work = one.useful + one.padded
    longest_text = f"longest pass {(to_s - from_s) * 1e3:,.0f} ms, {work:,} positions"
    plot_style.panel_title(
        axes, prefill or plot_style.safe_label(run.label), f"{plot_style.safe_label(run.label)} · {longest_text}"
    )
    axes.plot([(from_s + to_s) / 2], [work], marker="v", markersize=7, color=plot_style.TEXT, clip_on=False, zorder=5)
    axes.autoscale_view(scaley=False)
    axes.set_xlim(left=0)


def neighbours(timed: list[Timed], most: int) -> list[list[Timed]]:
    """At most `most` groups of consecutive passes."""
    step = max(-(-len(timed) // most), 1)
    return [timed[at : at + step] for at in range(0, len(timed), step)]


def largest_of(timed: list[Timed], most: int) -> list[Timed]:
    """At most `most` passes: the largest of each group, so that thinning hides no peak."""
    return [max(group, key=lambda one: one[2].useful + one[2].padded) for group in neighbours(timed, most)]


def split(one: PassRecord, requests: Sequence[RequestRecord]) -> dict[str, int]:
    """The positions of a pass by kind. What is recomputed is computed as a prompt is."""
    prompts = sum(count for number, position, count in one.rows if position < requests[number].prompt)
    prompt = max(min(prompts, one.useful) - one.recomputed, 0)
    decode = max(one.useful - prompt - one.recomputed - one.vain, 0)
    return {DECODE: decode, PROMPT: prompt, AGAIN: one.recomputed, VAIN: one.vain, PAD: one.padded}


def tokens_plot(runs: Runs) -> "Figure":
    """Positions by use: needed, recomputed, computed in vain, padding."""
    rate, mine = at_middle(runs)
    figure = plot_style.new_figure(f"Positions computed for the same requests at {rate}: only blue was needed", 1.0)
    figure.set_figheight(1.5 + 0.36 * max(len(mine), 1))
    (axes,) = plot_style.panels(figure, 1, 1)
    for row, run in enumerate(mine):
        padded, again, vain = wasted(run)
        used = sum(one.useful for one in run.passes) - again - vain
        total = 0
        for part, kind in ((used, DECODE), (again, AGAIN), (vain, VAIN), (padded, PAD)):
            axes.barh(row, part, left=total, height=0.66, **plot_style.area(*KINDS[kind][1:]))
            total += part
        named = ((padded, "padding"), (again, "recomputed"), (vain, "in vain"))
        shares = [f"{part / total:.0%} {what}" for part, what in named if part]
        remark = ", ".join(shares) if total else NOTHING
        looks: dict[str, Any] = {
            "textcoords": "offset points",
            "va": "center",
            "fontsize": 8.5,
            "color": plot_style.SOFT,
        }
        axes.annotate(remark, (total, row), (6, 0), **looks)
    axes.set_yticks(range(len(mine)), [plot_style.safe_label(run.label) for run in mine])
    axes.set_ylim(max(len(mine), 1) - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * max((sum(one.useful + one.padded for one in run.passes) for run in mine), default=0) or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", visible=False)
    plot_style.label(axes, "positions computed", "")
    needed = ("needed", plot_style.DECODE_COLOUR, "")
    plot_style.legend(figure, *plot_style.swatches([needed, KINDS[AGAIN], KINDS[VAIN], KINDS[PAD]]))
    return figure
