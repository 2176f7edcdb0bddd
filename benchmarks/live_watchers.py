"""What do two watchers of /live cost? Output tokens a second of a server, with and without them, in turns.

    python benchmarks/live_watchers.py                                                  # cpu64, SmolLM2-135M's shape
    python benchmarks/live_watchers.py --workload nano256 --config qwen3-0.6b --runs 8 \\
        -- --dtype bfloat16 --device cuda --max-num-seqs 256 --max-num-batched-tokens 8192
    python benchmarks/live_watchers.py --json out.json --model DIR -- --threads 2

A real `shoal serve` with random weights in a shape (or of a model); what follows -- goes to it. All requests of the
workload are sent at once and streamed; a run ends with the last answer. Runs with and without watchers alternate, and
every other pair begins with the watchers, so that a machine that grows slower favours neither. The watchers read every
line, in a process of their own, and have read the past before a run begins; a run without them begins when the server
has stopped making summaries. Prints each pair's ratio, and their median. Needs no packages beyond the server's.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from restart_bf16 import Server

from shoal.cli.common import SHAPES
from shoal.core.names import pick
from shoal.server.live import LINGER_S
from shoal.workload.lengths import Lengths, random_prompts
from shoal.workload.named import find_lengths

WATCHERS = 2
SETTLE_S = 2.0
HEAD = (
    "{what} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
    "Connection: close\r\n\r\n"
)


async def whole(url: str, what: str, body: bytes) -> bytes:
    """The answer to a request, without its chunks being parsed: that would take time from the server."""
    host = urlsplit(url).netloc
    reader, writer = await asyncio.open_connection(*host.rsplit(":", 1), limit=2**20)
    try:
        writer.write(HEAD.format(what=what, host=host, size=len(body)).encode() + body)
        return await reader.read()
    finally:
        writer.close()


async def one_run(url: str, lengths: list[Lengths], prompts: list[list[int]]) -> float:
    """Output tokens per second."""
    bodies = [
        json.dumps(
            {"prompt": prompt, "max_tokens": one.output, "ignore_eos": True, "temperature": 0.0, "stream": True}
        ).encode()
        for one, prompt in zip(lengths, prompts, strict=True)
    ]
    begun_s = time.perf_counter()
    answers = await asyncio.gather(*(whole(url, "POST /v1/completions", body) for body in bodies))
    took_s = time.perf_counter() - begun_s
    assert all(b" 200 " in answer[:20] and b"data: [DONE]" in answer[-200:] for answer in answers), "a request failed"
    return sum(one.output for one in lengths) / took_s


# ---- watchers -------------------------------------------------------------------------------------------------------


async def watch(url: str) -> None:
    """Read summaries until stopped."""
    host = urlsplit(url).netloc
    reader, writer = await asyncio.open_connection(*host.rsplit(":", 1), limit=2**24)
    writer.write(HEAD.format(what="GET /live/events", host=host, size=0).encode())
    while await reader.read(2**16):
        pass


async def watch_all(url: str) -> None:
    await asyncio.gather(*(watch(url) for _ in range(WATCHERS)))


class Watchers:
    """In a process of their own."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, __file__, "--watch", url]
        self.process = subprocess.Popen(command)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


# ---- pairs ----------------------------------------------------------------------------------------------------------


class Lab:
    def __init__(self, server: Server, lengths: list[Lengths], vocab_size: int) -> None:
        self.server, self.lengths, self.vocab_size, self.seed = server, lengths, vocab_size, 0

    def run(self, watched: bool) -> float:
        self.seed += 1  # other prompts, so that no prefix is cached
        prompts = random_prompts(self.lengths, self.vocab_size, self.seed)
        watchers = Watchers(self.server.url) if watched else None
        time.sleep(SETTLE_S)
        try:
            return asyncio.run(one_run(self.server.url, self.lengths, prompts))
        finally:
            if watchers is not None:
                watchers.stop()
                time.sleep(LINGER_S + 1.0)

    def pair(self, number: int) -> tuple[float, float]:
        """Tokens per second without and with."""
        order = (False, True) if number % 2 == 0 else (True, False)
        found = {watched: self.run(watched) for watched in order}
        return found[False], found[True]


def measure(args: argparse.Namespace, more: list[str]) -> dict[str, object]:
    shape = Path(args.config) if args.config and Path(args.config).is_dir() else None
    model = args.model or str(shape or pick(SHAPES, args.config, "model shape"))
    dummy = [] if args.model else ["--load-format", "dummy"]
    lengths = find_lengths(args.workload)
    server = Server(model, *dummy, "--log-level", "warning", *more)
    try:
        lab = Lab(server, lengths, args.vocab_size)
        for _ in range(args.warm):
            lab.run(watched=False)
        pairs = []
        for number in range(args.runs):
            without, watched = lab.pair(number)
            pairs.append((without, watched))
            print(f"{without:>10,.1f} tok/s without, {watched:>10,.1f} with: {watched / without:.4f}", flush=True)
    finally:
        server.close()
    ratios = [watched / without for without, watched in pairs]
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return {
        "workload": args.workload, "model": Path(model).name, "pairs": pairs, "median_ratio": statistics.median(ratios),
        "ratio_of_medians": medians[1] / medians[0], "without_tok_s": medians[0], "with_tok_s": medians[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="cpu64")
    parser.add_argument("--config", default="smollm2-135m", help=f"shape: one of {', '.join(sorted(SHAPES))}, or a DIR")
    parser.add_argument("--model", help="a model instead, with its weights")
    parser.add_argument("--runs", type=int, default=6, help="pairs (default: 6)")
    parser.add_argument("--warm", type=int, default=1, help="runs before the first pair (default: 1)")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="token ids are below this (default: 30000)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    own, more = sys.argv[1:], []
    if "--" in own:  # what follows goes to shoal serve
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    if args.watch:
        asyncio.run(watch_all(args.watch))
        return
    found = measure(args, more)
    print(
        f"{found['workload']}, {found['model']}: {found['with_tok_s']:,.1f} tok/s with {WATCHERS} watchers, "
        f"{found['without_tok_s']:,.1f} without; ratio of the medians {found['ratio_of_medians']:.4f}, median of the "
        f"ratios {found['median_ratio']:.4f}"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
