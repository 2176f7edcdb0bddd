"""How close is the simulator to a real server? Predicted beside measured, at given shares of saturation.

    python benchmarks/sim_accuracy.py OUT --model llama-8b --calibrate 60 --shares 0.5,0.8 --runs 3 --budget 400 \\
        -- --load-format dummy --dtype bfloat16 --max-num-seqs 256 --kv-memory 60GiB
    python benchmarks/sim_accuracy.py OUT --again --profile llama-8b-h200      # predict again for what was measured

What follows -- goes to `shoal calibrate`, to `shoal serve` and, where it concerns scheduling, to the simulated engine.
First a profile is measured here (--calibrate) or taken (--profile). The simulator says at which rate the server
saturates; then each preset's server gets Poisson arrivals of a trace's lengths at shares of that rate, the same in
every run and in the simulation, with a seed that calibration has not seen. Prompts are token ids, so tokenizing is no
part of it. Prints one row per figure: the median of the runs with their spread, what the simulator says, and whether
that is within the tolerance. Up to 90% of saturation times are compared; beyond, where waits grow without bound, the
rate at which the simulator shows the measured time.

Everything measured is in OUT at once (measured.json, runs/), so an interrupted run is not lost: --again continues from
there. No new run begins when it might not end within --budget seconds. Needs no packages beyond the server's.
"""

import argparse
import gzip
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # for its neighbour, in tests, too

from open_loop import run_load

from shoal.bench.record import Promise, RunRecord, summarise
from shoal.bench.recorder import RunRecorder
from shoal.cli.common import SHAPES
from shoal.config.engine import EngineConfig, add_flags
from shoal.config.presets import preset_of
from shoal.core.clock import WallClock
from shoal.errors import ShoalError
from shoal.sim.engines import simulated_loop
from shoal.sim.fit import errors
from shoal.sim.front import SimulatedFronts
from shoal.sim.profile import Profile, read_profile
from shoal.sim.request import RequestMaker
from shoal.sim.seen import profile_of, read_seen, timed_passes
from shoal.sim.virtual import OpenArrivals, VirtualServer
from shoal.workload.arrivals import at_once, poisson, repeated
from shoal.workload.synthetic import TABLES, draw_lengths
from shoal.workload.traces import TraceRequest, fit, read_trace

FIGURES = ("throughput", "TTFT p50", "TTFT p99", "gap p50", "gap p99", "e2e p50", "e2e p99")
NEAR = 0.9  # share of saturation from which on the rate is compared instead of waits
FACTORS = (0.8, 0.88, 0.93, 0.97, 1.0, 1.03, 1.07, 1.14, 1.25)  # of the rate, where rates are compared
SATURATING = 2000  # requests at once whose middle half shows the saturation
READY_S, SLACK_S = 180.0, 15.0
OF_THE_MACHINE = ("load_format", "device", "threads", "cpu_kernels", "preset", "model", "kv_share")
PROMISE = Promise(1.0, 0.1)
HEAD = "| preset | load | figure | measured (spread) | predicted | off by | |\n|---|---|---|---|---|---|---|"


