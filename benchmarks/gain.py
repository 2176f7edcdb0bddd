"""What predicts the gain of continuous over static batching? On the simulator: the engine's scheduler, virtual time.

    python -m benchmarks.gain [--profile llama-8b-h200] [--parts saturated,equal_latency,orca] [--out docs/reports/gain]

Two questions, for output lengths of several means and coefficients of variation (cv), and batches of several sizes:

saturated       both systems have more requests than slots: how many tokens per second more?
equal latency   at which rates does the median end-to-end time per output token reach k times that of a lone request?

Only batching and layout differ. Static takes the requests that wait when it is idle, at most a batch of them, pads them
to a rectangle and answers all when the slowest ends (Orca's FasterTransformer baseline). Continuous rebuilds the batch
at every pass. Memory is ample for both, prompts are whole, and there is no front. One more point is Orca's setting:
GPT-3 175B on 16 A100, prompts of 32–512 and outputs of 1–128 tokens, at twice the time per token of a lone request.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from shoal.bench import plot_style
from shoal.bench.record import Promise
from shoal.bench.tally import RunTally
from shoal.config.engine import EngineConfig
from shoal.core.events import PassEvents
from shoal.core.names import pick
from shoal.engine.loop import EngineLoop
from shoal.sim.cost import DeviceTimes
from shoal.sim.engines import simulated_loop
from shoal.sim.profile import Card, ModelShape, Profile, read_profile
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import ClosedArrivals, OpenArrivals, VirtualServer
from shoal.workload.arrivals import poisson
from shoal.workload.traces import TraceRequest

SYSTEMS: dict[str, dict[str, Any]] = {
    "static": {"batching": "dynamic", "window_ms": 0.0, "layout": "padded"},
    "continuous": {"batching": "continuous", "layout": "ragged"},
}
COMMON = {"prefill": "inline", "memory": "ondemand", "when_short": "recompute", "prefix_caching": False, "depth": 2}
PROMPT = 256  # tokens
LIMITS = (2.0, 5.0)  # times the latency per token of a lone request
TIMES = "\N{MULTIPLICATION SIGN}"
NEAR = 1.15  # rates are found to this factor


@dataclass(frozen=True)
class Case:
    """Lengths, and how many requests a batch may have."""

    mean: int
    cv: float
    slots: int

    def requests(self, count: int, seed: int = 0) -> list[TraceRequest]:
        """Outputs from a Gamma distribution, prompts of one length."""
        chance = random.Random(f"{seed}, {self.mean}, {self.cv}")
        outputs = [self._output(chance) for _ in range(count)]
        return [TraceRequest(0.0, PROMPT, output) for output in outputs]

    def _output(self, chance: random.Random) -> int:
        shape = 1 / self.cv**2 if self.cv else 0.0
        return max(1, round(chance.gammavariate(shape, self.mean / shape))) if shape else self.mean

    def predicted(self, seed: int = 1) -> float:
        """The longest of a batch over the mean: what a static batch waits for, over what it needs."""
        lengths = [one.output for one in self.requests(400 * self.slots, seed)]
        groups = [lengths[at : at + self.slots] for at in range(0, len(lengths), self.slots)]
        return statistics.mean(map(max, groups)) / statistics.mean(lengths)


class WindowTally(RunTally):
    """Counts output tokens up to the last arrival, after which the batch runs empty."""

    def __init__(self) -> None:
        super().__init__(Promise(1e9, 1e9))
        self.arrived_s = 0.0
        self.in_window: list[tuple[float, int]] = []  # (when, tokens so far)

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None:
        super().arrived(number, one, at_s)
        self.arrived_s = at_s

    def delivered(self, events: PassEvents, at_s: float) -> None:
        super().delivered(events, at_s)
        self.in_window.append((at_s, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        """From the first to the last arrival of users that always have another request."""
        tokens = max((count for at_s, count in self.in_window if at_s <= self.arrived_s), default=0)
        return tokens / self.arrived_s if self.arrived_s else 0.0


def engine(profile: Profile, system: str, slots: int, longest: int) -> EngineLoop:
    memory = slots * (longest + 32) * profile.model.kv_token_bytes
    settings = {**COMMON, **SYSTEMS[system], "max_num_seqs": slots, "group_size": slots, "kv_memory": memory}
    return simulated_loop(profile, EngineConfig.from_mapping(settings))


def run(profile: Profile, system: str, slots: int, requests: list[TraceRequest], users: int = 0) -> WindowTally:
    tally, most = WindowTally(), max(one.output for one in requests)
    longest = max(one.prompt for one in requests) + most
    server = VirtualServer([engine(profile, system, slots, longest)], tally, RequestMaker(most, 16, shared=False))
    server.run(ClosedArrivals(requests, users) if users else OpenArrivals(requests))
    assert tally.finished == len(requests), "a request was refused"
    return tally


def saturated(profile: Profile, case: Case, batches: int = 8) -> dict[str, float]:
    """Output tokens per second of both systems, with twice as many users as slots."""
    requests = case.requests(batches * case.slots)
    return {name: run(profile, name, case.slots, requests, 2 * case.slots).tokens_per_s for name in SYSTEMS}


# ---- at equal latency


def per_token_s(profile: Profile, system: str, slots: int, requests: list[TraceRequest], rate: float) -> float:
    """The median time per output token at a rate."""
    tally = run(profile, system, slots, poisson(requests, rate, seed=1))
    return tally.spreads["normalised_s"].spread()["p50"]


def highest_rate(latency_s: Callable[[float], float], most_s: float, low: float, high: float) -> float:
    """The highest rate at which the latency is at most this; `low` keeps it."""
    if latency_s(high) <= most_s:
        return high
    while high / low > NEAR:
        middle = (low * high) ** 0.5
        if latency_s(middle) <= most_s:
            low = middle
        else:
            high = middle
    return low


def equal_latency(
    profile: Profile, slots: Sequence[int], requests: list[TraceRequest], limits: Sequence[float]
) -> list[dict[str, float]]:
    """For each limit, the rates that both systems reach; `slots` are the static batches to choose from, and the largest
    is continuous batching's."""
    lone = run(profile, "continuous", 1, requests[:20], users=1)
    lone_s = lone.spreads["normalised_s"].spread()["p50"]
    mean = statistics.mean(one.output for one in requests)
    curves = {
        (system, size): cache(partial(per_token_s, profile, system, size, requests))
        for system, sizes in (("static", slots), ("continuous", slots[-1:]))
        for size in sizes
    }
    # a higher rate cannot be kept for long, whatever the latency of a run with so few requests
    most = {one: run(profile, *one, requests * 3, 2 * one[1]).tokens_per_s / mean for one in curves}
    found = []
    for limit in limits:
        row: dict[str, float] = {"limit": limit, "lone_s": lone_s}
        for system in SYSTEMS:
            reached = {
                one[1]: highest_rate(curve, limit * lone_s, 0.02 * most[one] / one[1], most[one])
                for one, curve in curves.items()
                if one[0] == system
            }
            best = max(reached, key=lambda size: reached[size])
            row[f"{system}_rate"], row[f"{system}_slots"] = reached[best], best
        row["gain"] = row["continuous_rate"] / row["static_rate"]
        found.append(row)
    return found


