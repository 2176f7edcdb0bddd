"""shoal bench scheduler: what plan and commit cost, policy by policy."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.cli.common import new_command
from shoal.config.engine import EngineConfig
from shoal.core.names import pick
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.sched.scheduler import Scheduler

BLOCK = 16
VOCABULARY = 32_000
TIERS = "{premium: {ttft: 0.3, itl: 0.04, weight: 8}, standard: {ttft: 2, itl: 0.2, weight: 4}, batch: {}}"
POLICIES: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"order": "priority"},
    "sjf": {"order": "sjf"},
    "fair": {"order": "fair"},
    "slo": {"order": "slo", "tiers": TIERS},
    "slo, budget by promise": {"order": "slo", "tiers": TIERS, "budget": "promise"},
    "lanes": {"lane_tokens": 4096},
    "headroom": {"order": "slo", "tiers": TIERS, "headroom": 0.1},
    "swap": {"when_short": "swap"},
    "reserve": {"memory": "reserve", "when_short": "wait"},
    "predict": {"memory": "predict"},
    "no prefix cache": {"prefix_caching": False},
    "ngram drafts": {"speculate": "ngram"},
    "suffix drafts": {"speculate": "suffix"},
}


def add_scheduler(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "scheduler",
        "time plan and commit of decode passes, without a device, policy by policy",
        "shoal bench scheduler --running 64,1024 --policies fcfs,slo",
        run_bench_scheduler,
    )
    parser.add_argument("--running", default="64,256,1024,4096", metavar="N,N,…", help="(default: 64,256,1024,4096)")
    parser.add_argument("--policies", default="all", metavar="NAMES", help=f"all, or some of: {'; '.join(POLICIES)}")
    parser.add_argument("--passes", type=int, default=100, help="passes of which the median is taken (default: 100)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_bench_scheduler(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from shoal.bench.cpu_noise import NoiseWatch, noise_figures, under_banner
    from shoal.bench.scheduler import measure, table

    sizes = _sizes(args.running)
    if not 1 <= args.passes <= 10_000:
        raise BadConfig(f"--passes must be between 1 and 10000, not {args.passes}")
    names = list(POLICIES) if args.policies == "all" else [one.strip() for one in args.policies.split(",")]
    costs = []
    pinned = _on_one_core()
    watch = NoiseWatch()
    try:
        for name in tqdm(names, unit="policy", file=sys.stderr):
            settings = pick(POLICIES, name, "policy")
            tiers = ("premium", "standard", "batch") if "tiers" in settings else ("",)
            if "headroom" in settings:
                tiers = ("premium",)  # the tier that may use all of it
            make = _maker(settings, args.passes)
            costs += [measure(make, name, size, args.passes, tiers) for size in sizes]
        noise = watch.noise()
    finally:
        if pinned is not None:
            os.sched_setaffinity(0, pinned)
    if args.json:
        print(json.dumps([{**asdict(one), "each_us": one.each_us, **noise_figures(noise)} for one in costs]))
    else:
        print(under_banner(table(costs), [noise]))
    return 0


def _maker(settings: dict[str, Any], passes: int) -> Any:
    from shoal.sched.admission import Limits
    from shoal.sched.make import make_scheduler
    from shoal.spec.make import make_drafter

    def make(running: int) -> "Scheduler":
        budget = max(512, 2 * running)
        config = EngineConfig.from_mapping(
            {"max_num_seqs": running, "max_num_batched_tokens": budget, "block_size": BLOCK, **settings}
        )
        longest = 256 + 2 * passes
        blocks = 2 * running * -(-longest // BLOCK)
        host = blocks if config.when_short == "swap" else 0
        drafter = make_drafter(config.speculation) if config.speculation.on else None
        return make_scheduler(config, Limits(longest, running, budget, VOCABULARY), blocks, host, drafter)

    return make


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(1 <= size <= 100_000 for size in sizes):
        raise BadConfig(f"--running must be numbers between 1 and 100000 with commas between, not {text!r}")
    return sizes


def _on_one_core() -> set[int] | None:
    """Stay on one core, where the system can do that; returns where we were."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    return before
