"""`shoal bench serve`: its flags, which of them can be combined, and what it prints.

Imports aiohttp only when it runs.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.errors import BadConfig, ImpossiblePair
from shoal.workload.arrivals import at_once, gamma, poisson, replay, replay_at_rate
from shoal.workload.prompts import make_prompts
from shoal.workload.synthetic import TABLES, draw_lengths
from shoal.workload.traces import TraceRequest, fit, read_trace

REQUESTS = 100
RATE = 1.0
EXAMPLE = (
    "shoal bench serve --url http://127.0.0.1:8000 --trace azure-conv --requests 200 --rate 2 --scale 0.1\n"
    "  shoal bench serve --url http://127.0.0.1:8000 --trace my.csv --replay --time-scale 0.5 --json out.json\n"
    "  shoal bench serve --url http://127.0.0.1:8000 --concurrency 16 --chat"
)


def add_command(kinds: Any, new_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `serve` to `shoal bench`."""
    parser = new_command(
        kinds,
        "serve",
        "send requests to an OpenAI-compatible server at given times and measure the answers",
        EXAMPLE,
        run,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="model name in requests (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; never stored")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="limit for one request (default: 600)"
    )
    _add_requests(parser.add_argument_group("requests"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    group = parser.add_argument_group("results")
    group.add_argument(
        "--promise-ttft", type=float, default=1.0, metavar="S", help="promised time to the first token (default: 1)"
    )
    group.add_argument(
        "--promise-gap", type=float, default=0.1, metavar="S", help="promised mean gap between tokens (default: 0.1)"
    )
    group.add_argument(
        "--price-per-hour", type=float, default=0.0, metavar="P", help="price of the machine, for the cost of tokens"
    )
    group.add_argument("--json", metavar="OUT", help="write all figures and requests to this file; - prints them")


def _add_requests(group: Any) -> None:
    known = ", ".join(TABLES)
    group.add_argument(
        "--trace",
        default="azure-conv",
        metavar="FILE",
        help=f"a trace (Azure, Mooncake, BurstGPT, or own CSV/JSONL), or drawn lengths: {known} (default: %(default)s)",
    )
    group.add_argument(
        "--requests", type=int, default=REQUESTS, metavar="N", help="use the first N (default: %(default)s)"
    )
    group.add_argument("--scale", type=float, default=1.0, help="multiply all lengths by this (default: 1)")
    group.add_argument("--max-prompt", type=int, metavar="N", help="cap prompts at N tokens")
    group.add_argument("--max-output", type=int, metavar="N", help="cap outputs at N tokens")
    group.add_argument("--text", action="store_true", help="send words (about a token each) instead of token ids")
    group.add_argument("--chat", action="store_true", help="send words to /v1/chat/completions")
    group.add_argument(
        "--vocab-size", type=int, default=30_000, metavar="N", help="token ids are below N (default: %(default)s)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request outputs of exactly the trace's length; --no-ignore-eos for servers that refuse the field",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")


def _add_arrivals(group: Any) -> None:
    group.add_argument(
        "--rate", type=float, metavar="R", help=f"Poisson arrivals, R requests per second (default: {RATE:g})"
    )
    group.add_argument(
        "--gamma-cv", type=float, metavar="C", help="bursty arrivals: gaps with this coefficient of variation"
    )
    group.add_argument("--replay", action="store_true", help="the trace's own arrival times; with --rate, scaled to it")
    group.add_argument(
        "--time-scale", type=float, metavar="S", help="with --replay: multiplies the times; 0.5 is twice as fast"
    )
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: N users, each with one request at a time"
    )


def run(args: argparse.Namespace) -> int:
    """Send, measure, print; 1 if no request finished."""
    try:
        from shoal.bench.record import Promise
        from shoal.bench.serve import as_text, base_url, first_model, run_serve, serve_summary, serve_table
    except ModuleNotFoundError as error:
        raise BadConfig(f"bench serve needs {error.name}; pip install 'shoal[bench]'") from error

    check(args)
    base_url(args.url)
    requests, capped_share = requests_from(args)
    text = args.text or args.chat
    prompts = make_prompts(requests, args.vocab_size, args.seed)
    promise = Promise(args.promise_ttft, args.promise_gap)

    async def measure() -> Any:
        return await run_serve(
            args.url,
            requests,
            as_text(prompts) if text else prompts,
            model=args.model or await first_model(args.url, args.api_key),
            api_key=args.api_key,
            closed=args.concurrency,
            timeout_s=args.timeout,
            ignore_eos=args.ignore_eos,
            progress=sys.stderr.isatty(),
            chat=args.chat,
        )

    record = asyncio.run(measure())
    summary = serve_summary(record, promise, args.price_per_hour)
    summary |= {"trace": args.trace, "scaled_by": args.scale, "capped_share": capped_share}
    figures = json.dumps({"summary": summary, "requests": [asdict(one) for one in record.requests]}, indent=1)
    if args.json == "-":
        print(figures)
    else:
        if args.json:
            Path(args.json).write_text(figures + "\n")
        if capped_share:
            print(f"{capped_share:.1%} of requests were shortened to the caps")
        print(serve_table(summary))
    return 0 if summary["finished"] else 1


def check(args: argparse.Namespace) -> None:
    """Refuse invalid values and combinations of flags, and an output file that cannot be written, before the run."""
    for name in ("requests", "concurrency", "vocab_size", "max_prompt", "max_output"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BadConfig(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    for name in ("rate", "gamma_cv", "time_scale", "scale", "timeout", "promise_ttft", "promise_gap"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            raise BadConfig(f"--{name.replace('_', '-')} must be a number above 0, not {getattr(args, name)}")
    if args.concurrency is not None and (args.replay or args.rate is not None or args.gamma_cv is not None):
        raise ImpossiblePair("--concurrency is a closed loop and excludes --rate, --gamma-cv and --replay; choose one")
    if args.replay and args.gamma_cv is not None:
        raise ImpossiblePair("--replay uses the trace's times and excludes --gamma-cv; choose one")
    if args.time_scale is not None and (not args.replay or args.rate is not None):
        raise ImpossiblePair("--time-scale needs --replay and excludes --rate")
    if args.replay and args.trace in TABLES:
        raise ImpossiblePair(f"{args.trace} has lengths but no arrival times to --replay; give a --trace FILE")
    if args.json and args.json != "-":
        try:
            with open(args.json, "a"):
                pass
        except OSError as error:
            raise BadConfig(f"cannot write {args.json}: {error.strerror}; choose another --json file") from error


def requests_from(args: argparse.Namespace) -> tuple[list[TraceRequest], float]:
    """The requests with arrival times, and the share of them that a cap shortened."""
    if args.trace in TABLES:
        found = draw_lengths(args.trace, args.requests, args.seed)
    else:
        found = read_trace(args.trace, args.requests)
    fitted = fit(found, scale=args.scale, max_prompt=args.max_prompt, max_output=args.max_output)
    return _with_arrivals(args, fitted.requests), fitted.capped_share


def _with_arrivals(args: argparse.Namespace, requests: list[TraceRequest]) -> list[TraceRequest]:
    if args.concurrency is not None:
        return at_once(requests)
    if args.replay and args.rate is not None:
        return replay_at_rate(requests, args.rate)
    if args.replay:
        return replay(requests, args.time_scale or 1.0)
    if args.gamma_cv is not None:
        return gamma(requests, args.rate or RATE, args.gamma_cv, args.seed)
    return poisson(requests, args.rate or RATE, args.seed)
