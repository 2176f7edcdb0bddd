"""shoal simulate: a trace through simulated engines, with the report of shoal compare; and compare --simulate."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shoal.cli.common import new_command
from shoal.cli.compare import add_promise, common_meta, kv_tokens_for, make_folder, write_report
from shoal.cli.loads import (
    add_profile,
    add_server,
    add_trace,
    context_of,
    numbers,
    open_profile,
    read_requests,
    within_context,
)
from shoal.config.engine import SLOTS, EngineConfig, add_flags
from shoal.config.presets import PRESETS, preset_of
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from tqdm import tqdm

    from shoal.bench.compare import ComparePlan, RunOnce
    from shoal.engine.loop import EngineLoop
    from shoal.sim.profile import Profile
    from shoal.sim.virtual import RunObserver
    from shoal.workload.traces import Fitted, TraceRequest

DETAILED = 20_000  # requests of a run with plots; longer ones have figures alone, in bounded memory
SIMULATED = tuple(name for name in PRESETS if PRESETS[name].settings.get("prefill") != "disaggregated")  # on one engine


def add_simulate(commands: Any) -> None:
    parser = new_command(
        commands,
        "simulate",
        "run a trace through simulated engines: the same scheduler, on a measured cost model",
        "shoal simulate --profile llama-8b-h200 --trace azure-conv --requests 1000 --rates 10,20,40 --replicas 2",
        run_simulate,
    )
    add_profile(parser)
    add_trace(parser, scale=1.0, count=1000)
    group = parser.add_argument_group("what is simulated")
    group.add_argument(
        "--presets",
        default="shoal",
        metavar="NAMES",
        help=f"all ({', '.join(SIMULATED)}) or some; splitwise takes two engines (default: shoal)",
    )
    group.add_argument("--rates", default="4", metavar="R,R,…", help="requests per second; 0: all at once (default: 4)")
    group.add_argument("--users", type=int, default=0, help="closed loop: this many users, instead of rates")
    group.add_argument("--replicas", type=int, default=1, help="engines (default: 1)")
    for role, what in (("prefill", "compute prompts"), ("decode", "continue the answers")):
        group.add_argument(
            f"--{role}-replicas",
            type=int,
            default=1,
            help=f"engines that {what}, with --prefill disaggregated or the preset splitwise (default: 1)",
        )
    group.add_argument("--fronts", type=int, default=1, help="fronts of the server (default: 1)")
    add_server(group)
    group.add_argument("--slots", type=int, help="most requests in one pass; default: the engine's own")
    group.add_argument("--kv-tokens", type=int, help="KV cache size of each engine; default: the profile's")
    group.add_argument("--max-tokens", type=int, help="max_tokens of requests; default: the trace's longest output")
    add_promise(parser, out="shoal-simulate")
    add_flags(parser)


def run_simulate(args: argparse.Namespace) -> int:
    return simulate(args, open_profile(args))


def simulate_compare(args: argparse.Namespace) -> int:
    """shoal compare --simulate PROFILE: one engine, and the KV cache that compare gives to the real one."""
    from shoal.sim.engines import check_model
    from shoal.sim.profile import read_profile

    profile = read_profile(args.simulate)
    if args.model or args.config:
        check_model(profile, Path(args.model or args.config).name)
    if args.kv_tokens is None:
        plan, _ = plan_of(args, profile)
        args.kv_tokens = kv_tokens_for(plan)
    return simulate(args, profile)


def simulate(args: argparse.Namespace, profile: "Profile") -> int:
    """All presets at all rates; prints the table, and writes the report if every request can be kept."""
    from shoal.bench.compare import by_batching, compare, in_words, rows_of, speed_up
    from shoal.bench.report import compare_table

    begun_s = time.monotonic()
    plan, fitted = plan_of(args, profile)
    make, run_once = engine_maker(args, profile, plan), runner(args, profile)
    meta = meta_of(args, profile, plan, fitted)
    if args.requests > DETAILED:
        rows = [tallied(args, profile, plan, make, preset, rate) for preset in plan.presets for rate in plan.rates]
        check_served(rows)
    else:
        make_folder(Path(args.out))
        results = compare(plan, make, progress=sys.stderr.isatty() and not args.json, run_once=run_once)
        rows = rows_of(results.kept, plan)
        check_served(rows)
        static, continuous = (by_batching(plan.presets, batching) for batching in ("static", "continuous"))
        found = speed_up(results.kept, plan, continuous, static)
        meta |= {"summary": in_words(found), "speed_up": found._asdict() | {"times": found.times} if found else None}
        write_report(Path(args.out), plan, meta, rows, rows_of(results.tried, plan), results.kept)
    meta["simulated_in_s"] = round(time.monotonic() - begun_s, 3)
    if args.json:
        print(json.dumps({"meta": meta, "runs": rows}))
        return 0
    print(f"simulated: {profile.in_words()}")
    print(compare_table(rows))
    if args.requests <= DETAILED:
        print(f"\nreport: {Path(args.out) / 'report.html'}\nwatch:  shoal live {Path(args.out) / 'live.jsonl'}")
    return 0


def check_served(rows: list[dict[str, Any]]) -> None:
    """Figures of a run in which every request was refused mean nothing."""
    for row in rows:
        if not row["finished"]:
            raise BadConfig(
                f"{row['label']} served none of the {row['requests']} requests: they do not fit; raise --kv-tokens or "
                "--max-model-len, or give shorter requests (--prompt-scale, --output-scale)"
            )


def plan_of(args: argparse.Namespace, profile: "Profile") -> "tuple[ComparePlan, Fitted]":
    from shoal.bench.compare import ComparePlan
    from shoal.bench.record import Promise
    from shoal.workload.arrivals import cv_of, repeated

    cv_of(args.arrivals)  # fails now if it is invalid
    for name in ("promise_ttft", "promise_gap", "price_per_hour"):
        if not 0 <= getattr(args, name) < math.inf:
            flag = "--" + name.replace("_", "-")
            raise BadConfig(f"{flag} must be a number that is at least 0, not {getattr(args, name):g}")
    for name, least in (
        ("replicas", 1),
        ("prefill_replicas", 1),
        ("decode_replicas", 1),
        ("fronts", 1),
        ("users", 0),
        ("price_per_hour", 0),
    ):
        if getattr(args, name, least) < least:
            raise BadConfig(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name in ("slots", "kv_tokens", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BadConfig(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    args.seed = getattr(args, "seed", None)
    names = SIMULATED if args.presets == "all" else tuple(args.presets.split(","))
    for name in names:
        EngineConfig.from_mapping(preset_of(name).settings)  # fails now if it is invalid
    context, fitted = context_of(args, profile), read_requests(args)
    capped = within_context(fitted, context)
    trace = capped.requests
    if len(trace) < args.requests <= DETAILED:
        trace = list(repeated(trace, args.requests))
    plan = ComparePlan(
        presets=names,
        rates=numbers(args.rates, "--rates") if not args.users else (0.0,),
        trace=trace,
        prompts=[],
        max_tokens=min(args.max_tokens or max(one.output for one in trace), context // 2),
        slots=args.slots or getattr(args, "max_num_seqs", None) or SLOTS[profile.card.kind],
        promise=Promise(args.promise_ttft, args.promise_gap),
        price_per_hour=args.price_per_hour,
        arrivals=args.arrivals,
        users=args.users,
        seed=args.seed or 0,
    )
    return plan, replace(fitted, requests=trace, capped_share=capped.capped_share)


def engine_maker(args: argparse.Namespace, profile: "Profile", plan: "ComparePlan") -> "Callable[..., EngineLoop]":
    """Makes simulated engines; the user's flags apply to every preset."""
    from shoal.sim.engines import simulated_loop

    given = asdict(EngineConfig.from_args(args))
    flags = {name: value for name, value in given.items() if name in vars(args) and value is not None}
    memory = {} if args.kv_tokens is None else {"kv_memory": args.kv_tokens * profile.model.kv_token_bytes}

    def make(settings: dict[str, Any], role: str = "") -> "EngineLoop":
        chosen = {"max_num_seqs": plan.slots, **memory, **settings, **flags, "model": None}
        return simulated_loop(profile, EngineConfig.from_mapping(chosen), role=role)

    return make


