"""What commands about loads share: flags of a workload, of promises, of a profile and of several engines; lists of
numbers; and a trace cut to a model's context."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.common import SHAPES
from shoal.core.names import pick
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.sim.profile import Profile
    from shoal.workload.traces import Fitted

DRAWN = 20_000  # lengths drawn from a table; after that many they repeat, where more are wanted


def add_trace(parser: argparse.ArgumentParser, scale: float | None = None, count: int = 32) -> None:
    """The flags of a workload; `scale`: default of both scales, else those that suit a small model on a CPU."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--trace",
        default="azure-conv",
        help="a trace file, or azure-conv / azure-code: lengths drawn like those traces'",
    )
    group.add_argument("--requests", type=int, default=count, help=f"number of requests (default: {count})")
    for what, usual in (("prompt", 48), ("output", 24)):
        shown = f"{scale:g}" if scale else f"1/{usual}"
        group.add_argument(
            f"--{what}-scale",
            type=float,
            default=scale or 1 / usual,
            help=f"factor of {what} lengths (default: {shown})",
        )
    group.add_argument("--arrivals", default="poisson", help="poisson, replay, or gamma:CV for bursts")


def add_promised_times(group: Any) -> None:
    """What goodput counts."""
    group.add_argument(
        "--promise-ttft", type=float, default=2.0, metavar="S", help="promised time to the first token (default: 2)"
    )
    group.add_argument(
        "--promise-gap", type=float, default=0.5, metavar="S", help="promised mean gap between tokens (default: 0.5)"
    )


def add_profile(parser: argparse.ArgumentParser, default: str = "smollm2-135m-cpu") -> None:
    parser.add_argument(
        "--profile",
        default=default,
        metavar="NAME|FILE",
        help="a file of shoal calibrate, or one of the package's; NAME@CARD: scaled to another card "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--shape",
        metavar="DIR",
        help=f"scale the profile to another model: a folder with a config.json, or one of {', '.join(sorted(SHAPES))}",
    )


def open_profile(args: argparse.Namespace) -> "Profile":
    """The one that was named, scaled to the model's shape if one was given."""
    from shoal.models import spec_from_config
    from shoal.sim.profile import ModelShape, read_profile, reshape

    profile = read_profile(args.profile)
    if not args.shape:
        return profile
    folder = Path(args.shape)
    if not folder.is_dir():
        folder = pick(SHAPES, args.shape, "model shape (a folder with a config.json is one, too)")
    try:
        spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise BadConfig(f"{folder} has no config.json that can be read: {error}") from error
    old = profile.model
    item_bytes = old.weight_bytes / old.parameters
    kv_item_bytes = old.kv_token_bytes / (2 * old.layers * old.kv_heads * old.head_dim)
    shape = ModelShape(
        folder.name,
        spec.parameters,
        spec.layers,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.vocab_size,
        spec.max_position,
        round(spec.parameters * item_bytes),
        round(spec.kv_values_per_token * kv_item_bytes),
        spec.hidden_size,
    )
    return reshape(profile, shape)


def add_server(group: Any) -> None:
    """Of a simulated server around its engines."""
    group.add_argument(
        "--routing",
        default="prefix",
        choices=("round-robin", "least-load", "prefix"),
        help="which engine gets a request (default: prefix)",
    )
    group.add_argument("--no-front", action="store_true", help="leave out the fronts: requests start in the engine")


def read_requests(args: argparse.Namespace) -> "Fitted":
    """The trace scaled, and cut to --requests; it may be shorter."""
    from shoal.workload.synthetic import TABLES, draw_lengths
    from shoal.workload.traces import fit, read_trace

    if args.requests < 1:
        raise BadConfig(f"--requests must be at least 1, not {args.requests}")
    built_in = args.trace in TABLES
    if built_in and args.arrivals == "replay":
        raise BadConfig(f"{args.trace} has lengths but no arrival times; use --arrivals poisson, or give a trace file")
    drawn, seed = min(args.requests, DRAWN), getattr(args, "seed", None) or 0
    requests = draw_lengths(args.trace, drawn, seed) if built_in else read_trace(args.trace, args.requests)
    return fit(requests, scale=args.prompt_scale, output_scale=args.output_scale)


def numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadConfig(f"{flag} takes numbers separated by commas, such as 1,2,4; not {text!r}") from None
    if any(not 0 <= value < float("inf") for value in found):
        raise BadConfig(f"{flag} takes numbers that are not negative; not {text!r}")
    return found


def context_of(args: argparse.Namespace, profile: "Profile") -> int:
    """Most tokens of one request."""
    return int(getattr(args, "max_model_len", None) or profile.model.max_model_len)


def within_context(fitted: "Fitted", context: int) -> "Fitted":
    """A prompt may have half of the context, and an output the other half."""
    from shoal.workload.traces import fit

    return fit(fitted.requests, max_prompt=context // 2, max_output=context // 2)
