"""Engines for CPUs beside busy programs: what is left of their speed, as a share of the fair share.

    python benchmarks/neighbours.py --workload cpu64 --requests 16 --model models/smollm2 \\
      --only shoal:float32,openvino:f32 --openvino f32=models/smollm2.ov-fp32 --python openvino=VENV/bin/python \\
      --neighbours 0,2,8,1x20ms --runs 3 --figures neighbours.jsonl --plot neighbours

Shoal and every peer that can be imported, as in cpu_peers.py and with its options, measured beside each of
`--neighbours`: N is N processes that always compute, NxTms are N that compute and sleep T ms in turns. Measured are
output tokens per second over the first `--requests` of the workload, all at once, and the decode speed of one request.
The fair share is cores / (cores + busy processes); a process that comes and goes counts half. "scheduler" is what this
machine's scheduler gives to one plain loop per core, as a share of all cores.

Each measurement is a process of its own, which loads and warms up before the neighbours start. It is killed
`--limit-s` seconds after that: its speed is then tokens so far over the limit, marked with *. A share compares the
seconds with those that the quiet machine took for as many tokens. Rounds (`--runs`) alternate over neighbours and
engines; figures are medians. With `--figures`, runs are kept in a file and the table covers all in it (`--runs 0`: only
that). The longest it can take is runs x engines x neighbours x 2 x (loading + limit). Run it in one terminal, with
nothing else on the machine: some systems share the CPU among sessions first, then among the processes of each.

Owns the neighbours, the limit and the table. What is run is in cpu_peers.py, how in cpu_engines.py.
"""

import argparse
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import cpu_peers
from cpu_engines import ONE
from cpu_peers import EIGHT_BITS, WORKER, Row

from shoal.bench.cpu_noise import NoiseWatch, noise_figures, noise_in, under_banner, worst

KINDS = {"throughput": "output tok/s", "single": "one request, decode tok/s"}
LOAD_LIMIT_S, SETTLE_S, PROGRESS_S, REFERENCE_S = 600.0, 0.3, 0.2, 3.0
SPIN = """
import os, sys, time
busy_s, idle_s, parent = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
while os.getppid() == parent:
    end_s = time.perf_counter() + busy_s
    while time.perf_counter() < end_s:
        pass
    time.sleep(idle_s) if idle_s else None
"""
REFERENCE = """
import sys, time
end_s = time.perf_counter() + float(sys.argv[1])
begun_s = time.process_time()
while time.perf_counter() < end_s:
    pass
print(time.process_time() - begun_s)
"""
Run = dict[str, Any]  # one measurement, as kept in --figures
Points = Sequence[tuple[float, int]]  # seconds since the start, tokens so far


@dataclass(frozen=True)
class Neighbours:
    """Processes beside the engine. turn_ms: each computes and sleeps that long in turns; 0: it always computes."""

    count: int
    turn_ms: int = 0

    @classmethod
    def parse(cls, text: str) -> "Neighbours":
        found = re.fullmatch(r"(\d+)(?:x([1-9]\d*)ms)?", text)
        if not found:
            raise SystemExit(f"--neighbours: {text!r} should be a number of processes, such as 2, or 1x20ms")
        return cls(int(found[1]), int(found[2] or 0))

    @property
    def name(self) -> str:
        if not self.count:
            return "quiet"
        return f"{self.count} in turns of {self.turn_ms} ms" if self.turn_ms else f"{self.count} spinning"

    def fair_share(self, cores: int) -> float:
        return cores / (cores + self.count * (0.5 if self.turn_ms else 1.0))

    @contextmanager
    def running(self) -> Iterator[None]:
        """They end with the block, and by themselves if this process is killed."""
        turn_s = str(self.turn_ms / 1000)
        busy_s, idle_s = (turn_s, turn_s) if self.turn_ms else ("0.1", "0")
        with ExitStack() as ends:
            for _ in range(self.count):
                one = subprocess.Popen([sys.executable, "-S", "-c", SPIN, busy_s, idle_s, str(os.getpid())])
                ends.callback(one.wait)
                ends.callback(one.kill)
            if self.count:
                time.sleep(SETTLE_S)
            yield


