"""What do two watchers of /live cost? Output tokens a second of a server, with and without them, in turns.

    python benchmarks/live_watchers.py                                                  # cpu64, SmolLM2-135M's shape
    python benchmarks/live_watchers.py --workload nano256 --config qwen3-0.6b --runs 8 \\
        -- --dtype bfloat16 --device cuda --max-num-seqs 256 --max-num-batched-tokens 8192
    python benchmarks/live_watchers.py --json out.json --model DIR -- --threads 2
    python benchmarks/live_watchers.py --windows 10 --streams 32                        # on a noisy machine

A real `shoal serve` with random weights in a shape (or of a model); what follows -- goes to it. All requests of the
workload are sent at once and streamed; a run ends with the last answer. Runs with and without watchers alternate, and
every other pair begins with the watchers, so that a machine that grows slower favours neither. The watchers read every
line, in a process of their own, and have read the past before a run begins; a run without them begins when the server
has stopped making summaries. Prints each pair's ratio, their median, and the CPU seconds that the engine and the front
took for a run, which say more than times where other programs run. Where the machine's own speed changes from run to
run, --windows compares windows of some seconds while so many streams decode all the time: each one with watchers with
the geometric mean of its two neighbours without. Needs no packages beyond the server's.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from restart_bf16 import Server

from shoal.cli.common import SHAPES
from shoal.core.names import pick
from shoal.server.live import LINGER_S
from shoal.workload.lengths import Lengths, random_prompts
from shoal.workload.named import find_lengths

WATCHERS = 2
SETTLE_S = 2.0
TOKENS = "shoal_output_tokens_total"
MOST_OUTPUT, BEGUN = 7000, 8  # tokens of each stream, where windows are compared; and before the first one
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
    """Read summaries until stopped; prints a line when the first ones have come."""
    host = urlsplit(url).netloc
    reader, writer = await asyncio.open_connection(*host.rsplit(":", 1), limit=2**24)
    writer.write(HEAD.format(what="GET /live/events", host=host, size=0).encode())
    await reader.readuntil(b"shoal_live")
    print("watching", flush=True)
    while await reader.read(2**16):
        pass


async def watch_all(url: str) -> None:
    await asyncio.gather(*(watch(url) for _ in range(WATCHERS)))


class Watchers:
    """In a process of their own."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, __file__, "--watch", url]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        for _ in range(WATCHERS):
            assert self.process.stdout.readline(), "a watcher was refused"

    def stop(self) -> None:
        """Returns when the server has stopped making summaries, too."""
        self.process.terminate()
        self.process.wait()
        time.sleep(LINGER_S + 1.0)


# ---- windows --------------------------------------------------------------------------------------------------------


def rate_of_window(server: Server, seconds: float, watched: bool) -> float:
    watchers = Watchers(server.url) if watched else None
    try:
        time.sleep(SETTLE_S)
        before, begun_s = server.counter(TOKENS), time.perf_counter()
        time.sleep(seconds)
        return (server.counter(TOKENS) - before) / (time.perf_counter() - begun_s)
    finally:
        if watchers is not None:
            watchers.stop()


def measure_windows(args: argparse.Namespace, server: Server) -> list[float]:
    """The ratio of each window with watchers to those beside it."""
    prompts = random_prompts([Lengths(100, MOST_OUTPUT)] * args.streams, args.vocab_size, 1)
    load = threading.Thread(target=lambda: asyncio.run(all_streams(server.url, prompts)), name="streams", daemon=True)
    load.start()
    while server.counter(TOKENS) < BEGUN * args.streams and load.is_alive():
        time.sleep(0.1)
    rates, ratios = [rate_of_window(server, args.seconds, False)], list[float]()
    for _ in range(args.windows):
        rates += [rate_of_window(server, args.seconds, watched) for watched in (True, False)]
        if not load.is_alive():
            raise SystemExit("the streams ended before the last window; ask for fewer --windows or shorter ones")
        ratios.append(rates[-2] / (rates[-3] * rates[-1]) ** 0.5)  # no side gains by noise, which multiplies rates
        print(f"without {rates[-3]:>9,.1f} tok/s   with {rates[-2]:>9,.1f} tok/s   {ratios[-1]:.4f}", flush=True)
    return ratios


async def all_streams(url: str, prompts: list[list[int]]) -> None:
    fixed = {"max_tokens": MOST_OUTPUT, "ignore_eos": True, "temperature": 0.0, "stream": True}
    bodies = [json.dumps({"prompt": prompt, **fixed}).encode() for prompt in prompts]
    await asyncio.gather(*(whole(url, "POST /v1/completions", body) for body in bodies))


# ---- pairs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one run took."""

    tok_s: float
    engine_cpu_s: float
    front_cpu_s: float

    def in_words(self) -> str:
        return f"{self.tok_s:>9,.1f} tok/s (CPU s: engine {self.engine_cpu_s:.2f}, front {self.front_cpu_s:.2f})"


