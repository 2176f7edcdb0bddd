"""shoal doctor: this machine, the kernels that run on it and why, and their speed."""

import argparse
import json
from typing import Any

from shoal.cli.common import new_command


def add_doctor(commands: Any) -> None:
    parser = new_command(
        commands,
        "doctor",
        "show which device and kernels are used and why, and measure them",
        "shoal doctor --cpu-kernels portable --json",
        run_doctor,
    )
    parser.add_argument("--cpu-kernels", default="auto", help="instruction set of the kernels (default: auto)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as an engine would choose)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    from shoal.bench.doctor import examine, report_table
    from shoal.runner.threads import choose_threads

    report = examine(args.cpu_kernels, args.threads or choose_threads(args.cpu_kernels).threads)
    print(json.dumps(report) if args.json else report_table(report))
    return 0
