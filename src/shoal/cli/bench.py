"""shoal bench: measure this engine, or any server, on this machine."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.serve_command import add_command as add_serve
from shoal.cli.accuracy import add_accuracy
from shoal.cli.checks import check_early
from shoal.cli.common import add_model, check_writable, choose_model, new_command
from shoal.cli.compare import load_once, make_folder
from shoal.cli.frontend import add_frontend
from shoal.cli.hostile import add_hostile
from shoal.cli.latency import add_latency
from shoal.cli.policies import add_policies
from shoal.cli.scheduler import add_scheduler
from shoal.cli.simulator import add_simulator
from shoal.config.engine import EngineConfig, add_flags
from shoal.core.params import SamplingParams
from shoal.errors import BadConfig
from shoal.workload.lengths import random_prompts
from shoal.workload.named import WORKLOADS, find_lengths

if TYPE_CHECKING:
    from shoal.build import Built
    from shoal.engine.loop import EngineLoop

SAMPLING_EXAMPLE = '{"temperature": 0.8, "top_p": 0.95}'


def add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure this engine on this machine")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    parser = new_command(
        kinds,
        "throughput",
        "run [prompt, output] lengths offline; print tokens per second, the floor and the fraction reached",
        "shoal bench throughput --workload cpu64 --max-num-seqs 32\n"
        "  shoal bench throughput --workload nano256 --config llama-8b --load-format dummy --json out.json",
        run_bench_throughput,
    )
    parser.add_argument(
        "--workload",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}; or a JSON file: a list of [prompt, output] token counts",
    )
    add_model(parser)
    parser.add_argument("--requests", type=int, help="use only the first N")
    parser.add_argument("--runs", type=int, default=1, help="repeat and report the best (default: 1)")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file; - prints them")
    parser.add_argument(
        "--sampling",
        metavar="JSON",
        default='{"temperature": 0}',
        help='sampling parameters, such as {"temperature": 0.8, "top_p": 0.95} (default: greedy)',
    )
    parser.add_argument(
        "--profile",
        metavar="TRACE.json",
        help="run once more and write a Chrome trace of 20 passes from the middle; "
        "on a CPU, run a third time and print where the time of a pass goes",
    )
    add_flags(parser)
    add_latency(kinds)
    add_giant(kinds)
    add_serve(kinds, new_command)
    add_frontend(kinds)
    add_hostile(kinds)
    add_scheduler(kinds)
    add_simulator(kinds)
    add_policies(kinds)
    add_accuracy(kinds)


def run_bench_giant(args: argparse.Namespace) -> int:
    folder = Path(args.out)
    make_folder(folder)
    loaded = load_once(args)
    from shoal.bench.giant import giant_rows, run_giant
    from shoal.bench.giant_plots import giant_plot
    from shoal.bench.plot_style import save
    from shoal.bench.report import giant_table
    from shoal.build import assemble

    flags = {name: value for name, value in asdict(EngineConfig.from_args(args)).items() if name in vars(args)}

    def make(settings: dict[str, Any]) -> "EngineLoop":
        chosen = {"max_num_batched_tokens": args.chunk + args.streams, **settings, **flags, "model": None}
        return assemble(loaded, EngineConfig.from_mapping(chosen)).loop

    runs = run_giant(make, loaded.spec.vocab_size, streams=args.streams, giant=args.giant, output=args.output)
    rows = giant_rows(runs)
    save(giant_plot(runs), folder, "giant")
    (folder / "giant.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows) if args.json else giant_table(rows))
    return 0


def add_giant(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "giant",
        "measure a giant prompt that arrives among running streams: inline, exclusive and chunked",
        "shoal bench giant --streams 16 --giant 2048 --chunk 256 --out giant",
        run_bench_giant,
    )
    add_model(parser)
    parser.add_argument("--streams", type=int, default=16, help="running streams (default: 16)")
    parser.add_argument("--giant", type=int, default=2048, help="tokens of the giant prompt (default: 2048)")
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens per chunked pass (default: 256)")
    parser.add_argument("--output", type=int, default=48, help="output tokens of each stream (default: 48)")
    parser.add_argument(
        "--out", default="shoal-giant", metavar="DIR", help="folder for the results (default: shoal-giant)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_flags(parser)


def run_bench_throughput(args: argparse.Namespace) -> int:
    for name in ("requests", "runs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BadConfig(f"--{name} must be at least 1, not {getattr(args, name)}")
    for path in (args.json, args.profile):
        if path and path != "-":
            check_writable(path)
    choose_model(args)
    given = {"prefix_caching": False, **vars(args)}  # random prompts share no prefixes
    config = check_early(EngineConfig.from_args(argparse.Namespace(**given)))
    lengths = find_lengths(args.workload)[: args.requests]
    params = read_sampling(args.sampling)
    from shoal.bench.floor import floor, measure  # after the checks: torch is loaded here
    from shoal.bench.report import throughput_figures, throughput_table
    from shoal.bench.throughput import run_throughput
    from shoal.build import build

    built = build(config, progress=sys.stderr.isatty())
    prompts = random_prompts(lengths, built.spec.vocab_size)
    run = partial(run_throughput, built.loop, params=params, speculate=config.speculate)
    run(lengths[:1], prompts[:1], progress=False, name="warm-up ")
    runs = [run(lengths, prompts, progress=sys.stderr.isatty(), name=f"run {number} ") for number in range(args.runs)]
    best = min(runs, key=lambda run: run.seconds)
    machine = measure(built.dtype, built.device, built.spec.parameters * built.dtype.itemsize)
    profiled, phases = "", None
    if args.profile:
        profiled, phases = run_profile(built, run, (lengths, prompts), best.passes, args.profile)
    least = floor(lengths, built.spec, built.dtype, built.config.slots, machine)
    built.loop.close()
    figures = throughput_figures(best, least, machine, built.files.name, str(built.dtype).removeprefix("torch."))
    figures |= {"sampling": args.sampling} | ({"profile": phases} if phases else {})
    if args.json == "-":
        print(json.dumps(figures))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(throughput_table(figures) + profiled)
    return 0


def read_sampling(text: str) -> SamplingParams:
    """The flag's JSON; lengths come from the workload."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadConfig(f"--sampling is not JSON: {error}; write it as {SAMPLING_EXAMPLE}") from error
    if not isinstance(values, dict):
        raise BadConfig(f"--sampling must be an object of names and values, not {text}; write it as {SAMPLING_EXAMPLE}")
    return SamplingParams.from_mapping(values)


def run_profile(
    built: "Built", run: Callable[..., Any], work: tuple[Any, Any], passes: int, path: str
) -> tuple[str, dict[str, Any] | None]:
    """One more run with a trace; on a CPU another by phase. Returns the text to print, and the phases as figures."""
    from shoal.bench.phases import PassPhases, timing
    from shoal.bench.profile import PASSES, PassProfiler, named

    profiler = PassProfiler(path, max(1, (passes - PASSES) // 2))
    with named(built.loop):
        run(*work, progress=False, name="profile ", after_pass=lambda events: profiler.step())
    profiler.stop()
    written = f"\n\n{path}: {PASSES} passes\n"
    if built.device != "cpu":
        return written + profiler.table(), None
    phases = PassPhases()
    with timing(built.loop, phases.timer):
        run(*work, progress=False, name="phases ", after_pass=phases.step)
    return f"{written}\n{phases.table()}", phases.figures()
