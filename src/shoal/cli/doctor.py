"""shoal doctor: this machine, the kernels that run on it and why, and their speed; with --url, what limits a server."""

import argparse
import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.cli.common import new_command
from shoal.cli.top import ask_server

if TYPE_CHECKING:
    from shoal.sim.doctor import Sickness


def add_doctor(commands: Any) -> None:
    parser = new_command(
        commands,
        "doctor",
        "show which device and kernels are used and why, and measure them; or what limits a running server",
        "shoal doctor --url http://127.0.0.1:8000",
        run_doctor,
    )
    parser.add_argument("--url", help="of a server: say what limits it, and which setting to change")
    parser.add_argument("--api-key", metavar="KEY", help="an admin key, if the server has keys; -: prompt for it")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--cpu-kernels", default="auto", help="instruction set of the kernels (default: auto)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as an engine would choose)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    if args.url:
        return examine_server(args)
    from shoal.bench.doctor import examine, report_table
    from shoal.runner.threads import choose_threads

    report = examine(args.cpu_kernels, args.threads or choose_threads(args.cpu_kernels).threads)
    print(json.dumps(report) if args.json else report_table(report))
    return 0


# ---- a server -------------------------------------------------------------------------------------------------------


def examine_server(args: argparse.Namespace) -> int:
    """Of each engine: what limits it, and what would help."""
    from shoal.sim.doctor import examine_engine
    from shoal.sim.seen import read_seen

    answer = ask_server(args, "/debug/passes", "engines")
    found: list[dict[str, Any]] = []
    for seen in read_seen(answer, args.url):
        findings, why_no_estimates = examine_engine(seen)
        about = {name: seen.about.get(name) for name in ("engine", "utilisation", "depth", "places", "budget")}
        found.append({
            **about,
            "passes": seen.count,
            "requests": len(seen.requests["output"]),
            "findings": [asdict(one) for one in findings],
            "no_estimates": why_no_estimates,
            "words": in_words(findings, why_no_estimates),
        })  # fmt: skip
    if args.json:
        print(json.dumps({"engines": found}))
        return 0
    for one in found:
        if len(found) > 1:
            print(f"engine {one['engine']}")
        shares = "".join(f", {name} {share:.0%}" for name, share in (one["utilisation"] or {}).items())
        print(f"{one['passes']} passes and {one['requests']} requests{shares}")
        print("\n".join(one["words"]))
    return 0


def in_words(findings: "list[Sickness]", why_no_estimates: str) -> list[str]:
    lines = []
    for number, one in enumerate(findings, 1):
        lines += [f"{number}. {one.name}", f"   seen    {one.evidence}", f"   change  {one.advice}"]
        if one.after is not None and one.before is not None:
            before, after = one.before, one.after
            times = [
                f"TTFT p99 {seconds(before.ttft_p99_s)} to {seconds(after.ttft_p99_s)}",
                f"gap p99 {seconds(before.gap_p99_s)} to {seconds(after.gap_p99_s)}",
                f"longest gap {seconds(before.gap_most_s)} to {seconds(after.gap_most_s)}",
                f"whole answers {seconds(before.e2e_mean_s)} to {seconds(after.e2e_mean_s)}",
            ]
            lines.append(f"   effect  {flags_of(one.cure)}: {', '.join(times)} (simulated)")
    if not findings:
        lines.append("nothing limits it")
    if findings and why_no_estimates:
        lines.append(f"no estimates: {why_no_estimates}")
    return lines


def seconds(value: float) -> str:
    """
    >>> seconds(89.51), seconds(1.234), seconds(0.0123)
    ('90 s', '1.2 s', '12 ms')
    """
    if value < 1:
        return f"{1e3 * value:.2g} ms" if value < 0.1 else f"{1e3 * value:.0f} ms"
    return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"


def flags_of(settings: dict[str, Any]) -> str:
    """
    >>> flags_of({"max_num_seqs": 64, "depth": 2})
    '--max-num-seqs 64 --depth 2'
    """
    return " ".join(shlex.join([f"--{name.replace('_', '-')}", str(value)]) for name, value in settings.items())
