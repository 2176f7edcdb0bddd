"""shoal plan: how many replicas a load and a promise need, at what price, by simulation."""

import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.common import new_command
from shoal.cli.compare import make_folder
from shoal.cli.loads import add_profile, add_server, add_trace, context_of, open_profile, read_requests, within_context
from shoal.config.engine import PASS_TOKENS, EngineConfig, add_flags
from shoal.config.presets import preset_of
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.sim.planner import FleetPlan, FleetPlanner, FleetSetup
    from shoal.sim.profile import Profile
    from shoal.sim.promises import KeptTarget, TierPromise
    from shoal.workload.traces import TraceRequest

FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # of the promised times, for the plot


def add_plan(commands: Any) -> None:
    parser = new_command(
        commands,
        "plan",
        "how many replicas keep a promise for a load, and what they cost, by simulation",
        "shoal plan --profile llama-8b-h200 --rate 40 --promise ttft_p99=2,gap_p99=0.1 --price-per-hour 4",
        run_plan,
    )
    add_profile(parser)
    parser.add_argument("--model", "-m", help="refuse a profile of another model")
    add_trace(parser, scale=1.0, count=1000)
    group = parser.add_argument_group("plan")
    group.add_argument("--rate", type=float, help="requests per second; default: the trace's own")
    group.add_argument(
        "--promise",
        action="append",
        metavar="P",
        help="what requests are promised, such as ttft_p99=2,gap_p99=0.2 (the default); also e2e_pN, and "
        "tier=NAME,share=0.2; repeatable, one for each tier",
    )
    group.add_argument("--price-per-hour", type=float, default=1.0, help="of one replica (default: 1)")
    group.add_argument("--max-replicas", type=int, default=64, help="try no more than this (default: 64)")
    group.add_argument(
        "--accepted",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="share of draft tokens that are right, for the question whether speculation pays (default: 0.6)",
    )
    group.add_argument("--presets", default="shoal", metavar="NAMES", help="settings to choose from (default: shoal)")
    group.add_argument(
        "--budgets",
        metavar="N,N,…",
        help="sizes of a pass (max-num-batched-tokens) to choose from; default: the device's, half and twice of it",
    )
    add_server(group)
    group.add_argument("--out", metavar="DIR", help="folder for plan.json, plan.svg and plan.png; default: none")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser)


def run_plan(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from shoal.sim.engines import check_model
    from shoal.sim.planner import FleetPlanner
    from shoal.sim.promises import parse_promises

    check_numbers(args)
    promises = parse_promises(args.promise or ["ttft_p99=2,gap_p99=0.2"])
    profile = open_profile(args)
    if args.model:
        check_model(profile, Path(args.model).name)
    trace = trace_of(args, profile)
    fleets = fleets_of(args, profile, promises, trace)
    if args.out:
        make_folder(Path(args.out))
    with tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False) as bar:
        planner = FleetPlanner(load_of(args, trace), rate_of(args, trace), args.max_replicas, bar.set_description_str)
        found = figures(args, planner, planner.plan(fleets))
    if args.out:
        write(found, Path(args.out))
    print(json.dumps(found) if args.json else in_words(found))
    return 0


def check_numbers(args: argparse.Namespace) -> None:
    if not 0 <= args.price_per_hour < math.inf:
        raise BadConfig(f"--price-per-hour must be a number that is not negative, not {args.price_per_hour}")
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise BadConfig(f"--rate must be above 0, not {args.rate}")
    if not 0 <= args.accepted <= 1:
        raise BadConfig(f"--accepted must be a share between 0 and 1, not {args.accepted}")
    if not 1 <= args.max_replicas <= 10_000:
        raise BadConfig(f"--max-replicas must be between 1 and 10000, not {args.max_replicas}")


def trace_of(args: argparse.Namespace, profile: "Profile") -> "list[TraceRequest]":
    """The requests, repeated if there are too few, and cut to the context."""
    from shoal.workload.arrivals import repeated

    args.seed = getattr(args, "seed", None)
    trace = within_context(read_requests(args), context_of(args, profile)).requests
    return list(repeated(trace, args.requests)) if len(trace) < args.requests else trace


def rate_of(args: argparse.Namespace, trace: "list[TraceRequest]") -> float:
    if args.rate is not None:
        return float(args.rate)
    if trace[-1].at_s <= 0:
        raise BadConfig(f"{args.trace} has no arrival times; give --rate, in requests per second")
    return (len(trace) - 1) / trace[-1].at_s


def load_of(args: argparse.Namespace, trace: "list[TraceRequest]") -> Any:
    """Rate → requests that arrive so."""
    from shoal.workload.arrivals import cv_of, gamma, replay_at_rate

    cv = cv_of(args.arrivals)
    if cv is None:
        return lambda rate: replay_at_rate(trace, rate)
    return lambda rate: gamma(trace, rate, cv, args.seed or 0)