def note(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# ---- the load -------------------------------------------------------------------------------------------------------


def lengths(args: argparse.Namespace, count: int) -> list[TraceRequest]:
    """So many requests of the trace, all at once."""
    found = draw_lengths(args.trace, count, args.seed) if args.trace in TABLES else read_trace(args.trace)
    capped = fit(found, scale=args.scale, max_prompt=args.max_prompt, max_output=args.max_output).requests
    return at_once(list(repeated(capped, count)))


def load_at(args: argparse.Namespace, rate: float) -> list[TraceRequest]:
    """Poisson arrivals at this rate, for --seconds."""
    return poisson(lengths(args, max(8, round(rate * args.seconds))), rate, args.seed + 1)


def figures_of(run: RunRecord) -> dict[str, float]:
    """The compared figures, and how many requests were served."""
    found = summarise(run, PROMISE, 0.0)
    times = {
        f"{name} {percent}": found[key][percent]
        for name, key in (("TTFT", "ttft_s"), ("gap", "gap_s"), ("e2e", "e2e_s"))
        for percent in ("p50", "p99")
    }
    served = {"requests": found["requests"], "finished": found["finished"], "seconds": run.seconds}
    return {"throughput": found["output_tok_s"], **times, **served}


# ---- what the simulator says ----------------------------------------------------------------------------------------


def simulated(profile: Profile, settings: dict[str, Any], trace: Sequence[TraceRequest]) -> RunRecord:
    """The same requests on a simulated server with these settings."""
    loop = simulated_loop(profile, EngineConfig.from_mapping(settings))
    recorder, kv = RunRecorder(), loop.scheduler.kv
    make = RequestMaker(1, kv.block_size, kv.keep)  # max_tokens of each request: its own output's length, as in replay
    server = VirtualServer([loop], recorder, make, SimulatedFronts(profile.front))
    seconds = server.run(OpenArrivals(trace))
    return RunRecord("", "", 0.0, {}, 0, recorder.requests, recorder.passes, seconds, recorder.busy_s)


def settings_of(preset: str, flags: Sequence[str]) -> dict[str, Any]:
    """Of the simulated engine: the preset's, and what the user's flags say of scheduling and memory."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = vars(parser.parse_args(flags))
    return preset_of(preset).settings | {name: value for name, value in given.items() if name not in OF_THE_MACHINE}


def saturation(profile: Profile, settings: dict[str, Any], trace: Sequence[TraceRequest]) -> float:
    """Requests per second while more wait than fit: over the middle half of those that end."""
    run = simulated(profile, settings, at_once(list(trace)))
    ends = sorted(one.ended_s for one in run.requests if one.ended_s is not None)
    first, last = len(ends) // 4, len(ends) * 3 // 4
    return (last - first) / max(ends[last] - ends[first], 1e-9)


def figures_by_rate(
    profile: Profile, settings: dict[str, Any], trace: Sequence[TraceRequest]
) -> list[tuple[float, dict[str, float]]]:
    """What the simulator shows at some multiples of the trace's rate, in order."""
    found = []
    for factor in FACTORS:
        faster = [replace(one, at_s=one.at_s / factor) for one in trace]
        found.append((factor, figures_of(simulated(profile, settings, faster))))
    return found


def rate_that_shows(by_rate: Sequence[tuple[float, dict[str, float]]], figure: str, measured: float) -> float:
    """The multiple of the rate at which the simulator shows the measured time: between two that were simulated, and at
    most as far off as the first or the last of them."""
    factors, shown = [factor for factor, _ in by_rate], [figures[figure] for _, figures in by_rate]
    rising = np.maximum.accumulate(shown)  # a run of few requests may show less at a higher rate
    return float(np.interp(measured, rising, factors))


def tolerance(figure: str, share: float) -> float:
    if share > NEAR and (figure == "throughput" or figure.startswith(("TTFT", "e2e"))):
        return 0.03
    return 0.10 if figure.endswith("p99") else 0.05


def compare_load(profile: Profile, load: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each figure of a load that was measured at least once."""
    runs = [run["figures"] for run in load["runs"] if run["figures"]["finished"] == run["figures"]["requests"]]
    if not runs:
        return []
    trace = [TraceRequest(at_s, prompt, output) for at_s, prompt, output in load["trace"]]
    predicted = figures_of(simulated(profile, load["settings"], trace))
    near = load["share"] > NEAR
    by_rate = figures_by_rate(profile, load["settings"], trace) if near else []
    rows = []
    for figure in FIGURES:
        values = [run[figure] for run in runs]
        median, most = statistics.median(values), tolerance(figure, load["share"])
        off = predicted[figure] / median - 1 if median else 0.0
        waits = near and figure.startswith(("TTFT", "e2e"))
        if waits:
            off = rate_that_shows(by_rate, figure, median) - 1
        spread = (max(values) - min(values)) / median if median else 0.0
        verdict = "within" if abs(off) <= most else "undecided" if spread > most else "MISS"
        rows.append(
            {name: load[name] for name in ("preset", "share", "rate")}
            | {"profile": profile.name, "figure": figure, "measured": median, "spread": spread, "runs": len(runs)}
            | {"predicted": predicted[figure], "off": off, "by_rate": waits, "tolerance": most, "verdict": verdict}
        )
    return rows


def line_of(row: dict[str, Any]) -> str:
    unit, factor = ("tok/s", 1.0) if row["figure"] == "throughput" else ("ms", 1000.0)
    measured, predicted = (f"{factor * row[name]:,.1f} {unit}" for name in ("measured", "predicted"))
    off = f"{row['off']:+.1%}" + (" of the rate" if row["by_rate"] else "")
    return (
        f"| {row['preset']} | {row['share']:.0%}, {row['rate']:.2f}/s | {row['figure']} | {measured} "
        f"({row['spread']:.1%} of {row['runs']}) | {predicted} | {off} | {row['verdict']} |"
    )


def from_run(path: Path, profile: Profile) -> Profile:
    """As `shoal calibrate --url` makes it from a server's latest passes; fronts, host and copies are the profile's."""
    with gzip.open(path, "rt") as file:
        (seen,) = read_seen(json.load(file)["passes"], path.name)
    found = profile_of(seen, f"passes of {path.name.removesuffix('.json.gz')}")
    return replace(profile, name=found.name, error=found.error, device=found.device, held_back=found.held_back)


def pass_errors(profile: Profile, seen: dict[str, Any]) -> dict[str, float]:
    """How far the profile is off on the server's own passes, which it has not seen."""
    passes = [one for engine in read_seen(seen, "the server") for one in timed_passes(engine)]
    return errors(profile.costs, passes) if passes else {}


# ---- the real server ------------------------------------------------------------------------------------------------


class Server:
    """A `shoal serve` with these arguments, whose log goes to a file."""

    def __init__(self, arguments: Sequence[str], log: Path, limit_s: float) -> None:
        command = [sys.executable, "-m", "shoal", "serve", "--port", "0", "--json", *arguments]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if waiting.select(limit_s) else b""
        if not line:
            self.close()
            raise RuntimeError(f"the server did not start within {limit_s:.0f} s: {log.read_text()[-1500:]}")
        self.url = json.loads(line)["url"]

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Harness:
    """What is measured and kept; `left_s` until the budget is used up."""

    args: argparse.Namespace
    found: dict[str, Any] = field(default_factory=dict)
    clock: WallClock = field(default_factory=WallClock)

    def __post_init__(self) -> None:
        self.out = Path(self.args.out)
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        self.ends_s = self.clock.now_s() + self.args.budget

    @property
    def left_s(self) -> float:
        return self.ends_s - self.clock.now_s()

    def save(self) -> None:
        """At once, as a whole file: whatever happens next, it can be read."""
        new = self.out / "measured.json.new"
        new.write_text(json.dumps(self.found, indent=1))
        new.replace(self.out / "measured.json")

    def profile(self) -> Profile:
        """The one measured here; if that is not wanted or fails, the one that was named."""
        path = self.out / "profile.json"
        if self.args.calibrate and not path.exists():
            command = [sys.executable, "-m", "shoal", "calibrate", "--model", self.args.model, *self.args.flags]
            command += ["--seconds", f"{self.args.calibrate:g}", "--name", "measured here", "--out", str(path)]
            command += ["--passes", str(self.out / "calibration.jsonl")]
            note(f"calibrating: {' '.join(command[1:])}")
            log = self.out / "calibrate.log"
            try:
                with log.open("wb") as file:
                    limit_s = min(self.left_s, self.args.calibrate + READY_S)
                    subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=True)
            except (subprocess.SubprocessError, OSError) as error:
                path.unlink(missing_ok=True)
                note(f"calibration failed ({error}); {self.args.profile} is used instead. {log.read_text()[-1500:]}")
            else:
                note(log.read_text().strip())
        return read_profile(str(path) if self.args.calibrate and path.exists() else self.args.profile)

    def measure(self, profile: Profile) -> None:
        for preset in self.args.presets.split(","):
            settings = settings_of(preset, self.args.flags)
            note(f"{preset}: the simulator looks for saturation")
            full = saturation(profile, settings, lengths(self.args, self.args.saturating))
            shares = [float(one) for one in self.args.shares.split(",")]
            loads = [
                {"preset": preset, "share": share, "rate": share * full, "settings": settings, "runs": []}
                for share in shares
            ]
            self.found.setdefault("loads", []).extend(loads)
            note(f"{preset}: saturates at {full:.2f} requests/s")
            try:
                self.measure_preset(preset, loads, profile.model.vocab_size)
            except (RuntimeError, OSError, ValueError) as error:
                note(f"{preset} was given up: {error}")
                self.found.setdefault("problems", []).append(f"{preset}: {error}")
            self.save()

    def measure_preset(self, preset: str, loads: list[dict[str, Any]], vocab_size: int) -> None:
        """All loads of one preset on one server; the first of all runs, then the second of all."""
        flags = [self.args.model, *self.args.flags, "--preset", preset, "--log-level", "warning"]
        begun_s = self.clock.now_s()
        server = Server(flags, self.out / f"server-{preset}.log", min(READY_S, max(self.left_s, 1.0)))
        try:
            note(f"{preset}: ready after {self.clock.now_s() - begun_s:.0f} s; warming up")
            self.warm_up(server, max(load["rate"] for load in loads), vocab_size)
            for turn in range(self.args.runs):
                for load in loads:
                    self.measure_once(server, load, turn, vocab_size)
        finally:
            server.close()

    def warm_up(self, server: Server, rate: float, vocab_size: int) -> None:
        """Kernels are compiled, graphs recorded and caches filled: a crowd, as many as arrive in some seconds."""
        crowd = at_once(lengths(self.args, max(8, round(rate * self.args.warm))))
        run = run_load(server.url, crowd, vocab_size, 0, min(60.0, max(self.left_s - SLACK_S, 1.0)))
        served = sum(one.reason in ("stop", "length") for one in run.requests)
        note(f"  {served} of {len(crowd)} requests in {run.seconds:.1f} s")
        if not served:
            raise RuntimeError(f"the server answers no request: {run.requests[0].reason}; {run.settings['refused']}")

    def measure_once(self, server: Server, load: dict[str, Any], turn: int, vocab_size: int) -> None:
        trace = load_at(self.args, load["rate"])
        load["trace"] = [(one.at_s, one.prompt, one.output) for one in trace]
        expected_s = max([run["figures"]["seconds"] for run in load["runs"]], default=trace[-1].at_s * 1.5)
        if expected_s + SLACK_S > self.left_s:
            note(f"  no time for run {turn + 1} at {load['share']:.0%}: {self.left_s:.0f} s are left")
            return
        seed = 1000 * (turn + 1) + round(100 * load["share"])  # other prompts in every run: no prefix is cached
        run = run_load(server.url, trace, vocab_size, seed, self.left_s)
        figures = figures_of(run)
        load["runs"].append({"figures": figures, "late_ms": run.settings["late_ms"]})
        name = f"{load['preset']}-{load['share']:g}-{turn}"
        note(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
        for reason in {one.reason for one in run.requests} - {"stop", "length"}:
            note(f"    failed: {reason[:300]}")
        kept: dict[str, Any] = {"requests": [asdict(one) for one in run.requests]}
        try:
            kept["passes"] = server.ask("/debug/passes")
        except (OSError, ValueError) as error:
            note(f"    its passes could not be read: {error}")
        with gzip.open(self.out / "runs" / f"{name}.json.gz", "wt") as file:
            json.dump(kept, file)
        self.save()


def conclude(harness: Harness, profiles: Sequence[Profile]) -> None:
    """Simulate what was measured, print the tables and keep them."""
    harness.found["rows"] = rows = list[dict[str, Any]]()
    for profile in profiles:
        print(f"\n{profile.in_words()}; {profile.name}\n", flush=True)
        print(HEAD, flush=True)
        for load in harness.found.get("loads", ()):
            rows += (some := compare_load(profile, load))
            print("\n".join(map(line_of, some)), flush=True)
            harness.save()
        for path in sorted((harness.out / "runs").glob("*-0.json.gz")):
            with gzip.open(path, "rt") as file:
                passes = json.load(file).get("passes")
            try:
                found = pass_errors(profile, passes) if passes else {}
            except ShoalError as error:
                note(f"the passes of {path.name} cannot be compared: {error}")
                continue
            if found:
                shown = ", ".join(f"{name} {found[name]:.1%}" for name in ("p50", "p90", "p99", "total"))
                print(f"\npasses of {path.name.removesuffix('.json.gz')}: {found['passes']:.0f}, off by {shown}")
    (harness.out / "table.md").write_text("\n".join([HEAD, *map(line_of, rows)]) + "\n")
    verdicts = [row["verdict"] for row in rows]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in ("within", "MISS", "undecided"))
    print(f"\n{counts}; kept in {harness.out}", flush=True)


def read_args(words: Sequence[str]) -> argparse.Namespace:
    own, flags = list(words), list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder for what is measured")
    parser.add_argument("--model", default="llama-8b", help=f"folder, or a shape: {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--presets", default="shoal")
    parser.add_argument("--shares", default="0.5,0.8", help="of saturation (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each load (default: 3)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals in each run (default: 25)")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds of arrivals, all at once, first (default: 8)")
    parser.add_argument("--calibrate", type=float, default=0.0, metavar="S", help="measure a profile for S seconds")
    parser.add_argument("--profile", default="llama-8b-h200", help="without --calibrate (default: %(default)s)")
    parser.add_argument("--seen", metavar="RUN", help="fit the passes of this run in OUT, such as shoal-0.8-0, too")
    parser.add_argument("--also", default="", help="other profiles to predict with, separated by commas")
    parser.add_argument("--trace", default="azure-conv", help="a trace file, or lengths by name (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths (default: 1)")
    parser.add_argument("--max-prompt", type=int, default=None)
    parser.add_argument("--max-output", type=int, default=None)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--saturating", type=int, default=SATURATING, help="simulated requests that show saturation")
    parser.add_argument("--budget", type=float, default=400.0, metavar="S", help="of time, all in all (default: 400)")
    parser.add_argument("--again", action="store_true", help="measure nothing: predict for what OUT has")
    args = parser.parse_args(own)
    args.flags = flags
    args.model = str(SHAPES.get(args.model, args.model))
    return args


def main(words: Sequence[str]) -> int:
    args = read_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, too
    harness = Harness(args)
    if args.again:
        harness.found = json.loads((harness.out / "measured.json").read_text())
        profiles = [harness.profile()]
    else:
        profiles = [harness.profile()]
        harness.found = {"command": " ".join(words), "cpus": os.cpu_count(), "profile": profiles[0].name}
        harness.measure(profiles[0])
    profiles += [read_profile(name) for name in args.also.split(",") if name]
    if args.seen:
        profiles.append(from_run(harness.out / "runs" / f"{args.seen}.json.gz", profiles[0]))
    conclude(harness, profiles)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