def run_virtually(
    args: argparse.Namespace,
    profile: "Profile",
    plan: "ComparePlan",
    make: "Callable[..., EngineLoop]",
    settings: dict[str, Any],
    trace: "Iterable[TraceRequest]",
    observer: "RunObserver",
) -> float:
    """One run; returns when it ends, in seconds of virtual time."""
    from shoal.disagg.handoff import DECODE, PREFILL
    from shoal.sim.front import FrontTimes, SimulatedFronts
    from shoal.sim.request import RequestMaker
    from shoal.sim.split import SplitServer
    from shoal.sim.virtual import ClosedArrivals, OpenArrivals, VirtualServer

    times = FrontTimes() if getattr(args, "no_front", False) else profile.front
    fronts, routing = SimulatedFronts(times, getattr(args, "fronts", 1)), getattr(args, "routing", "prefix")
    roles = roles_of(args, settings)
    loops = [make(settings, role) for role in roles]
    kv = loops[0].scheduler.kv
    request = RequestMaker(plan.max_tokens, kv.block_size, kv.keep)
    if PREFILL in roles:
        prefill, decode = (
            [loop for loop, role in zip(loops, roles, strict=True) if role == one] for one in (PREFILL, DECODE)
        )
        server: VirtualServer = SplitServer(prefill, decode, observer, request, fronts, routing)
    else:
        server = VirtualServer(loops, observer, request, fronts, routing)
    return server.run(ClosedArrivals(trace, plan.users) if plan.users else OpenArrivals(trace))