def gpt3() -> Profile:
    """GPT-3 175B on 16 A100 (8 ways by 2 stages), estimated: a lone decode takes the 95 ms that Orca's paper implies,
    in which 320 positions could be computed at half the matrix rate of the 8 GPUs of a stage."""
    shape = ModelShape("GPT-3-175B", 175 * 10**9, 96, 96, 96, 128, 50257, 2048, 350 * 10**9, 4_718_592)
    card = Card("16 A100 40 GB", "cuda", 640 * 10**9, 24_880, 4992)
    base = read_profile("llama-8b-h200")
    points = ((1, 0.090), (320, 0.095), (640, 0.184), (8192, 2.3))
    device = DeviceTimes(points, points, 1e-5, 1e-5, 6.3e-7, 4e-9)
    return replace(base, name="gpt3-175b", model=shape, card=card, kv_tokens=48_000, device=device)


def orca_point(requests: int) -> dict[str, float]:
    chance = random.Random(0)
    lengths = [TraceRequest(0.0, chance.randint(32, 512), chance.randint(1, 128)) for _ in range(requests)]
    return equal_latency(gpt3(), (1, 8, 32, 64), lengths, (2.0,))[0]


# ---- the report


def saturated_rows(profile: Profile, quick: bool) -> Iterator[dict[str, Any]]:
    means, cvs, sizes = ((100,), (0.0, 1.0), (8,)) if quick else ((100, 2000), (0.0, 0.5, 1.0, 2.0), (8, 32, 128))
    for mean, slots, cv in product(means, sizes, cvs):
        case = Case(mean, cv, slots)
        speeds = saturated(profile, case, 4 if quick else 6)
        gain = speeds["continuous"] / speeds["static"]
        yield {**asdict(case), **speeds, "gain": gain, "predicted": case.predicted()}


def latency_rows(profile: Profile, quick: bool) -> Iterator[dict[str, Any]]:
    sizes, cvs = ((8,), (1.0,)) if quick else ((8, 32), (0.0, 1.0, 2.0))
    for slots, cv in product(sizes, cvs):
        case = Case(100, cv, slots)
        for row in equal_latency(profile, (slots,), case.requests(40 if quick else 120), LIMITS):
            yield {**asdict(case), **row}


def orca_rows(profile: Profile, quick: bool) -> Iterator[dict[str, Any]]:
    yield orca_point(40 if quick else 160)


