"""shoal tune: searches settings for a load in the simulator, and measures the best of them on the real engine."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.calibrate import calibrated, measure_passes
from shoal.cli.common import add_model, check_writable, new_command
from shoal.cli.compare import load_once
from shoal.cli.doctor import flags_of
from shoal.cli.loads import add_promised_times, add_trace, context_of, read_requests, within_context
from shoal.config.engine import EngineConfig, add_flags
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.bench.compare import ComparePlan
    from shoal.build import Loaded
    from shoal.sim.profile import Profile
    from shoal.sim.tuner import Trial

OBJECTIVES = {
    "goodput": "requests per second that keep the promise",
    "throughput": "output tokens per second, all requests at once",
    "tail": "p99 of end-to-end times, inverted",
}
SHOWN = ("goodput_request_s", "output_tok_s", "ttft_s.p99", "gap_s.p99", "e2e_s.p99")


def add_tune(commands: Any) -> None:
    parser = new_command(
        commands,
        "tune",
        "search the settings that suit a load in the simulator, and measure the best on this machine",
        "shoal tune --model SmolLM2 --trace azure-conv --requests 60 --objective goodput",
        run_tune,
    )
    add_model(parser)
    add_trace(parser, count=60)
    group = parser.add_argument_group("tuning")
    group.add_argument("--rate", type=float, help="requests per second; default: 0.8 of what the defaults complete")
    group.add_argument(
        "--objective",
        default="goodput",
        choices=tuple(OBJECTIVES),
        help="; ".join(f"{name}: {what}" for name, what in OBJECTIVES.items()) + " (default: goodput)",
    )
    add_promised_times(group)
    group.add_argument("--profile", metavar="NAME|FILE", help="of this machine; default: it is calibrated first")
    group.add_argument("--seconds", type=float, default=60.0, help="time for calibrating (default: 60)")
    group.add_argument("--trials", type=int, default=80, help="most simulated runs (default: 80)")
    group.add_argument("--best", type=int, default=3, help="how many of the best to measure (default: 3)")
    group.add_argument("--no-live", action="store_true", help="simulate only; needs --profile, and loads no model")
    group.add_argument("--out", metavar="FILE", help="write everything as JSON")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser)


def run_tune(args: argparse.Namespace) -> int:
    check_numbers(args)
    loaded = None if args.no_live else load_once(args)
    profile = profile_for(args, loaded)
    plan = plan_of(args, profile, loaded)
    fixed = {name: value for name, value in asdict(EngineConfig.from_args(args)).items() if name in vars(args)}
    memory = {"kv_memory": fixed.get("kv_memory") or profile.kv_tokens * profile.model.kv_token_bytes}
    fixed = {**memory, **fixed, "model": None}
    if plan.rates[0] < 0:
        plan = replace(plan, rates=(0.8 * completes(profile, plan, fixed),))
    trials, best = search(args, profile, plan, fixed)
    chosen = [trials[0], *best]
    found: list[dict[str, Any]] = []
    for one in chosen:
        predicted = simulated(profile, plan, fixed, one.settings)
        found.append({"settings": one.settings, "flags": flags_of(one.settings), "predicted": predicted})
    if loaded is not None:
        for shown, measured in zip(found, measure(loaded, plan, fixed, chosen), strict=True):
            shown["measured"] = measured
    report = {
        "command": "shoal " + shlex.join(sys.argv[1:]),
        "model": profile.in_words(),
        "objective": args.objective,
        "rate": plan.rates[0],
        "trials": [{"settings": one.settings, "worth": one.worth} for one in trials],
        "chosen": found,
        "winner": winner(args.objective, found),
    }
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if args.json else in_words(report))
    return 0


def check_numbers(args: argparse.Namespace) -> None:
    if args.no_live and not args.profile:
        raise BadConfig("--no-live measures nothing; give --profile")
    for name, least in (("trials", 1), ("best", 1)):
        if getattr(args, name) < least:
            raise BadConfig(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.rate is not None and not 0 < args.rate < 1e9:
        raise BadConfig(f"--rate must be above 0, not {args.rate}")
    for name in ("promise_ttft", "promise_gap"):
        if not 0 < getattr(args, name) < 1e9:
            raise BadConfig(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name)}")
    if args.out:
        check_writable(args.out)


def profile_for(args: argparse.Namespace, loaded: "Loaded | None") -> "Profile":
    from shoal.sim.engines import check_model
    from shoal.sim.profile import read_profile

    if args.profile:
        profile = read_profile(args.profile)
        name = loaded.files.name if loaded is not None else args.model or args.config
        if name:
            check_model(profile, Path(name).name)
        return profile
    assert loaded is not None
    args.no_front, args.name, args.provisional = True, "tuned", None
    calibration, engine = measure_passes(args, loaded)
    return calibrated(args, loaded, engine, calibration)


def plan_of(args: argparse.Namespace, profile: "Profile", loaded: "Loaded | None") -> "ComparePlan":
    """The load; a rate below 0 is not known yet."""
    from shoal.bench.compare import ComparePlan
    from shoal.bench.record import Promise
    from shoal.workload.prompts import make_prompts

    trace = within_context(read_requests(args), context_of(args, profile)).requests
    return ComparePlan(
        presets=("shoal",),
        rates=(0.0 if args.objective == "throughput" else args.rate or -1.0,),
        trace=trace,
        prompts=make_prompts(trace, profile.model.vocab_size) if loaded is not None else [],
        max_tokens=max(one.output for one in trace),
        slots=0,
        promise=Promise(args.promise_ttft, args.promise_gap),
        price_per_hour=0.0,
        arrivals=args.arrivals,
    )


def completes(profile: "Profile", plan: "ComparePlan", fixed: dict[str, Any]) -> float:
    """Requests per second, with the defaults."""
    from shoal.sim.doctor import NO_PROMISE
    from shoal.sim.planner import FleetSetup

    config = EngineConfig.from_mapping(fixed)
    return FleetSetup("", profile, config, plan.max_tokens, NO_PROMISE, front=False).completes(plan.trace)


def simulated(
    profile: "Profile", plan: "ComparePlan", fixed: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """The figures of one simulated run."""
    from shoal.bench.compare import arrive
    from shoal.bench.record import RunRecord, summarise
    from shoal.bench.recorder import RunRecorder
    from shoal.sim.doctor import NO_PROMISE
    from shoal.sim.planner import FleetSetup

    config, rate = EngineConfig.from_mapping({**fixed, **settings}), plan.rates[0]
    recorder = RunRecorder()
    fleet = FleetSetup("", profile, config, plan.max_tokens, NO_PROMISE, front=False)
    seconds = fleet.run(1, arrive(plan, rate), recorder)
    run = RunRecord("", "", rate, settings, 1, recorder.requests, recorder.passes, seconds, recorder.busy_s)
    return figures(summarise(run, plan.promise, 0.0))


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Those that are shown."""
    found = {}
    for path in SHOWN:
        value: Any = summary
        for part in path.split("."):
            value = value[part]
        found[path] = value
    return {**found, "goodput_share": summary["goodput_share"], "e2e_mean_s": summary["e2e_s"]["mean"]}