def cpu_seconds(root: int) -> Counter[str]:
    """Of this process's descendants, by their names."""
    parents: dict[int, int] = {}
    took: dict[int, tuple[str, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        parents[int(entry.name)] = int(fields[1])
        took[int(entry.name)] = (name, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    found: Counter[str] = Counter()
    for process, (name, seconds) in took.items():
        above = process
        while above in parents and above != root:
            above = parents[above]
        if above == root:
            found[name] += seconds  # type: ignore[assignment]
    return found


class Lab:
    def __init__(self, server: Server, lengths: list[Lengths], vocab_size: int) -> None:
        self.server, self.lengths, self.vocab_size, self.seed = server, lengths, vocab_size, 0

    def run(self, watched: bool) -> Run:
        self.seed += 1  # other prompts, so that no prefix is cached
        prompts = random_prompts(self.lengths, self.vocab_size, self.seed)
        watchers = Watchers(self.server.url) if watched else None
        time.sleep(SETTLE_S)
        before = cpu_seconds(self.server.process.pid)
        try:
            tok_s = asyncio.run(one_run(self.server.url, self.lengths, prompts))
            after = cpu_seconds(self.server.process.pid)
            return Run(tok_s, *(after[name] - before[name] for name in ("shoal-engine", "shoal-front")))
        finally:
            if watchers is not None:
                watchers.stop()

    def pair(self, number: int) -> tuple[Run, Run]:
        """Without and with."""
        order = (False, True) if number % 2 == 0 else (True, False)
        found = {watched: self.run(watched) for watched in order}
        return found[False], found[True]


def model_of(args: argparse.Namespace) -> str:
    shape = Path(args.config) if args.config and Path(args.config).is_dir() else None
    return args.model or str(shape or pick(SHAPES, args.config, "model shape"))


def started(args: argparse.Namespace, more: list[str]) -> Server:
    dummy = [] if args.model else ["--load-format", "dummy"]
    return Server(model_of(args), *dummy, "--log-level", "warning", *more)


def compare_windows(args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    server = started(args, more)
    try:
        ratios = measure_windows(args, server)
    finally:
        server.close()
    return {
        "model": Path(model_of(args)).name, "streams": args.streams, "seconds": args.seconds, "ratios": ratios,
        "median_ratio": statistics.median(ratios), "mean_ratio": statistics.fmean(ratios),
        "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
    }  # fmt: skip


def measure(args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    lengths = find_lengths(args.workload)
    server = started(args, more)
    try:
        lab = Lab(server, lengths, args.vocab_size)
        for _ in range(args.warm):
            lab.run(watched=False)
        pairs = []
        for number in range(args.runs):
            without, watched = lab.pair(number)
            pairs.append((without, watched))
            ratio = watched.tok_s / without.tok_s
            print(f"without {without.in_words()}   with {watched.in_words()}   {ratio:.4f}", flush=True)
    finally:
        server.close()
    ratios = [watched.tok_s / without.tok_s for without, watched in pairs]
    without, watched = (
        Run(*(statistics.median(values) for values in zip(*map(astuple, side), strict=True)))
        for side in zip(*pairs, strict=True)
    )
    return {
        "workload": args.workload, "model": Path(model_of(args)).name,
        "pairs": [[asdict(one) for one in pair] for pair in pairs],
        "median_ratio": statistics.median(ratios), "ratio_of_medians": watched.tok_s / without.tok_s,
        "without": asdict(without), "with": asdict(watched),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="cpu64")
    parser.add_argument("--config", default="smollm2-135m", help=f"shape: one of {', '.join(sorted(SHAPES))}, or a DIR")
    parser.add_argument("--model", help="a model instead, with its weights")
    parser.add_argument("--runs", type=int, default=6, help="pairs (default: 6)")
    parser.add_argument("--warm", type=int, default=1, help="runs before the first pair (default: 1)")
    parser.add_argument("--windows", type=int, default=0, help="compare so many windows instead of runs")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each window (default: 7)")
    parser.add_argument("--streams", type=int, default=32, help="that decode meanwhile (default: 32)")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    if args.windows:
        found = compare_windows(args, more)
        error = f" (standard error {found['standard_error']:.4f})" if found["standard_error"] else ""
        print(
            f"{found['streams']} streams, {found['model']}: median of the ratios {found['median_ratio']:.4f}, mean "
            f"{found['mean_ratio']:.4f}{error}, with {WATCHERS} watchers over without"
        )
    else:
        found = measure(args, more)
        for name in ("without", "with"):
            print(f"{name:<8} median {Run(**found[name]).in_words()}")
        print(
            f"{found['workload']}, {found['model']}: ratio of the medians {found['ratio_of_medians']:.4f}, median of "
            f"the ratios {found['median_ratio']:.4f}, with {WATCHERS} watchers over without"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
