"""shoal bench latency: time to the first token and between tokens, for batches of several sizes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.cli.checks import check_early
from shoal.cli.common import add_model, check_writable, choose_model, new_command
from shoal.config.engine import EngineConfig, add_flags
from shoal.errors import BadConfig

BATCHES = "1,8,64,256"
TOKENS = 8192  # default size of a pass


def add_latency(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "latency",
        "time to the first token and between tokens for whole batches, with the floor and the fraction reached",
        "shoal bench latency --config qwen3-0.6b --load-format dummy --batches 1,8,64,256 --prompt 512 --output 128",
        run_bench_latency,
    )
    add_model(parser)
    parser.add_argument("--batches", default=BATCHES, metavar="N,N,…", help=f"batch sizes (default: {BATCHES})")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (default: 512)")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer (default: 128)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each batch; the best is reported (default: 3)")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file; - prints them")
    add_flags(parser)


def run_bench_latency(args: argparse.Namespace) -> int:
    batches = read_batches(args.batches)
    for name, least in (("prompt", 1), ("output", 2), ("runs", 1)):
        if getattr(args, name) < least:
            raise BadConfig(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.json and args.json != "-":
        check_writable(args.json)
    choose_model(args)
    defaults = {"prefix_caching": False, "max_num_seqs": max(batches), "max_num_batched_tokens": TOKENS}
    config = check_early(EngineConfig.from_args(argparse.Namespace(**{**defaults, **vars(args)})))
    from shoal.bench.floor import measure  # after the checks: torch is loaded here
    from shoal.bench.latency import best_of, latency_figures, run_latency
    from shoal.bench.report import latency_table
    from shoal.build import build

    built = build(config, progress=sys.stderr.isatty())
    machine = measure(built.dtype, built.device, built.spec.parameters * built.dtype.itemsize)
    rows = []
    for number, batch in enumerate(batches):
        size = (batch, args.prompt, args.output)
        runs = [
            run_latency(built.loop, *size, built.spec, built.dtype.itemsize, machine, seed=1000 * number + run)
            for run in range(args.runs + 2)
        ]
        rows.append(best_of(runs[2:]))  # the first two warm up: graphs are recorded when a size occurs again
    built.loop.close()
    figures = {
        "model": built.files.name,
        "dtype": str(built.dtype).removeprefix("torch."),
        "speculate": built.config.speculate,
        "meaningless_text": built.config.speculation.synthetic is not None,
        "machine": asdict(machine),
        "batches": [latency_figures(row) for row in rows],
    }
    if args.json == "-":
        print(json.dumps(figures))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(latency_table(figures))
    return 0


def read_batches(text: str) -> list[int]:
    """Batch sizes from a comma-separated list.

    >>> read_batches("1, 8")
    [1, 8]
    """
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadConfig(f"--batches must be whole numbers separated by commas, not {text!r}") from None
    if min(batches) < 1:
        raise BadConfig(f"--batches must be at least 1, not {min(batches)}")
    return batches