def fleets_of(
    args: argparse.Namespace,
    profile: "Profile",
    promises: "tuple[TierPromise, ...]",
    trace: "list[TraceRequest]",
) -> "list[FleetSetup]":
    """Every preset with every budget; the user's flags apply to all."""
    from shoal.sim.planner import FleetSetup

    usual = PASS_TOKENS[profile.card.kind]
    given = asdict(EngineConfig.from_args(args))
    flags = {name: value for name, value in given.items() if name in vars(args) and value is not None}
    budgets = [usual, usual // 2, 2 * usual]
    if args.budgets:
        budgets = numbers_of(args.budgets)
    elif "max_num_batched_tokens" in flags:
        budgets = [flags["max_num_batched_tokens"]]
    if len(promises) > 1:
        flags = {"order": "slo", "tiers": json.dumps(tiers_of(promises)), **flags}
    elif promises[0].tier:
        flags = {"tiers": json.dumps(tiers_of(promises)), **flags}
    found = []
    for preset in args.presets.split(","):
        for budget in budgets:
            settings = {**preset_of(preset).settings, **flags, "max_num_batched_tokens": budget, "model": None}
            found.append(
                FleetSetup(
                    f"{preset}, {budget} tokens a pass",
                    profile,
                    EngineConfig.from_mapping(settings),
                    max(one.output for one in trace),
                    promises,
                    args.routing,
                    not args.no_front,
                )
            )
    return found


def numbers_of(text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise BadConfig(f"--budgets must be whole numbers above 0, such as 1024,2048, not {text}")
    return found


def tiers_of(promises: "tuple[TierPromise, ...]") -> dict[str, dict[str, float]]:
    """For --tiers of the engine, the strictest first."""
    table = {}
    for one in promises:
        times = {target.what: target.seconds for target in one.targets}
        table[one.tier] = {name: times[what] for name, what in (("ttft", "ttft"), ("itl", "gap")) if what in times}
    return dict(sorted(table.items(), key=lambda pair: pair[1].get("ttft", math.inf)))


# ---- the answer -----------------------------------------------------------------------------------------------------


def figures(args: argparse.Namespace, planner: "FleetPlanner", plan: "FleetPlan") -> dict[str, Any]:
    fleet, profile = plan.fleet, plan.fleet.profile
    trace, rate = planner.trace, planner.rate
    output = sum(one.output for one in trace) / len(trace)
    lengths = sorted(one.prompt + one.output for one in trace)

    def cost(replicas: int) -> float:
        return float(args.price_per_hour * replicas / 3600 / (rate * output) * 1e6)

    default = EngineConfig()
    changed = {
        item.name: getattr(fleet.config, item.name)
        for item in fields(EngineConfig)
        if getattr(fleet.config, item.name) != getattr(default, item.name)
    }
    by_promise = [
        {"factor": factor, "replicas": count, "cost_per_million_tokens": None if count is None else cost(count)}
        for factor, count in planner.by_promise(plan, FACTORS)
    ]
    fewer = None if plan.fewer is None else [target_figures(one) for one in plan.fewer]
    return {
        "command": "shoal " + shlex.join(sys.argv[1:]),
        "profile": {"name": profile.name, "quality": profile.quality, "error": profile.error},
        "model": profile.in_words(),
        "rate": rate,
        "requests": len(trace),
        "prompt_tokens": sum(one.prompt for one in trace),
        "output_tokens": sum(one.output for one in trace),
        "replicas": plan.replicas,
        "replicas_range": [plan.least, plan.most],
        "settings": changed,
        "label": fleet.label,
        "tried": plan.tried,
        "targets": [target_figures(one) for one in plan.targets],
        "with_one_fewer": fewer,
        "completes": plan.completes,
        "knee": asdict(plan.knee),
        "points": [asdict(one) for one in plan.points],
        "headroom": plan.headroom,
        "device_busy": plan.device_busy,
        "price_per_hour": args.price_per_hour * plan.replicas,
        "cost_per_million_tokens": cost(plan.replicas),
        "cost_range": [cost(plan.least), cost(plan.most)],
        "kv_bytes_per_token": profile.model.kv_token_bytes,
        "kv_tokens": profile.kv_tokens,
        "requests_that_fit": profile.kv_tokens / (sum(lengths) / len(lengths)),
        "requests_that_fit_p99": profile.kv_tokens / lengths[min(len(lengths) - 1, int(0.99 * len(lengths)))],
        "by_promise": by_promise,
        "alternatives": alternatives(args, planner, plan),
    }


def alternatives(args: argparse.Namespace, planner: "FleetPlanner", plan: "FleetPlan") -> dict[str, Any]:
    """How many replicas would do with disaggregated prefill and with speculation; no more are tried than planned."""
    found: dict[str, Any] = {}
    try:
        split = planner.disaggregated(plan) if plan.replicas > 1 else None
        found["disaggregated"] = {"replicas": split[0], "for_prompts": split[1]} if split else {"replicas": None}
    except BadConfig as error:
        found["disaggregated"] = {"replicas": None, "why": str(error)}
    try:
        found["speculation"] = {"replicas": planner.speculating(plan, args.accepted), "accepted": args.accepted}
    except BadConfig as error:
        found["speculation"] = {"replicas": None, "why": str(error)}
    return found


def target_figures(one: "KeptTarget") -> dict[str, Any]:
    found_s = one.found_s if one.found_s < 1e6 else None
    promised = {"target": one.target.name, "promised_s": one.target.seconds}
    return {"tier": one.tier, **promised, "found_s": found_s, "kept": one.kept}


def write(found: dict[str, Any], folder: Path) -> None:
    from shoal.bench.plan_plots import plan_plot
    from shoal.bench.plot_style import save

    (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n")
    save(plan_plot(found), folder, "plan")


def in_words(found: dict[str, Any]) -> str:
    least, most = found["replicas_range"]
    cheap, dear = found["cost_range"]
    error, knee = found["profile"]["error"], found["knee"]
    lines = [
        f"simulated: {found['model']}",
        f"replicas    {found['replicas']} (between {least} and {most}, for passes {error:.0%} faster or slower)",
        f"settings    {found['label']}: " + " ".join(map(as_flag, found["settings"].items())),
        f"cost        {found['cost_per_million_tokens']:.3g} per million output tokens ({cheap:.3g} to {dear:.3g}); "
        f"{found['price_per_hour']:g} per hour",
        *[f"promise     {in_row(one)}" for one in found["targets"]],
        *one_fewer(found),
        f"headroom    the rate may rise to {found['headroom']:.2f} times ({found['rate'] * found['headroom']:.3g}/s)",
        f"knee        {knee['rate']:.3g}/s of one replica (± {error:.0%}), of at most {found['completes']:.3g}/s; "
        f"there TTFT p50 is {knee['ttft_p50_s']:.3g} s and p99 {knee['ttft_p99_s']:.3g} s",
        f"KV          {found['kv_bytes_per_token']:,} bytes per token; {found['kv_tokens']:,} tokens fit: "
        f"{found['requests_that_fit']:,.0f} requests of mean length, {found['requests_that_fit_p99']:,.0f} long ones",
        f"stricter    {other_promises(found, stricter=True)}",
        f"looser      {other_promises(found, stricter=False)}",
        *alternatives_in_words(found),
    ]
    return "\n".join(lines)


def alternatives_in_words(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, one in found["alternatives"].items():
        replicas, planned = one["replicas"], found["replicas"]
        if one.get("why"):
            words = f"cannot be used with these settings: {one['why']}"
        elif replicas is None:
            words = f"does not pay: {planned} replicas do not keep the promise" if planned > 1 else "needs 2 replicas"
        elif replicas < planned:
            words = f"pays: {replicas} replicas will do"
        else:
            words = f"does not pay: {replicas} replicas, too"
        more = f" ({one['for_prompts']} for prompts)" if "for_prompts" in one else ""
        more += f" (if {one['accepted']:.0%} of the draft tokens are right)" if "accepted" in one else ""
        heading = {"disaggregated": "split", "speculation": "drafts"}[name]
        lines.append(f"{heading:<11} {name} {words}{more}")
    return lines


def as_flag(setting: tuple[str, Any]) -> str:
    """As shoal serve takes it."""
    name, value = setting[0].replace("_", "-"), setting[1]
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return shlex.join([f"--{name}", str(value)])


def other_promises(found: dict[str, Any], stricter: bool) -> str:
    """
    >>> other_promises({"by_promise": [{"factor": 0.25, "replicas": None}, {"factor": 0.5, "replicas": 5}]}, True)
    'no number for 0.25 times the time, 5 for 0.5'
    """
    chosen = [one for one in found["by_promise"] if one["factor"] != 1 and (one["factor"] < 1) == stricter]
    words = [f"{one['replicas'] or 'no number'} for {one['factor']:g}" for one in chosen]
    return ", ".join([f"{words[0]} times the time", *words[1:]])


def in_row(one: dict[str, Any]) -> str:
    tier = f"{one['tier']}: " if one["tier"] else ""
    got = "never" if one["found_s"] is None else f"{one['found_s']:.3g} s"
    return f"{tier}{one['target']} is {got} of {one['promised_s']:g} s" + ("" if one["kept"] else ": broken")


def one_fewer(found: dict[str, Any]) -> list[str]:
    if found["replicas"] == 1:
        return []
    if found["with_one_fewer"] is None:
        return [f"one fewer   falls behind: {found['replicas'] - 1} complete "
                f"{(found['replicas'] - 1) * found['completes']:.3g} of {found['rate']:.3g}/s"]  # fmt: skip
    return ["one fewer   " + "; ".join(in_row(one) for one in found["with_one_fewer"] if not one["kept"])]
