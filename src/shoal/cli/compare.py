"""shoal compare: the same requests through every batching system, in one report."""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.checks import check_early
from shoal.cli.common import add_model, choose_model, new_command
from shoal.cli.compare_progress import ProgressLines, count_kept, kept_runs
from shoal.cli.loads import add_promised_times, add_trace, numbers, read_requests, within_context
from shoal.config.engine import EngineConfig, add_flags
from shoal.config.presets import PRESETS, preset_of
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.bench.compare import ComparePlan
    from shoal.bench.floor import Machine
    from shoal.bench.split_engines import SplitEngines
    from shoal.build import Loaded
    from shoal.core.work import ModelWork
    from shoal.engine.loop import EngineLoop
    from shoal.workload.traces import Fitted


def add_compare(commands: Any) -> None:
    parser = new_command(
        commands,
        "compare",
        "run the same requests through every batching system and write a report",
        "shoal compare --trace azure-conv --requests 200 --rates 1,2,4 --presets orca,vllm,shoal --out report",
        run_compare,
    )
    add_model(parser)
    add_trace(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--presets",
        default="all",
        metavar="NAMES",
        help=f"all, or some of: {', '.join(PRESETS)}; shoal+order=sjf is shoal with another setting",
    )
    group.add_argument(  # more than groups can serve on two cores, where all of it takes 3 to 4 minutes
        "--rates", default="12", metavar="R,R,…", help="requests per second; 0: all at once (default: 12)"
    )
    group.add_argument(
        "--users", type=int, default=0, help="closed loop: this many users with one request at a time, instead of rates"
    )
    group.add_argument("--slots", type=int, default=16, help="most requests in one pass (default: 16)")
    group.add_argument("--kv-tokens", type=int, help="KV cache size; default: the worst case of 3/4 of the slots")
    group.add_argument(
        "--max-tokens", type=int, help="max_tokens of requests; default: the longest output of the trace"
    )
    group.add_argument(
        "--repeats", type=int, default=0, help="most repeats of a run that other programs disturbed (default: 0)"
    )
    group.add_argument(
        "--simulate",
        metavar="PROFILE",
        help="run all of it on virtual time, with this profile's costs; no model is loaded (see shoal simulate)",
    )
    add_promise(parser, out="shoal-compare")
    add_flags(parser)


def add_promise(parser: argparse.ArgumentParser, out: str) -> None:
    group = parser.add_argument_group("report")
    add_promised_times(group)
    group.add_argument(
        "--price-per-hour", type=float, default=0.10, help="price of this machine, for the cost column (default: 0.1)"
    )
    group.add_argument("--out", default=out, metavar="DIR", help=f"folder for the report (default: {out})")
    group.add_argument("--json", action="store_true", help="print the figures as JSON too")


def run_compare(args: argparse.Namespace) -> int:
    from shoal.bench.compare import by_batching, compare, in_words, rows_of, run_live, speed_up

    if args.simulate:
        from shoal.cli.simulate import simulate_compare

        return simulate_compare(args)
    folder = Path(args.out)
    check_requests(args)
    make_folder(folder)
    loaded = load_once(args)
    plan, fitted = make_plan(args, loaded)
    machine = machine_of(loaded)
    meta = make_meta(args, loaded, plan, fitted, machine)
    kept, lines = kept_runs(args, loaded, plan), ProgressLines(plan)
    lines.announce(least_s(loaded, plan, machine), count_kept(kept, plan))
    maker, bar = engine_maker(args, loaded, plan), sys.stderr.isatty()
    work, rates = work_of(args, loaded), machine.rates
    try:
        run_once = partial(run_live, work=work, rates=rates)
        results = compare(plan, maker, bar, run_once, kept=kept, preset_ended=lines.preset_ended)
    except KeyboardInterrupt:
        lines.interrupted(str(kept.folder))
        raise
    for run in (*results.kept, *results.tried):
        run.work, run.rates = work, rates
    rows = rows_of(results.kept, plan)
    static, continuous = (by_batching(plan.presets, batching) for batching in ("static", "continuous"))
    found = speed_up(results.kept, plan, continuous, static)
    meta |= {"summary": in_words(found), "speed_up": found._asdict() | {"times": found.times} if found else None}
    write_report(folder, plan, meta, rows, rows_of(results.tried, plan), results.kept)
    kept.clear()
    if args.json:
        print(json.dumps({"meta": meta, "runs": rows}))
    else:
        from shoal.bench.report import compare_table

        print(compare_table(rows))
        print(f"\nreport: {folder / 'report.html'}\nwatch:  shoal live {folder / 'live.jsonl'}")
    return 0


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"cannot create the folder {folder}: {error.strerror}; choose another --out") from error