def worth(objective: str, found: dict[str, Any]) -> float:
    """More is better. Where all requests keep the promise, shorter answers decide, by a little."""
    if objective == "throughput":
        return float(found["output_tok_s"])
    if objective == "tail":
        return 1 / max(float(found["e2e_s.p99"]), 1e-9)
    return float(found["goodput_request_s"]) * (1 + 0.05 / (1 + float(found["e2e_mean_s"]))) + 1e-9


def search(
    args: argparse.Namespace, profile: "Profile", plan: "ComparePlan", fixed: dict[str, Any]
) -> "tuple[list[Trial], list[Trial]]":
    """All trials, and the best that are no worse than the defaults."""
    from tqdm import tqdm

    from shoal.sim.tuner import Trial, Tuner, axes_of

    host = min(fixed["kv_memory"], 4 * 2**30)
    axes = axes_of(profile.card.kind, host, [name for name in fixed if name in vars(args)])
    trials: list[Trial] = []
    with tqdm(total=args.trials, unit="run", disable=not sys.stderr.isatty(), leave=False) as bar:

        def tell(trial: Trial) -> None:
            trials.append(trial)
            bar.update()
            bar.set_postfix_str(flags_of(trial.settings)[-60:])

        tuner = Tuner(axes, lambda settings: worth(args.objective, simulated(profile, plan, fixed, settings)),
                      args.trials, tell)  # fmt: skip
        tuner.search()
    return trials, [one for one in tuner.best(args.best) if one.worth >= trials[0].worth]


def measure(
    loaded: "Loaded", plan: "ComparePlan", fixed: dict[str, Any], chosen: "list[Trial]"
) -> list[dict[str, Any]]:
    """The figures of the real engine with each of these settings."""
    from tqdm import tqdm

    from shoal.bench.compare import run_live
    from shoal.bench.record import summarise
    from shoal.build import assemble

    found = []
    with tqdm(chosen, unit="run", desc="measured", disable=not sys.stderr.isatty(), leave=False) as bar:
        for trial in bar:
            run = run_live(
                plan,
                lambda settings, trial=trial: (
                    assemble(  # type: ignore[misc]
                        loaded, EngineConfig.from_mapping({**fixed, **trial.settings})
                    ).loop
                ),
                "shoal",
                "",
                {},
                plan.rates[0],
            )
            found.append(
                figures(summarise(run, plan.promise, 0.0)) | {"others": run.noise.share if run.noise else None}
            )
    return found


def winner(objective: str, found: list[dict[str, Any]]) -> int:
    """Which of the chosen is best: as measured, if it was. The defaults come first, and win if nothing is better."""
    by = "measured" if "measured" in found[0] else "predicted"
    values = [worth(objective, one[by]) for one in found]
    return values.index(max(values))


def short(value: float) -> str:
    """
    >>> short(3801.2), short(0.01234), short(17.68)
    ('3,801', '0.0123', '17.7')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_words(report: dict[str, Any]) -> str:
    rate = f"{report['rate']:.3g}/s" if report["rate"] else "all at once"
    lines = [
        f"{report['model']}; {len(report['trials'])} settings simulated for {report['objective']}, {rate}",
        f"{'':<10}  {'goodput req/s':>16}  {'tok/s':>16}  {'TTFT p99 s':>16}  {'gap p99 ms':>16}  {'e2e p99 s':>16}",
    ]
    scale = {"gap_s.p99": 1e3}
    for number, one in enumerate(report["chosen"]):
        cells = []
        for path in SHOWN:
            values = [one[by][path] * scale.get(path, 1.0) for by in ("predicted", "measured") if by in one]
            cells.append(f"{' / '.join(map(short, values)):>16}")
        lines.append(f"{'defaults' if not number else f'choice {number}':<10}  " + "  ".join(cells))
    if "measured" in report["chosen"][0]:
        lines.append("each as predicted / measured")
    lines += [f"choice {number}: {one['flags']}" for number, one in enumerate(report["chosen"]) if number]
    best = report["winner"]
    lines.append(f"use: {report['chosen'][best]['flags']}" if best else "use the defaults: nothing was better")
    return "\n".join(lines)