# ---- one measurement -------------------------------------------------------------------------------------------------


class Worker:
    """cpu_engines.py in a process of its own, and in the session of the neighbours."""

    def __init__(self, python: str, task: dict[str, Any], env: dict[str, str], errors: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [python, str(WORKER), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
            process_group=0,  # to be killed with the processes that it starts
        )
        self.ended = False  # it will tell no more
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def messages(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """What it tells within the limit."""
        end_s = time.perf_counter() + limit_s
        while (left_s := end_s - time.perf_counter()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except queue.Empty:
                return
            if line is None:
                self.ended = True
                return
            if line.startswith(('{"ready"', '{"s"')):
                yield json.loads(line)

    def go(self) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10.0)
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()


def measured(worker: Worker, neighbours: Neighbours, total: int, limit_s: float) -> Run | None:
    """None: it failed. The neighbours run only while tokens are counted."""
    ready = next(worker.messages(LOAD_LIMIT_S), None)
    if ready is None:
        return None
    points: list[tuple[float, int]] = []
    watch = NoiseWatch()
    with neighbours.running():
        worker.go()
        for message in worker.messages(limit_s):
            points.append((round(message["s"], 4), message["tokens"]))
            if points[-1][1] == total:
                break
        noise = noise_figures(watch.noise())
    finished = bool(points) and points[-1][1] == total
    if not finished:
        if worker.ended:
            return None
        points.append((limit_s, points[-1][1] if points else 0))
    return {"finished": finished, "points": points, **ready["ready"], **noise}


def run_once(args: argparse.Namespace, row: Row, kind: str, neighbours: Neighbours, python: str) -> Run | None:
    engine, variant, _ = row
    lengths = [ONE] if kind == "single" else cpu_peers.workload(args)
    task = cpu_peers.task_of(args, row, lengths) | {"progress_s": PROGRESS_S}
    with tempfile.TemporaryFile() as errors:
        worker = Worker(python, task, cpu_peers.environment(engine, args.threads), errors)
        try:
            found = measured(worker, neighbours, sum(output for _, output in lengths), args.limit_s)
        finally:
            worker.kill()
        if found is None:
            errors.seek(0)
            why = errors.read().decode(errors="replace")[-2000:]
            print(f"{engine}:{variant} failed ({worker.process.returncode})\n{why}", file=sys.stderr)
            return None
    return {
        "row": f"{engine}:{variant}",
        "kind": kind,
        "neighbours": neighbours.name,
        **found,
    }


def reference(neighbours: Neighbours, cores: int) -> Run:
    """The share of all cores that plain loops get, one for each core."""
    with neighbours.running(), ExitStack() as ends:
        loops = []
        for _ in range(cores):
            command = [sys.executable, "-S", "-c", REFERENCE, str(REFERENCE_S)]
            one = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            ends.callback(one.wait)
            ends.callback(one.kill)
            loops.append(one)
        cpu_s = sum(float(one.communicate()[0]) for one in loops)
    return {"row": "scheduler", "neighbours": neighbours.name, "share": cpu_s / (cores * REFERENCE_S)}


# ---- figures ---------------------------------------------------------------------------------------------------------


def counted(run: Run) -> Points:
    """From where tokens count: the start, or the first token of a single request."""
    points: Points = [(0.0, 0), *run["points"]]
    if run["kind"] == "single" and len(points) > 2:
        points = points[1:]
    first_s, first = points[0]
    return [(second - first_s, tokens - first) for second, tokens in points]


def speed(points: Points) -> float:
    seconds, tokens = points[-1]
    return tokens / seconds


def seconds_for(points: Points, tokens: int) -> float:
    """Seconds until there were that many tokens, between two points and after the last one by a straight line."""
    for (before_s, before), (after_s, after) in pairwise(points):
        if before < tokens <= after:
            return before_s + (after_s - before_s) * (tokens - before) / (after - before)
    return tokens / speed(points) if tokens else 0.0


def share(points: Points, quiet: Sequence[Points]) -> float | None:
    """Speed as a share of the quiet machine's, for the same tokens."""
    seconds, tokens = points[-1]
    fit = [one for one in quiet if speed(one)]
    return statistics.median(seconds_for(one, tokens) for one in fit) / seconds if fit else None


def summary(runs: Sequence[Run], cases: Sequence[Neighbours], cores: int) -> dict[str, Any]:
    """Medians over the rounds: kind -> row -> name of the neighbours -> figures."""
    figures: dict[str, Any] = {"cores": cores, "fair_share": {}, "scheduler": {}, **{kind: {} for kind in KINDS}}
    for case in cases:
        figures["fair_share"][case.name] = case.fair_share(cores)
        given = [run["share"] for run in runs if run["row"] == "scheduler" and run["neighbours"] == case.name]
        figures["scheduler"][case.name] = statistics.median(given) if given else None
    engines = [run for run in runs if run["row"] != "scheduler"]
    figures |= noise_figures(worst(map(noise_in, engines)))
    grouped: dict[tuple[str, str, str], list[Run]] = {}
    for run in engines:
        grouped.setdefault((run["kind"], run["row"], run["neighbours"]), []).append(run)
    for (kind, row, name), some in grouped.items():
        if name not in figures["fair_share"]:
            continue
        quiet = [counted(run) for run in grouped.get((kind, row, "quiet"), [])]
        shares = [found for run in some if (found := share(counted(run), quiet)) is not None]
        figures[kind].setdefault(row, {})[name] = {
            "tok_s": statistics.median(speed(counted(run)) for run in some),
            "of_fair_share": statistics.median(shares) / figures["fair_share"][name] if shares else None,
            "runs": len(some),
            "stopped": sum(not run["finished"] for run in some),
            "version": some[-1]["version"],
        }
    return figures


def cell(figures: dict[str, Any] | None, name: str) -> str:
    if figures is None:
        return "-"
    text = f"{figures['tok_s']:,.1f}" + ("*" if figures["stopped"] else "")
    known = name != "quiet" and figures["of_fair_share"] is not None
    return f"{text} ({figures['of_fair_share']:.2f})" if known else text


def over_peers(rows: dict[str, Any], name: str) -> dict[str, str]:
    """One of Shoal's rows over the best peer of its class (8 bits, or more), beside each of the neighbours."""
    small = name.endswith(EIGHT_BITS)
    peers = [one for one in rows if not one.startswith("shoal:") and one.endswith(EIGHT_BITS) == small]
    found = {}
    for case, figures in rows[name].items():
        theirs = max((rows[one][case]["tok_s"] for one in peers if case in rows[one]), default=0.0)
        found[case] = f"{figures['tok_s'] / theirs:.2f}" if theirs else "-"
    return found


def table(figures: dict[str, Any]) -> str:
    """Markdown: one table for each kind."""
    names = list(figures["fair_share"])
    lines = []
    for kind, title in KINDS.items():
        rows = figures[kind]
        lines += [f"| {title} (of the fair share) | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        lines.append("| fair share | " + " | ".join(f"{figures['fair_share'][name]:.2f}" for name in names) + " |")
        given = [figures["scheduler"][name] for name in names]
        lines.append("| scheduler | " + " | ".join("-" if one is None else f"{one:.2f}" for one in given) + " |")
        for row, found in rows.items():
            lines.append(f"| {row} | " + " | ".join(cell(found.get(name), name) for name in names) + " |")
        for row in (row for row in rows if row.startswith("shoal:") and len(rows) > 1):
            over = over_peers(rows, row)
            lines.append(f"| {row} over the best peer | " + " | ".join(over.get(name, "-") for name in names) + " |")
        lines.append("")
    return "\n".join([*lines, *remarks(figures)])


def remarks(figures: dict[str, Any]) -> list[str]:
    versions = {row: next(iter(found.values()))["version"] for kind in KINDS for row, found in figures[kind].items()}
    lines = [f"{figures['cores']} cores; " + ", ".join(f"{row} {version}" for row, version in versions.items())]
    lines.append("Medians. *: runs were stopped at the limit.")
    return lines


def draw(figures: dict[str, Any], path: Path) -> None:
    """path.svg and path.png: bars of tok/s, and a line across each bar at its fair share of the quiet speed."""
    from shoal.bench import plot_style

    names = list(figures["fair_share"])
    rows = list(dict.fromkeys(row for kind in KINDS for row in figures[kind]))
    figure = plot_style.new_figure("Speed beside busy programs; the black line is the fair share", 3.6 * len(KINDS))
    handles = {}
    for axes, (kind, title) in zip(plot_style.panels(figure, len(KINDS), 1), KINDS.items(), strict=True):
        width = 0.8 / max(len(rows), 1)
        for number, row in enumerate(rows):
            found = figures[kind].get(row, {})
            for place, name in enumerate(names):
                if name not in found:
                    continue
                left = place - 0.4 + number * width
                handles[row] = axes.bar(
                    left,
                    found[name]["tok_s"],
                    0.9 * width,
                    align="edge",
                    color=plot_style.COLOURS[number % len(plot_style.COLOURS)],
                )
                if "quiet" in found and name != "quiet":
                    fair = found["quiet"]["tok_s"] * figures["fair_share"][name]
                    axes.plot([left, left + 0.9 * width], [fair, fair], color="black", linewidth=1.6)
        axes.set_xticks(range(len(names)), names)
        plot_style.label(axes, "", title)
    plot_style.legend(figure, list(handles.values()), list(handles))
    plot_style.save(figure, path.parent, path.name)


# ---- the rounds ------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = cpu_peers.options(__doc__)
    parser.add_argument("--neighbours", default="0,2,8,1x20ms", help="separated by commas; 0: quiet")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds until a measurement is stopped")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what to measure: throughput, single")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draws PATH.svg and PATH.png")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.set_defaults(requests=16, threads=cores)
    args = parser.parse_args()
    args.cores = cores
    args.neighbours = [Neighbours.parse(one) for one in args.neighbours.split(",")]
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds: there is no {', '.join(unknown)}; known: {', '.join(KINDS)}")
    if "throughput" in args.kinds and args.runs and not args.workload:
        parser.error("throughput needs a --workload; or measure --kinds single")
    return args


def measure_all(args: argparse.Namespace) -> Iterator[Run]:
    interpreters = cpu_peers.pairs(args.python)
    rows = cpu_peers.rows_of(args)
    usable = cpu_peers.installed(rows, interpreters)
    rows = [row for row in rows if row[0] in usable]
    for number in range(args.runs):
        for neighbours in args.neighbours:
            yield reference(neighbours, args.cores)
            for kind in args.kinds:
                for row in rows:
                    found = run_once(args, row, kind, neighbours, interpreters.get(row[0], sys.executable))
                    if found is None:
                        continue
                    said = f"{speed(counted(found)):.1f} tok/s" + ("" if found["finished"] else " (stopped)")
                    where = f"round {number + 1} of {args.runs}, {neighbours.name}"
                    print(f"{where}, {found['row']} {kind}: {said}", file=sys.stderr)
                    yield found


def end_on_sigterm() -> None:
    """By an exception, so that what was started ends, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main() -> None:
    args = arguments()
    end_on_sigterm()
    runs = cpu_peers.kept(args.figures)
    if args.runs:
        for run in measure_all(args):
            runs.append(run)
            cpu_peers.keep(args.figures, run)
    figures = summary(runs, args.neighbours, args.cores)
    noises = [noise_in(run) for run in runs if run["row"] != "scheduler"]
    print(json.dumps(figures) if args.json else under_banner(table(figures), noises))
    if args.plot:
        draw(figures, args.plot)


if __name__ == "__main__":
    main()
