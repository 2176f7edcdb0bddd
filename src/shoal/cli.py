"""The command line: generate, chat and bench.

Owns flags, printing and exit codes. Every command has --help with an example and --json where a machine may read it.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import __version__
from shoal.config import EngineConfig, add_flags
from shoal.core.params import SamplingParams
from shoal.errors import BadConfig, BadRequest, RequestFailed, ShoalError

if TYPE_CHECKING:
    from shoal.llm import LLM

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
        run: Command = args.run
        return run(args)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal", description="An engine for large language models that rebuilds the batch at every forward pass."
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate(commands)
    add_chat(commands)
    add_bench(commands)
    return parser


def new_command(commands: Any, name: str, help: str, example: str, run: Command) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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


# ---- generate -------------------------------------------------------------------------------------------------------


def add_generate(commands: Any) -> None:
    parser = new_command(
        commands,
        "generate",
        "continue a prompt and print the text",
        'shoal generate --chat "What is the capital of France?" --max-tokens 40 --temperature 0',
        run_generate,
    )
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--chat", action="store_true", help="ask it as a chat message, through the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object: texts, tokens, reasons, times")
    add_sampling(parser, max_tokens=256)
    add_flags(parser)


def open_llm(args: argparse.Namespace) -> "LLM":
    from shoal.llm import LLM

    return LLM(**asdict(EngineConfig.from_args(args)), progress=sys.stderr.isatty())


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadRequest(f"standard input is not UTF-8 text: {error}") from error


def run_generate(args: argparse.Namespace) -> int:
    text = read_stdin() if args.prompt == "-" else args.prompt
    with open_llm(args) as llm:
        ids = llm.encode([{"role": "user", "content": text}] if args.chat else text)
        params = sampling_from(args, llm, len(ids))
        if args.json:
            output = llm.generate(ids, params)[0]
            print(json.dumps(asdict(output), ensure_ascii=False))
            return 1 if any(one.error for one in output.outputs) else 0
        if params.n > 1:
            errors = []
            for one in llm.generate(ids, params)[0].outputs:
                print(f"--- {one.index}\n{one.text}")
                errors.append(one.error)
        else:
            errors = print_stream(llm, ids, params)[1]
    for error in filter(None, errors):
        print(f"shoal: the request failed: {error}", file=sys.stderr)
    return 1 if any(errors) else 0


def print_stream(llm: "LLM", ids: list[int], params: SamplingParams) -> tuple[str, list[str]]:
    """Print an answer as it comes; returns it, and what went wrong."""
    said, errors = [], []
    for chunk in llm.stream(ids, params):
        print(chunk.text, end="", flush=True)
        said.append(chunk.text)
        errors.append(chunk.error)
    print()
    return "".join(said), errors


# ---- chat -----------------------------------------------------------------------------------------------------------


def add_chat(commands: Any) -> None:
    parser = new_command(
        commands,
        "chat",
        "talk with a model; /reset begins anew, /exit ends",
        "shoal chat --temperature 0.7 --system 'Answer briefly.'",
        run_chat,
    )
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--system", help="system message")
    add_sampling(parser, max_tokens=512)
    add_flags(parser)


def run_chat(args: argparse.Namespace) -> int:
    with open_llm(args) as llm:
        opening = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(opening)
        print("Type a message. /reset begins anew, /exit or Ctrl-D ends.", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
                print("(a new conversation)", file=sys.stderr)
            elif line.startswith("/"):
                print(f"unknown command {line}; known: /reset, /exit", file=sys.stderr)
            elif line:
                answer(args, llm, messages, line)


def answer(args: argparse.Namespace, llm: "LLM", messages: list[dict[str, str]], line: str) -> None:
    """One turn; if it fails, the conversation stays as it was."""
    messages.append({"role": "user", "content": line})
    try:
        ids = llm.encode(messages)
        said, errors = print_stream(llm, ids, sampling_from(args, llm, len(ids)))
        if any(errors):
            raise RequestFailed(f"the request failed: {''.join(errors)}")
    except KeyboardInterrupt:
        messages.pop()
        print("\n(stopped; your message is forgotten)", file=sys.stderr)
    except ShoalError as error:
        messages.pop()
        print(f"shoal: {error} (/reset begins anew)", file=sys.stderr)
    else:
        messages.append({"role": "assistant", "content": said})


# ---- bench ----------------------------------------------------------------------------------------------------------


def add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure this engine on this machine")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    parser = new_command(
        kinds,
        "throughput",
        "run [prompt, output] lengths offline; print tokens per second, the floor and the fraction reached",
        "shoal bench throughput --workload lengths.json --config DIR --load-format dummy --json out.json",
        run_bench_throughput,
    )
    parser.add_argument(
        "--workload", required=True, metavar="FILE.json", help="a list of [prompt, output] token counts"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    what.add_argument("--config", metavar="DIR", help="folder with a config.json, for --load-format dummy")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--runs", type=int, default=1, help="repeat and report the best (default: 1)")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file; - prints them")
    add_flags(parser)


def check_writable(path: str) -> None:
    """Complain before the work, not after it."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise BadConfig(f"cannot write {path}: {error.strerror}; choose another --json file") from error


def run_bench_throughput(args: argparse.Namespace) -> int:
    from shoal.bench.floor import floor, measure
    from shoal.bench.report import throughput_figures, throughput_table
    from shoal.bench.throughput import run_throughput
    from shoal.build import build
    from shoal.workload.lengths import random_prompts, read_lengths

    for name in ("requests", "runs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BadConfig(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.json and args.json != "-":
        check_writable(args.json)
    if args.config and getattr(args, "load_format", "auto") != "dummy":
        raise BadConfig("--config has no weights; add --load-format dummy, or give --model")
    args.model = args.config or args.model
    given = {"prefix_caching": False, **vars(args)}  # random prompts share nothing: do not pay for looking
    config = EngineConfig.from_args(argparse.Namespace(**given))
    lengths = read_lengths(args.workload)[: args.requests]
    built = build(config, progress=sys.stderr.isatty())
    prompts = random_prompts(lengths, built.spec.vocab_size)
    run_throughput(built.loop, lengths[:1], prompts[:1], progress=False, name="warm-up ")
    runs = [
        run_throughput(built.loop, lengths, prompts, progress=sys.stderr.isatty(), name=f"run {number} ")
        for number in range(args.runs)
    ]
    best = min(runs, key=lambda run: run.seconds)
    machine = measure(built.dtype, built.device, built.spec.parameters * built.dtype.itemsize)
    least = floor(lengths, built.spec, built.dtype, config.max_num_seqs, machine)
    built.loop.close()
    figures = throughput_figures(best, least, machine, built.files.name, str(built.dtype).removeprefix("torch."))
    if args.json == "-":
        print(json.dumps(figures))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(throughput_table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
