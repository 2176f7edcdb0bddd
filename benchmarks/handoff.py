"""What handing a long prompt over costs, and what running streams notice of it, beside chunked prefill in one engine.

    python benchmarks/handoff.py MODEL [--prompt 8000] [--streams 16] [--rounds 5] -- --load-format dummy --device cuda

Two servers in turn: one engine with chunked prefill, and a prefill and a decode engine (`--prefill disaggregated`).
Each gets the long prompt alone, some times: the median time to its first token, which the engine that computed the
prompt has drawn, and to the second, which is drawn where the KV has gone. What lies between the two, less the same in
one engine, is what the handoff costs. Then so many streams run, and long prompts arrive among them, one a second: the
largest gap of the running streams meanwhile, beside the usual one. Needs no packages beyond the server's.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from disaggregation import Answer, ask
from restart_bf16 import Server

from shoal.disagg.handoff import TRANSPORTS


def prompt_of(length: int, number: int) -> list[int]:
    chance = random.Random(number)  # no two prompts have a prefix in common
    return [chance.randrange(5, 500) for _ in range(length)]


async def alone(url: str, args: argparse.Namespace) -> tuple[float, float]:
    """Median times to the first and the second token of a long prompt; the first prompt is a warm-up."""
    prompts = [prompt_of(args.prompt, number) for number in range(args.rounds + 1)]
    answers = [await ask(url, prompt, 8, 0.0, time.monotonic()) for prompt in prompts]
    first, second = ([one.token_s[at] - one.asked_s for one in answers[1:]] for at in (0, 1))
    return statistics.median(first), statistics.median(second)


async def among(url: str, args: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:
    """The running streams, and the long prompts that arrived meanwhile."""
    begun_s = time.monotonic()
    running = [
        asyncio.create_task(ask(url, prompt_of(64, 1000 + number), args.output, 0.0, begun_s))
        for number in range(args.streams)
    ]
    long = [
        asyncio.create_task(ask(url, prompt_of(args.prompt, 100 + number), 8, 1.0 + number, begun_s))
        for number in range(args.rounds)
    ]
    return await asyncio.gather(*running), await asyncio.gather(*long)


def gaps_in(streams: list[Answer], since_s: float, until_s: float) -> list[float]:
    """Of all streams, the gaps that overlap this time."""
    return [
        after - before
        for one in streams
        for before, after in zip(one.token_s, one.token_s[1:], strict=False)
        if after > since_s and before < until_s
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, .gguf file or hub name")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--streams", type=int, default=16, help="that run meanwhile")
    parser.add_argument("--output", type=int, default=1200, help="tokens of each, for some seconds")
    parser.add_argument("--rounds", type=int, default=5, help="long prompts")
    parser.add_argument("--kv-transport", choices=TRANSPORTS, help="between the two engines (default: the fastest)")
    own, more = sys.argv[1:], []
    if "--" in own:  # what follows goes to shoal serve
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    print(
        f"{'ms':<24} {'TTFT alone':>11} {'2nd token':>9} {'TTFT among':>11} {'gap p50':>8} {'largest':>8}", flush=True
    )
    alone_s: list[tuple[float, float]] = []
    way = ("--kv-transport", args.kv_transport) if args.kv_transport else ()
    for name, flags in {"1 engine, chunked": (), "1 prefill, 1 decode": ("--prefill", "disaggregated", *way)}.items():
        server = Server(args.model, *flags, "--log-level", "warning", *more)
        try:
            alone_s.append(asyncio.run(alone(server.url, args)))
            streams, long = asyncio.run(among(server.url, args))
        finally:
            server.close()
        usual = [gap for one in streams for gap in one.gaps]
        worst = [max(gaps_in(streams, one.asked_s, one.token_s[0]), default=0.0) for one in long]
        waits = [one.token_s[0] - one.asked_s for one in long]
        figures = (*alone_s[-1], statistics.median(waits), statistics.median(usual), max(worst))
        print(
            f"{name:<24} "
            + " ".join(f"{1e3 * value:>{w}.1f}" for value, w in zip(figures, (11, 9, 11, 8, 8), strict=True)),
            flush=True,
        )
    (first, second), (first_of_two, second_of_two) = [[1e3 * value for value in one] for one in alone_s]
    print(
        f"two engines add {first_of_two - first:.1f} ms to the first token of {args.prompt:,} tokens, and the handoff "
        f"adds {second_of_two - first_of_two - (second - first):.1f} ms between the first and the second",
        flush=True,
    )


if __name__ == "__main__":
    main()