PARTS = {"saturated": saturated_rows, "equal_latency": latency_rows, "orca": orca_rows}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| saturated: mean, batch | "
        + " | ".join(f"cv {cv:g}" for cv in sorted({one["cv"] for one in found["saturated"]}))
        + " |"
    ]
    lines.append("|---|" + "---|" * (lines[0].count("|") - 2))
    rows: dict[tuple[int, int], list[str]] = {}
    for one in found["saturated"]:
        cell = f"{one['gain']:.1f}{TIMES} ({one['predicted']:.1f})"
        rows.setdefault((one["mean"], one["slots"]), []).append(cell)
    lines += [f"| {mean:,} tokens, {slots} | " + " | ".join(cells) + " |" for (mean, slots), cells in rows.items()]
    if "equal_latency" not in found or "orca" not in found:
        return "\n".join(lines)
    limits = sorted({one["limit"] for one in found["equal_latency"]})
    lines += [
        "",
        "| equal latency: mean, cv, batch | "
        + " | ".join(f"{limit:g}{TIMES} a lone request" for limit in limits)
        + " |",
    ]
    lines.append("|---|" + "---|" * len(limits))
    apart: dict[tuple[int, float, int], list[str]] = {}
    for one in found["equal_latency"]:
        cell = f"{one['gain']:.1f}{TIMES} ({one['static_rate']:.2f} → {one['continuous_rate']:.2f} req/s)"
        apart.setdefault((one["mean"], one["cv"], one["slots"]), []).append(cell)
    lines += [
        f"| {mean:,}, cv {cv:g}, {slots} | " + " | ".join(cells) + " |" for (mean, cv, slots), cells in apart.items()
    ]
    orca = found["orca"][0]
    lines += [
        "",
        f"Orca's setting, at {orca['limit'] * orca['lone_s'] * 1000:.0f} ms per token: "
        f"static {orca['static_rate']:.3f} req/s (batches of {orca['static_slots']:g}), "
        f"continuous {orca['continuous_rate']:.2f} req/s: {orca['gain']:.1f}{TIMES}",
    ]
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, Any]]], folder: Path, about: str) -> None:
    figure = plot_style.new_figure("Continuous over static batching: what the gain depends on", 4.6)
    plot_style.add_to_title(figure, about)
    left, right = plot_style.panels(figure, 1, 2)
    sizes = sorted({one["slots"] for one in found["saturated"]})
    looks = plot_style.styles([f"batch of {size}" for size in sizes])
    middle = sorted({one["mean"] for one in found["saturated"]})[-1]
    for size in sizes:
        name = f"batch of {size}"
        rows = [one for one in found["saturated"] if one["slots"] == size and one["mean"] == middle]
        cvs = [one["cv"] for one in rows]
        left.plot(cvs, [one["gain"] for one in rows], label=name, **looks[name].as_line())
        guess = {**looks[name].as_line(), "linestyle": ":", "linewidth": 1.1}
        left.plot(cvs, [one["predicted"] for one in rows], **guess)
        for cv, line in ((0.0, ":"), (1.0, "-")):
            apart = [
                one
                for one in found.get("equal_latency", ())
                if one["slots"] == size and one["cv"] == cv and one["mean"] == 100
            ]
            style = {**looks[name].as_line(), "linestyle": line}
            right.plot([one["limit"] for one in apart], [one["gain"] for one in apart], **style)
    orca = found.get("orca", [{"limit": math.nan, "gain": math.nan}])[0]
    right.plot([orca["limit"]], [orca["gain"]], "*", markersize=13, color=plot_style.TEXT)
    right.annotate("Orca's setting", (orca["limit"], orca["gain"]), (8, 0), textcoords="offset points", fontsize=9)
    plot_style.label(left, "coefficient of variation of the output length", "times the tokens per second",
                     f"saturated, mean {middle:,} tokens (dotted: longest of a batch / mean)")  # fmt: skip
    plot_style.label(right, "latency per token allowed, times that of a lone request", "times the rate",
                     "at equal latency, mean 100 tokens (dotted: cv 0, solid: cv 1)")  # fmt: skip
    for axes in (left, right):
        plot_style.log_axis(axes, "y")
    if "equal_latency" not in found:
        right.set_axis_off()
        right.set_title("", loc="left")
    plot_style.legend(figure, *left.get_legend_handles_labels())
    plot_style.save(figure, folder, "gain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="llama-8b-h200", metavar="NAME|FILE")
    parser.add_argument("--quick", action="store_true", help="few cases, to see that it runs")
    parser.add_argument("--parts", default=",".join(PARTS), help="run these, and keep the others of an earlier run")
    parser.add_argument("--out", default="docs/reports/gain", metavar="DIR")
    args = parser.parse_args()
    profile, folder = read_profile(args.profile), Path(args.out)
    file = folder / "gain.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts.split(","):
        found[part] = []
        for row in pick(PARTS, part, "part")(profile, args.quick):
            found[part].append(row)
            print(part, {name: round(value, 4) for name, value in row.items()}, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**found, "profile": profile.in_words()}, indent=1) + "\n")
    draw(found, folder, f"simulated: {profile.in_words()}")
    print(table(found))


if __name__ == "__main__":
    main()
