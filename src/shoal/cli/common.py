"""Shared by several commands: a parser with an example, sampling flags, opening a model."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.checks import check_early
from shoal.config.engine import EngineConfig
from shoal.core.names import pick
from shoal.core.params import DEFAULTS, PARAMS, SamplingParams
from shoal.errors import BadConfig

if TYPE_CHECKING:
    from shoal.llm.llm import LLM

SHAPES = {path.name: path for path in (Path(__file__).parent.parent / "bench" / "shapes").iterdir()}
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
    )
    if log_level:
        parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)
    return parser


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """A flag for each sampling parameter that has one."""
    group = parser.add_argument_group("sampling options")
    for name, param in PARAMS.items():
        if not param.flag:
            continue
        flag = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
        help = param.flag if name != "max_tokens" else f"{param.flag} (default: {max_tokens})"
        if param.kind == "boolean":
            group.add_argument(flag, action="store_true", help=help)
        elif param.kind == "strings":
            group.add_argument(flag, action="append", default=[], metavar="TEXT", help=help)
        else:
            kind = float if param.kind == "number" else int
            group.add_argument(flag, type=kind, default=DEFAULTS[name], help=help)
    parser.set_defaults(default_max_tokens=max_tokens)


def sampling_from(args: argparse.Namespace, llm: "LLM", prompt_tokens: int) -> SamplingParams:
    """The parameters. A default max_tokens is lowered to what the context has left; an explicit one is refused."""
    values = {name: getattr(args, name) for name, param in PARAMS.items() if param.flag}
    if values["max_tokens"] is None:
        values["max_tokens"] = min(args.default_max_tokens, max(1, llm.max_model_len - prompt_tokens))
    return SamplingParams(seed=getattr(args, "seed", None), **values)


def open_llm(args: argparse.Namespace) -> "LLM":
    config = check_early(EngineConfig.from_args(args))
    from shoal.llm.llm import LLM  # after the checks: it loads torch

    return LLM(**asdict(config), progress=sys.stderr.isatty())


def add_model(parser: argparse.ArgumentParser) -> None:
    """The flags of a model, or of its shape alone."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    what.add_argument(
        "--config",
        metavar="DIR",
        help=f"folder with a config.json, or one of {', '.join(sorted(SHAPES))}; for --load-format dummy",
    )


def choose_model(args: argparse.Namespace) -> None:
    """Take --config as the model; it needs random weights."""
    if not args.config:
        return
    if getattr(args, "load_format", "auto") != "dummy":
        raise BadConfig("--config has no weights; add --load-format dummy, or give --model")
    args.model = args.config
    if not Path(args.config).is_dir():
        args.model = str(pick(SHAPES, args.config, "model shape (a folder with a config.json is one, too)"))


def check_writable(path: str) -> None:
    """Fail before the work, not after it."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise BadConfig(f"cannot write {path}: {error.strerror}; choose another file") from error