def load_once(args: argparse.Namespace) -> "Loaded":
    choose_model(args)
    config = check_early(EngineConfig.from_args(args))
    from shoal.build import load  # after the checks: it loads torch

    return load(config, progress=sys.stderr.isatty())


def check_requests(args: argparse.Namespace) -> None:
    """Raise if the trace, the presets or the rates cannot be read; before the model loads."""
    read_requests(args)
    numbers(args.rates, "--rates")
    for name in preset_names(args):
        EngineConfig.from_mapping(preset_of(name).settings)


def preset_names(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(PRESETS) if args.presets == "all" else tuple(args.presets.split(","))


def make_plan(args: argparse.Namespace, loaded: "Loaded") -> "tuple[ComparePlan, Fitted]":
    from shoal.bench.compare import ComparePlan
    from shoal.bench.record import Promise
    from shoal.workload.prompts import make_prompts

    names = preset_names(args)
    context = getattr(args, "max_model_len", None) or loaded.spec.max_position
    fitted = read_requests(args)
    capped = within_context(fitted, context)
    fitted = replace(fitted, requests=capped.requests, capped_share=capped.capped_share)
    longest = max(one.output for one in fitted.requests)
    plan = ComparePlan(
        presets=names,
        rates=numbers(args.rates, "--rates") if not args.users else (0.0,),
        trace=fitted.requests,
        prompts=make_prompts(fitted.requests, loaded.spec.vocab_size),
        max_tokens=min(args.max_tokens or longest, context // 2),
        slots=args.slots,
        promise=Promise(args.promise_ttft, args.promise_gap),
        price_per_hour=args.price_per_hour,
        arrivals=args.arrivals,
        users=args.users,
        repeats=max(0, args.repeats),
    )
    return plan, fitted


def kv_tokens_for(plan: "ComparePlan") -> int:
    """A KV cache for the worst case of 3/4 of the slots, so that memory is short at times."""
    worst = sum(sorted((one.prompt + plan.max_tokens for one in plan.trace), reverse=True)[: plan.slots])
    return max(longest_request(plan), worst * 3 // 4)


def longest_request(plan: "ComparePlan") -> int:
    """Its tokens."""
    return max(one.prompt for one in plan.trace) + plan.max_tokens


def engine_maker(
    args: argparse.Namespace, loaded: "Loaded", plan: "ComparePlan"
) -> "Callable[[dict[str, Any]], EngineLoop]":
    """Builds engines over the one loaded model; the user's flags apply to every preset."""
    from shoal.build import assemble
    from shoal.build_types import kv_dtype
    from shoal.runner.kvstore import bytes_per_block

    config = EngineConfig.from_args(args)
    given, kept = asdict(config), kv_dtype(config, loaded.dtype)
    flags = {name: value for name, value in given.items() if name in vars(args)}
    tokens = args.kv_tokens or kv_tokens_for(plan)

    def make(settings: dict[str, Any]) -> "EngineLoop":
        size = flags.get("block_size", 16)
        blocks = -(-tokens // size)
        memory = blocks * bytes_per_block(loaded.spec, size, kept)
        longest = -(-longest_request(plan) // size) * size
        chosen = {"max_num_seqs": plan.slots, "kv_memory": memory, **settings, **flags, "model": None}
        if longest <= min(blocks * size, loaded.spec.max_position):  # so that no run warns of its short KV cache
            chosen.setdefault("max_model_len", longest)
        config = EngineConfig.from_mapping(chosen)
        if config.prefill != "disaggregated":
            return assemble(loaded, config).loop
        least = -(-longest_request(plan) // size) * bytes_per_block(loaded.spec, size, kept)
        return make_split(loaded, replace(config, kv_memory=max(memory // 2, least)))  # type: ignore[return-value]

    return make


def make_split(loaded: "Loaded", config: EngineConfig) -> "SplitEngines":
    """A prefill and a decode engine over one model, each with half of the threads."""
    from shoal.bench.split_engines import SplitEngines
    from shoal.build import assemble
    from shoal.disagg.handoff import DECODE, PREFILL
    from shoal.disagg.links import links_of
    from shoal.runner.threads import ThreadChoice

    half = replace(loaded, threads=ThreadChoice(max(1, loaded.threads.threads // 2), loaded.threads.cpus))
    folder = tempfile.TemporaryDirectory(prefix="shoal-")
    links = links_of(PREFILL, "shm", Path(folder.name))
    prefill = assemble(half, config, links=links).loop
    half = replace(half, model=loaded.model.twin())
    decode = assemble(half, config, links=links_of(DECODE, "shm", Path(folder.name))).loop
    return SplitEngines(prefill, decode, links.address, on_close=folder.cleanup)


def machine_of(loaded: "Loaded") -> "Machine":
    """What it reads and multiplies in a second, measured."""
    from shoal.bench.floor import measure

    return measure(loaded.dtype, loaded.device, loaded.spec.parameters * loaded.dtype.itemsize)


def least_s(loaded: "Loaded", plan: "ComparePlan", machine: "Machine") -> float:
    """What the requests take at the machine's limits."""
    from shoal.bench.floor import floor
    from shoal.workload.lengths import Lengths

    lengths = [Lengths(one.prompt, one.output) for one in plan.trace]
    return floor(lengths, loaded.spec, loaded.dtype, plan.slots, machine).total_s


def work_of(args: argparse.Namespace, loaded: "Loaded") -> "ModelWork":
    """What passes cost, from which the runs' utilisation is derived."""
    from shoal.build_rates import model_work
    from shoal.build_types import kv_dtype, weight_bytes
    from shoal.runner.kvstore import bytes_per_block

    config = EngineConfig.from_args(args)
    kv_bytes = bytes_per_block(loaded.spec, 1, kv_dtype(config, loaded.dtype))
    return model_work(loaded.spec, weight_bytes(config, loaded.dtype), kv_bytes)


def make_meta(
    args: argparse.Namespace, loaded: "Loaded", plan: "ComparePlan", fitted: "Fitted", machine: "Machine"
) -> dict[str, Any]:
    """What a reader needs to judge the figures and to reproduce them."""
    model = f"{loaded.files.name}, {str(loaded.dtype).removeprefix('torch.')}, on {loaded.device}"
    rates = f"{machine.bandwidth_gb_s:.1f} GB/s, {machine.matrix_gflop_s:,.0f} GFLOP/s"
    return common_meta(args, plan, fitted, model, rates)


def common_meta(
    args: argparse.Namespace, plan: "ComparePlan", fitted: "Fitted", model: str, machine: str
) -> dict[str, Any]:
    """… of a run or a simulation."""
    from shoal.workload.synthetic import TABLES

    built_in = args.trace in TABLES
    return {
        "command": "shoal " + shlex.join(sys.argv[1:]) if sys.argv else "shoal compare",
        "model": model,
        "machine": machine,
        "trace": TABLES[args.trace].source if built_in else Path(args.trace).name,
        "requests": len(plan.trace),
        "prompt_tokens": sum(one.prompt for one in plan.trace),
        "output_tokens": sum(one.output for one in plan.trace),
        "scale": f"prompts by {args.prompt_scale:.4g}, outputs by {args.output_scale:.4g}",
        "capped_share": fitted.capped_share,
        "arrivals": f"closed loop, {plan.users} users" if plan.users else plan.arrivals,
        "slots": plan.slots,
        "max_tokens": plan.max_tokens,
        "promise": f"first token within {plan.promise.ttft_s:g} s, mean gap within {plan.promise.gap_s:g} s",
        "price_per_hour": plan.price_per_hour,
        "presets": {name: asdict(preset_of(name)) for name in plan.presets},
    }


def write_report(
    folder: Path,
    plan: "ComparePlan",
    meta: dict[str, Any],
    rows: list[dict[str, Any]],
    tried: list[dict[str, Any]],
    runs: list[Any],
) -> None:
    from shoal.bench.live_recording import excerpt_s, panes_of, recording, write_recording
    from shoal.bench.page import write_html, write_markdown
    from shoal.bench.page_replay import replay_frame
    from shoal.bench.plots import draw_all

    (folder / "results.json").write_text(json.dumps({"meta": meta, "runs": rows, "tried": tried}, indent=1) + "\n")
    images = draw_all(runs, plan.promise, folder)
    recorded = [run for run in runs if run.rate == plan.middle_rate and run.live]
    write_recording(folder / "live.jsonl", recorded, model=meta["model"])
    shown = panes_of(recorded)
    lines = recording(shown, excerpt_s(shown), model=meta["model"])
    frame = replay_frame(lines, files("shoal.server") / "static", len(shown)) if shown else None
    write_html(folder / "report.html", meta, rows, {name: path.read_text() for name, path in images.items()}, frame)
    write_markdown(folder / "report.md", meta, rows, {name: path.with_suffix(".png") for name, path in images.items()})
