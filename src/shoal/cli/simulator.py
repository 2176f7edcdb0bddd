"""shoal bench simulator: how fast a long trace is simulated on one core, and whether memory stays flat."""

import argparse
import json
import os
import resource
import sys
import time
from typing import Any

from shoal.cli.common import new_command
from shoal.cli.loads import add_profile, add_trace, open_profile
from shoal.cli.simulate import SIMULATED, add_simulate, engine_maker, plan_of, run_virtually
from shoal.config.presets import PRESETS
from shoal.errors import BadConfig

LONG, PRESET_REQUESTS = 100_000, 1000


def add_simulator(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "simulator",
        "time the simulator: a long trace on one core, with its memory, and every preset on a short one",
        "shoal bench simulator --trace azure_conv_2023.csv.gz --requests 100000 --rate 20",
        run_bench_simulator,
    )
    add_profile(parser, "llama-8b-h200")
    add_trace(parser, scale=1.0, count=LONG)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second (default: 20)")
    parser.add_argument(
        "--preset-requests",
        type=int,
        default=PRESET_REQUESTS,
        help="requests of each preset; 0: no presets (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_bench_simulator(args: argparse.Namespace) -> int:
    if args.rate <= 0:
        raise BadConfig(f"--rate must be above 0, not {args.rate:g}")
    if args.preset_requests < 0:
        raise BadConfig(f"--preset-requests must not be negative, not {args.preset_requests}")
    long = measure(args, "shoal", args.requests)
    found: dict[str, Any] = {"rate": args.rate, "long": long}
    if args.preset_requests:
        short = [measure(args, preset, args.preset_requests) for preset in SIMULATED]
        found["presets"] = {
            "count": len(short),
            "requests": args.preset_requests,
            "seconds": sum(one["seconds"] for one in short),
        }
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{long['requests']:,} requests at {args.rate:g}/s: {long['seconds']:.1f} s of one core")
    print(f"  {long['virtual_s']:,.0f} s of virtual time, {long['passes']:,} passes, {long['tokens']:,} tokens")
    print(f"  {long['us_per_token']:.2f} µs per token")
    print(f"  memory: {long['mib_at_a_tenth']:.0f} MiB after a tenth of them, {long['mib']:.0f} MiB at the end")
    if args.preset_requests:
        presets = found["presets"]
        print(f"{presets['count']} presets with {presets['requests']:,} requests each: {presets['seconds']:.1f} s")
    return 0


def simulate_args(args: argparse.Namespace, preset: str, requests: int) -> argparse.Namespace:
    """The arguments of shoal simulate for one run."""
    parser = argparse.ArgumentParser()
    add_simulate(parser.add_subparsers())
    flags = [f"--profile={args.profile}", f"--trace={args.trace}", f"--arrivals={args.arrivals}"]
    flags += [f"--prompt-scale={args.prompt_scale}", f"--output-scale={args.output_scale}"]
    return parser.parse_args(["simulate", *flags, f"--requests={requests}", f"--presets={preset}"])


def peak_mib() -> float:
    """The most memory that this process has had so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10


def measure(args: argparse.Namespace, preset: str, requests: int) -> dict[str, Any]:
    """One simulated run in bounded memory; the seconds are those of this process's CPU, without reading the trace."""
    from shoal.bench.tally import RunTally
    from shoal.workload.arrivals import repeated, spaced
    from shoal.workload.traces import TraceRequest

    profile = open_profile(args)
    given = simulate_args(args, preset, requests)
    plan, _ = plan_of(given, profile)
    make = engine_maker(given, profile, plan)

    class MemoryTally(RunTally):
        """Notes the memory when a tenth of the requests has arrived."""

        mib = 0.0

        def arrived(self, number: int, one: TraceRequest, at_s: float) -> None:
            super().arrived(number, one, at_s)
            if number == requests // 10:
                self.mib = peak_mib()

    tally = MemoryTally(plan.promise)
    trace = spaced(repeated(plan.trace, requests), args.rate, 1.0, plan.seed)
    begun_s = time.process_time()
    seconds = run_virtually(given, profile, plan, make, PRESETS[preset].settings, trace, tally)
    took_s = time.process_time() - begun_s
    return {
        "preset": preset,
        "requests": requests,
        "finished": tally.finished,
        "seconds": took_s,
        "virtual_s": seconds,
        "passes": tally.passes,
        "tokens": tally.outputs,
        "us_per_token": 1e6 * took_s / max(tally.outputs, 1),
        "mib_at_a_tenth": tally.mib,
        "mib": peak_mib(),
        "cpus": os.cpu_count(),
    }
