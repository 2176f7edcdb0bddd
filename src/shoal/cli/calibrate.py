"""shoal calibrate: measures how long this machine takes for a model, and writes a profile for shoal simulate."""

import argparse
import json
import logging
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.common import add_model, check_writable, new_command
from shoal.cli.compare import load_once
from shoal.cli.top import ask_server
from shoal.config.engine import EngineConfig, add_flags
from shoal.errors import BadConfig, EngineError, ShoalError

if TYPE_CHECKING:
    from shoal.build import Loaded
    from shoal.engine.loop import EngineLoop
    from shoal.sim.calibrate import Calibration
    from shoal.sim.front import FrontTimes
    from shoal.sim.profile import Profile

log = logging.getLogger(__name__)
SWAPPED_TOKENS = 1024  # KV cache of the stage in which memory is short


def add_calibrate(commands: Any) -> None:
    parser = new_command(
        commands,
        "calibrate",
        "measure how long passes take on this machine, and write a profile for shoal simulate",
        "shoal calibrate --seconds 180 --out profile.json",
        run_calibrate,
    )
    add_model(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument("--out", default="shoal-profile.json", metavar="FILE", help="default: %(default)s")
    group.add_argument("--name", help="of the profile; default: the file's")
    group.add_argument("--seconds", type=float, default=180.0, help="time for the engine's passes (default: 180)")
    group.add_argument("--no-front", action="store_true", help="do not measure the fronts: their times are 0")
    group.add_argument("--provisional", metavar="WHY", help="mark the profile as not to be relied on, and why")
    group.add_argument("--json", action="store_true", help="print the profile too")
    group.add_argument("--passes", metavar="FILE", help="write every measured pass and copy to this file, as JSON")
    group.add_argument(
        "--url", help="of a running server: take what it has computed lately instead of measuring on this machine"
    )
    group.add_argument("--api-key", metavar="KEY", help="an admin key of that server, if it has keys; -: prompt for it")
    group.add_argument("--insecure", action="store_true", help="do not check that server's certificate")
    add_flags(parser)


def run_calibrate(args: argparse.Namespace) -> int:
    from shoal.bench.cpu_noise import NoiseWatch

    if not 0 < args.seconds < 86_400:
        raise BadConfig(f"--seconds must be above 0 and at most a day, not {args.seconds:g}")
    for path in filter(None, (args.out, args.passes)):
        check_writable(path)
    if args.url:
        return calibrate_server(args)
    loaded = load_once(args)
    watch = NoiseWatch()
    calibration, engine = measure_passes(args, loaded)
    noise = watch.noise()
    if args.passes:
        Path(args.passes).write_text(passes_text(calibration))
    profile = calibrated(args, loaded, engine, calibration)
    if noise is not None and noise.disturbs and not args.provisional:
        profile = replace(profile, quality="provisional", note=noise.remark())
    return finish(args, profile, len(calibration.passes))


def passes_text(calibration: "Calibration") -> str:
    """What was measured: a line for each pass and copy."""
    passes = [{**one.size._asdict(), "device_s": one.device_s, "host_s": one.host_s} for one in calibration.passes]
    return "".join(json.dumps(one) + "\n" for one in [*passes, *map(asdict, calibration.copies)])


@dataclass(frozen=True)
class AsConfigured:
    """What an engine with the user's options is like. The engine itself is gone: its KV memory is needed."""

    config: EngineConfig
    depth: int
    kv_tokens: int


def calibrated(
    args: argparse.Namespace, loaded: "Loaded", engine: AsConfigured, calibration: "Calibration"
) -> "Profile":
    """The profile of what was measured, and of the fronts, which are measured now unless they are left out."""
    from shoal.sim.fit import fit_costs

    fit = fit_costs(calibration.passes, calibration.copies)
    front = None if args.no_front else measure_front(args, loaded)
    return replace(
        make_profile(args, loaded, engine, front),
        error=fit.held_back["p90"],
        device=fit.costs.device,
        host=fit.costs.host,
        copies=fit.costs.copies,
        held_back=fit.held_back,
    )


def finish(args: argparse.Namespace, profile: "Profile", passes: int) -> int:
    """Write and print it."""
    from shoal.sim.profile import profile_text

    Path(args.out).write_text(profile_text(profile))
    print(profile_text(profile) if args.json else in_words(profile, passes), end="" if args.json else "\n")
    return 0


def calibrate_server(args: argparse.Namespace) -> int:
    """The profile of a server's engine from what it has seen: of the one with the most passes."""
    from shoal.sim.seen import profile_of, read_seen, timed_passes

    seen = max(read_seen(ask_server(args, "/debug/passes", "engines"), args.url), key=lambda one: one.count)
    profile = profile_of(seen, args.name or Path(args.out).stem, "shoal " + shlex.join(without_key(sys.argv[1:])))
    if args.provisional:
        profile = replace(profile, quality="provisional", note=f"{args.provisional}; {profile.note}")
    return finish(args, profile, len(timed_passes(seen)))


def without_key(words: list[str]) -> list[str]:
    """A command without the key in it.

    >>> without_key(["calibrate", "--api-key", "secret", "--url", "http://x"])
    ['calibrate', '--url', 'http://x']
    """
    kept, skip = [], False
    for word in words:
        if not skip and word != "--api-key" and not word.startswith("--api-key="):
            kept.append(word)
        skip = word == "--api-key"
    return kept


def measure_passes(args: argparse.Namespace, loaded: "Loaded") -> "tuple[Calibration, AsConfigured]":
    """All stages on engines over the one loaded model; also what an engine is like as the user configured it."""
    from tqdm import tqdm

    from shoal.build import assemble
    from shoal.build_types import kv_dtype
    from shoal.runner.kvstore import bytes_per_block
    from shoal.sim.calibrate import Calibration, stages, swap_stage

    config = EngineConfig.from_args(args)
    usual = assemble(loaded, config)
    usual.loop.close()
    engine = AsConfigured(usual.config, usual.loop.depth, usual.kv_blocks * usual.config.block_size)
    limits = usual.limits
    del usual  # and with it its KV memory, which the next engine needs
    flags = {name: value for name, value in asdict(config).items() if name in vars(args) and value is not None}
    short = -(-SWAPPED_TOKENS // config.block_size) * bytes_per_block(
        loaded.spec, config.block_size, kv_dtype(config, loaded.dtype)
    )

    def make(settings: dict[str, Any]) -> "EngineLoop":
        memory = {"kv_memory": short} if settings.get("when_short") == "swap" else {}
        return assemble(loaded, EngineConfig.from_mapping({**flags, **settings, **memory, "model": None})).loop

    calibration = Calibration(make, loaded.spec.vocab_size)
    planned = [*stages(limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)]
    planned.append(swap_stage(min(limits.max_num_seqs, 16), SWAPPED_TOKENS))
    unit_s = args.seconds / sum(stage.share for stage in planned)
    with tqdm(planned, unit="stage", disable=not sys.stderr.isatty()) as bar:
        for stage in bar:
            bar.set_description(stage.name)
            calibration.run(stage, stage.share * unit_s)
    return calibration, engine


def measure_front(args: argparse.Namespace, loaded: "Loaded") -> "FrontTimes | None":
    """A real front with a paced engine: one stream, then many. And the model's tokenizer. None, with a warning, if that
    is not possible here: what was measured before is not to be lost."""
    try:
        return front_times(args.model, loaded)
    except ShoalError as error:
        log.warning("the front was not measured, and counts as 0: %s", error)
        return None


def front_times(model: str | None, loaded: "Loaded") -> "FrontTimes":
    from shoal.cli.frontend import measure
    from shoal.sim.front import FrontTimes

    many = 32
    # a fast pace for one stream: what a request waits for the engine's next pass is no work of the front
    few = argparse.Namespace(streams=1, seconds=0.05, api_workers=1, pin=False)
    crowd = argparse.Namespace(streams=many, seconds=6.0, api_workers=1, pin=False)
    one, all_of_them = measure(few, 1000.0, 20, model), measure(crowd, 50.0 * many, model=model)
    for found in (one, all_of_them):
        if not found.get("tokens"):
            raise EngineError(f"no token came through the front: {found['problems']}; try --no-front")
    cpu_one, cpu_many = (found["front_cpu_us_per_token"] * 1e-6 for found in (one, all_of_them))
    token_s = min(max((many * cpu_many - cpu_one) / (many - 1), 0.0), cpu_many)
    pass_s = max(cpu_one - token_s, 0.0)
    hop_s = max(one["delay_ms"]["p50"] / 1000 - pass_s - token_s, 0.0)
    return FrontTimes(one["before_ms"] / 1000, tokenizing_s(loaded), hop_s, pass_s, token_s)


def tokenizing_s(loaded: "Loaded") -> float:
    """Seconds per prompt token."""
    if loaded.tokenizer is None:
        return 0.0
    text = "The batch is rebuilt at every forward pass, so that no request waits for its neighbours. " * 200
    loaded.tokenizer.encode(text)
    begun_s = time.perf_counter()
    tokens = len(loaded.tokenizer.encode(text))
    return (time.perf_counter() - begun_s) / max(tokens, 1)


def make_profile(
    args: argparse.Namespace, loaded: "Loaded", engine: AsConfigured, front: "FrontTimes | None"
) -> "Profile":
    """Everything but the costs of passes."""
    from shoal.bench.doctor import gpu_name
    from shoal.bench.floor import measure
    from shoal.build import whole_memory
    from shoal.build_types import kv_dtype
    from shoal.machine.names import cpu_name
    from shoal.runner.kvstore import bytes_per_block
    from shoal.sim.cost import DeviceTimes
    from shoal.sim.front import FrontTimes
    from shoal.sim.profile import Card, ModelShape, Profile

    spec, size = loaded.spec, engine.config.block_size
    machine = measure(loaded.dtype, loaded.device, spec.parameters * loaded.dtype.itemsize)
    kv_bytes = bytes_per_block(spec, size, kv_dtype(engine.config, loaded.dtype)) // size
    shape = ModelShape(
        loaded.files.name,
        spec.parameters,
        spec.layers,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.vocab_size,
        spec.max_position,
        spec.parameters * loaded.dtype.itemsize,
        kv_bytes,
        spec.hidden_size,
    )
    name = cpu_name() if loaded.device == "cpu" else gpu_name()
    card = Card(
        name,
        loaded.device,
        whole_memory(loaded.device),
        round(machine.bandwidth_gb_s, 1),
        round(machine.matrix_gflop_s / 1000, 3),
    )
    points = ((1, 1.0),)
    return Profile(
        name=args.name or Path(args.out).stem,
        quality="provisional" if args.provisional else "measured",
        error=0.0,
        model=shape,
        card=card,
        dtype=str(loaded.dtype).removeprefix("torch."),
        depth=engine.depth,
        kv_tokens=engine.kv_tokens,
        device=DeviceTimes(points, points),
        front=front or FrontTimes(),
        note=args.provisional or "",
        command="shoal " + shlex.join(sys.argv[1:]),
    )


def in_words(profile: "Profile", passes: int) -> str:
    held, device, front = profile.held_back, profile.device, profile.front
    return "\n".join(
        [
            profile.in_words(),
            f"passes      {passes:,}, of which {held['passes']:,.0f} were held back",
            f"error       p50 {held['p50']:.1%}, p90 {held['p90']:.1%}, p99 {held['p99']:.1%}; sum {held['total']:.1%}",
            f"decodes     {1000 * device.decode[0][1]:.2f} ms for {device.decode[0][0]} to "
            f"{1000 * device.decode[-1][1]:.2f} ms for {device.decode[-1][0]}",
            f"prompts     {1000 * device.mixed[-1][1]:.2f} ms for {device.mixed[-1][0]} positions",
            f"host        {1e6 * profile.host.pass_s:.0f} µs a pass and {1e6 * profile.host.row_s:.1f} µs a row",
            f"front       {1000 * front.request_s:.2f} ms a request, {1e6 * front.token_s:.0f} µs a token",
            *([f"note        {profile.note}"] if profile.note else []),
        ]
    )
