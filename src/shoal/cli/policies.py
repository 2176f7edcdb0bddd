"""shoal bench policies: experiments on scheduling policies, with a table and a plot for each."""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.common import add_model, new_command
from shoal.cli.compare import load_once, make_folder
from shoal.config.engine import EngineConfig, add_flags
from shoal.core.names import pick
from shoal.errors import BadConfig
from shoal.workload.traces import read_trace

if TYPE_CHECKING:
    from shoal.engine.loop import EngineLoop

NAMES = ("overload", "flood", "bursts", "lanes", "sjf", "budget")


def add_policies(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "policies",
        "run the same requests under different scheduling policies: overload, flood, bursts, lanes, sjf, budget",
        "shoal bench policies --only overload,flood --out policies",
        run_bench_policies,
    )
    add_model(parser)
    group = parser.add_argument_group("experiments")
    group.add_argument("--only", default="all", metavar="NAMES", help=f"all, or some of: {', '.join(NAMES)}")
    group.add_argument("--requests", type=int, default=120, help="approximate number in each experiment (default: 120)")
    group.add_argument("--slots", type=int, default=16, help="most requests in one pass (default: 16)")
    group.add_argument("--prompt-scale", type=float, default=1 / 32, help="factor of prompt lengths (default: 1/32)")
    group.add_argument("--output-scale", type=float, default=1 / 12, help="factor of output lengths (default: 1/12)")
    group.add_argument("--ttft", type=float, default=3.0, help="promised seconds to the first token (default: 3)")
    group.add_argument("--itl", type=float, default=0.5, help="promised seconds between tokens (default: 0.5)")
    group.add_argument("--long-prompt", type=int, default=1536, help="tokens of a long prompt (default: 1536)")
    group.add_argument(
        "--burst-trace", default="", metavar="FILE", help="a trace with the arrivals of the bursts (default: drawn)"
    )
    group.add_argument(
        "--out", default="shoal-policies", metavar="DIR", help="folder for the results (default: shoal-policies)"
    )
    group.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_flags(parser)


def run_bench_policies(args: argparse.Namespace) -> int:
    names = NAMES if args.only == "all" else tuple(args.only.split(","))
    for name in names:
        pick(dict.fromkeys(NAMES), name, "experiment")
    if args.burst_trace:
        read_trace(args.burst_trace, 1)  # fails now if it cannot be read
    folder = Path(args.out)
    make_folder(folder)
    from shoal.bench.policies import EXPERIMENTS, Lab, Sizes, table

    sizes = _sizes(args, {item.name for item in fields(Sizes)})
    loaded = load_once(args)
    from shoal.bench.cpu_noise import noise_figures
    from shoal.bench.plot_style import save
    from shoal.bench.policy_plots import finding_plot
    from shoal.build import assemble

    experiments = [EXPERIMENTS[name] for name in names]
    flags = {name: value for name, value in asdict(EngineConfig.from_args(args)).items() if name in vars(args)}
    memory = flags.get("kv_memory") or _kv_bytes(loaded, sizes["slots"], sizes["long_prompt"])

    def make(settings: dict[str, Any]) -> "EngineLoop":
        chosen = {"kv_memory": memory, **settings, **flags, "model": None}
        return assemble(loaded, EngineConfig.from_mapping(chosen)).loop

    lab = Lab(make, loaded.spec.vocab_size, Sizes(**sizes), progress=sys.stderr.isatty() or not args.json)
    found = {}
    for experiment in experiments:
        finding = experiment(lab)
        save(finding_plot(finding), folder, finding.name)
        noise = {name: noise_figures(run.noise) for name, run in finding.runs.items()}
        found[finding.name] = {
            "title": finding.title, "rows": finding.rows, "figures": finding.figures, "noise": noise
        }  # fmt: skip
        (folder / "policies.json").write_text(json.dumps(found, indent=1) + "\n")
        if not args.json:
            print(table(finding), flush=True)
    if args.json:
        print(json.dumps(found))
    return 0


def _sizes(args: argparse.Namespace, known: set[str]) -> dict[str, Any]:
    given = {**vars(args), "ttft_s": args.ttft, "itl_s": args.itl}
    sizes = {name: given[name] for name in known}
    for name, least in (("requests", 20), ("slots", 2), ("long_prompt", 300)):
        if sizes[name] < least:
            raise BadConfig(f"--{name.replace('_', '-')} must be at least {least}, not {sizes[name]}")
    for name in ("prompt_scale", "output_scale", "ttft_s", "itl_s"):
        if not 0 < sizes[name] < 1e6:
            raise BadConfig(f"--{name.removesuffix('_s').replace('_', '-')} must be above 0, not {sizes[name]}")
    return sizes


def _kv_bytes(loaded: Any, slots: int, long_prompt: int) -> int:
    """KV memory large enough that slots are the limit: these experiments are about time."""
    from shoal.runner.kvstore import bytes_per_block

    tokens = slots * 512 + 4 * (long_prompt + 64)
    return -(-tokens // 16) * int(bytes_per_block(loaded.spec, 16, loaded.dtype))
