"""What several commands share: a parser with an example, sampling flags, opening a model."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.config.engine import EngineConfig
from shoal.core.params import SamplingParams
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.llm import LLM

Command = Callable[[argparse.Namespace], int]


def new_command(
    commands: Any, name: str, help: str, example: str, run: Command, log_level: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if log_level:
        parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)
    return parser


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling options")
    group.add_argument("--max-tokens", type=int, default=None, help=f"most output tokens (default: {max_tokens})")
    group.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own, else 1)")
    group.add_argument("--top-k", type=int, help="keep the k likeliest tokens")
    group.add_argument("--top-p", type=float, help="keep the likeliest tokens that hold this much of the mass")
    group.add_argument("--min-p", type=float, help="keep tokens at least this likely, relative to the likeliest")
    group.add_argument("--repetition-penalty", type=float)
    group.add_argument("--presence-penalty", type=float, default=0.0)
    group.add_argument("--frequency-penalty", type=float, default=0.0)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    group.add_argument("-n", type=int, default=1, help="answers per prompt (default: 1)")
    parser.set_defaults(default_max_tokens=max_tokens)


def sampling_from(args: argparse.Namespace, llm: "LLM", prompt_tokens: int) -> SamplingParams:
    """The parameters; a default max_tokens gives way to a short context, an explicit one is refused."""
    room = max(1, llm.max_model_len - prompt_tokens)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    values = {name: getattr(args, name) for name in names}
    most = args.max_tokens if args.max_tokens is not None else min(args.default_max_tokens, room)
    return SamplingParams(
        max_tokens=most,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        n=args.n,
        seed=getattr(args, "seed", None),
        **values,
    )


def open_llm(args: argparse.Namespace) -> "LLM":
    from shoal.llm import LLM

    return LLM(**asdict(EngineConfig.from_args(args)), progress=sys.stderr.isatty())


def check_writable(path: str) -> None:
    """Complain before the work, not after it."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise BadConfig(f"cannot write {path}: {error.strerror}; choose another file") from error