def roles_of(args: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """One for each engine: of two kinds where prefill is disaggregated, else all the same."""
    from shoal.disagg.handoff import DECODE, PREFILL

    if getattr(args, "prefill", settings.get("prefill")) != "disaggregated":
        return [""] * getattr(args, "replicas", 1)
    return [PREFILL] * getattr(args, "prefill_replicas", 1) + [DECODE] * getattr(args, "decode_replicas", 1)


def runner(args: argparse.Namespace, profile: "Profile") -> "RunOnce":
    """Runs on virtual time, for compare()."""
    from shoal.bench.compare import ComparePlan, MakeEngine, arrive
    from shoal.bench.live_tape import LiveTape, NoTape
    from shoal.bench.record import RunRecord
    from shoal.bench.recorder import RunRecorder

    def run(
        plan: ComparePlan,
        make_engine: MakeEngine,
        preset: str,
        label: str,
        settings: dict[str, Any],
        rate: float,
        bar: "tqdm[Any] | None" = None,
    ) -> RunRecord:
        chosen = {**preset_of(preset).settings, **settings}
        tape = LiveTape(plan.promise, profile.work, profile.rates) if rate == plan.middle_rate else NoTape()
        recorder, build = RunRecorder(tape=tape), cast("Callable[..., EngineLoop]", make_engine)

        def make(settings: dict[str, Any], role: str = "") -> "EngineLoop":
            loop = build(settings, role)
            tape.follow(loop.scheduler)
            return loop

        seconds = run_virtually(args, profile, plan, make, chosen, arrive(plan, rate), recorder)
        if bar is not None:
            bar.update(len(plan.trace))
        busy_s = recorder.busy_s / len(roles_of(args, chosen))
        found = RunRecord(preset, label, rate, chosen, plan.slots, recorder.requests, recorder.passes, seconds, busy_s)
        return replace(found, work=profile.work, rates=profile.rates, live=recorder.live())

    return run


def tallied(
    args: argparse.Namespace,
    profile: "Profile",
    plan: "ComparePlan",
    make: "Callable[..., EngineLoop]",
    preset: str,
    rate: float,
) -> dict[str, Any]:
    """The figures of one long run."""
    from shoal.bench.tally import RunTally
    from shoal.workload.arrivals import cv_of, repeated, replay_at_rate, spaced

    if not rate and not plan.users:
        raise BadConfig(f"rate 0 sends all {args.requests:,} requests at once; give a rate, or at most {DETAILED:,}")
    trace: Iterable[TraceRequest]
    cv = cv_of(plan.arrivals)
    if cv is None:
        trace = repeated(replay_at_rate(plan.trace, rate), args.requests)
    else:
        trace = spaced(repeated(plan.trace, args.requests), rate or 1.0, cv, plan.seed)
    tally, settings = RunTally(plan.promise), preset_of(preset).settings
    seconds = run_virtually(args, profile, plan, make, settings, trace, tally)
    figures = tally.figures(seconds, plan.slots, plan.price_per_hour)
    return {"preset": preset, "label": preset, "rate": rate, "settings": settings, **figures}


def meta_of(args: argparse.Namespace, profile: "Profile", plan: "ComparePlan", fitted: "Fitted") -> dict[str, Any]:
    machine = f"simulated, with {getattr(args, 'replicas', 1)} of {profile.card.name}; profile {profile.name}"
    about = {"name": profile.name, "quality": profile.quality, "error": profile.error, "note": profile.note}
    found = common_meta(args, plan, fitted, profile.in_words(), machine)
    return {**found, "requests": args.requests, "profile": about}
