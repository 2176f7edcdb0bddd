"""What does a restarted engine change in bf16?

    python benchmarks/restart_bf16.py --streams 16 --tokens 96 --rounds 3 [--json out.json]

The default model behind a real `shoal serve`. Half of the streams are greedy, half seeded. The same streams run once to
warm up and once for reference; then, in each round, once undisturbed (the control) and once with the engine killed by
SIGKILL when half of all tokens have arrived. Both are compared with the reference, token by token: a stream has changed
if any of its tokens differs, and a token has changed if it differs from the reference's at the same index. A restarted
engine computes the positions so far as one prompt, in passes of another shape, and bf16 rounds differently there; where
two tokens are nearly equally likely, the other one may win, and the texts diverge from there on. `--dtype float32` must
print zeros.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOPICS = (
    "the sea", "a small town", "bread", "the moon", "an old clock", "winter", "a long walk", "the first day of school",
    "a letter", "trains", "the garden", "a lost key", "music", "a storm", "the market", "birds", "a mountain hut",
    "the library", "a broken cup", "summer rain", "a bridge", "the night shift", "apples", "a photograph",
)  # fmt: skip
READY_S, RESTART_S = 120.0, 120.0


class Server:
    """A `shoal serve` with these arguments."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "shoal", "serve", "--port", "0", "--json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended with code {self.process.wait()}")
        self.url = json.loads(line)["url"]

    def engine(self) -> int:
        """The process id of its engine; 0 if there is none."""
        for entry in Path("/proc").iterdir():
            try:
                name, _, rest = (entry / "stat").read_text().rpartition(")")
                if int(rest.split()[1]) == self.process.pid and name.endswith("(shoal-engine"):
                    return int(entry.name)
            except (OSError, ValueError, IndexError):
                continue
        return 0

    def restarts(self) -> float:
        """The restarts in its metrics; -1 while it is down."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                return self.counter("shoal_engine_restarts_total")
        except OSError:
            return -1.0

    def counter(self, name: str) -> float:
        """The sum of a counter in its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@dataclass
class Run:
    """All streams once."""

    outputs: list[list[int]]
    at_kill: list[int] = field(default_factory=list)  # output tokens of each stream when the engine was killed


def body_of(number: int, tokens: int) -> dict[str, Any]:
    how: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    prompt = f"Write a story about {TOPICS[number % len(TOPICS)]}, number {number}.\n\n"
    fixed = {"ignore_eos": True, "stream": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": tokens, **fixed, **how}


def listen(url: str, body: dict[str, Any], output: list[int]) -> None:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                for choice in event["choices"]:
                    output += choice.get("token_ids") or []


def run(server: Server, streams: int, tokens: int, kill: bool = False) -> Run:
    done = Run([[] for _ in range(streams)])
    threads = [
        threading.Thread(target=listen, args=(server.url, body_of(number, tokens), done.outputs[number]))
        for number in range(streams)
    ]
    for thread in threads:
        thread.start()
    if kill:
        wait(lambda: sum(map(len, done.outputs)) >= streams * tokens / 2, "half of all tokens")
        before = server.restarts()
        done.at_kill = [len(output) for output in done.outputs]
        os.kill(server.engine(), signal.SIGKILL)
        wait(lambda: server.restarts() == before + 1, "the next engine")
    for thread in threads:
        thread.join()
    short = [number for number, output in enumerate(done.outputs) if len(output) != tokens]
    if short:
        raise SystemExit(f"streams {short} do not have {tokens} tokens: some were lost")
    return done


def wait(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + RESTART_S
    while not holds():
        if time.monotonic() > end_s:
            raise SystemExit(f"timed out after {RESTART_S:g} s waiting for {what}")
        time.sleep(0.01)


def compare(reference: Run, other: Run) -> dict[str, Any]:
    """Counts, and the index of the first difference in each changed stream."""
    pairs = list(zip(reference.outputs, other.outputs, strict=True))
    differ = [[index for index, (a, b) in enumerate(zip(*pair, strict=True)) if a != b] for pair in pairs]
    return {
        "streams": len(pairs),
        "streams_changed": sum(bool(indexes) for indexes in differ),
        "tokens": sum(len(output) for output, _ in pairs),
        "tokens_changed": sum(map(len, differ)),
        "first_changed": [indexes[0] for indexes in differ if indexes],
        "tokens_at_kill": other.at_kill,
    }


def summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name in parts[0]:
        whole[name] = sum((part[name] for part in parts), start=type(parts[0][name])())
    whole["share_of_streams"] = whole["streams_changed"] / whole["streams"]
    whole["share_of_tokens"] = whole["tokens_changed"] / whole["tokens"]
    return whole


def line_of(name: str, of: dict[str, Any]) -> str:
    first = of["first_changed"]
    where = f"; first at {min(first)}, median {statistics.median(first):g}" if first else ""
    return (
        f"{name:<12} {of['streams_changed']}/{of['streams']} streams changed ({of['share_of_streams']:.1%}), "
        f"{of['tokens_changed']}/{of['tokens']} tokens ({of['share_of_tokens']:.1%}){where}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="each with a control and a kill")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("flags", nargs="*", help="further flags for shoal serve, after --")
    args = parser.parse_args()
    flags = ["--dtype", args.dtype, "--max-num-seqs", str(args.streams), "--log-level", "warning", *args.flags]
    server = Server(*flags)
    parts: dict[str, list[dict[str, Any]]] = {"undisturbed": [], "killed": []}
    try:
        run(server, args.streams, args.tokens)
        reference = run(server, args.streams, args.tokens)
        for _ in range(args.rounds):
            for name, found in parts.items():
                found.append(compare(reference, run(server, args.streams, args.tokens, kill=name == "killed")))
                print(line_of(name, summed(found[-1:])), flush=True)
    finally:
        server.close()
    whole = {name: summed(found) for name, found in parts.items()}
    print(f"\n{args.dtype}, {args.rounds} rounds of {args.streams} streams with {args.tokens} tokens each:")
    for name, of in whole.items():
        print(line_of(name, of))
    if args.json:
        Path(args.json).write_text(json.dumps({"args": vars(args), "rounds": parts, **whole}, indent=1))


if __name__ == "__main__":
    main()
