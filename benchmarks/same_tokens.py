"""Do the tokens of a request depend on anything but the request? With --batch-invariant they must not.

    python benchmarks/same_tokens.py MODEL --tight 4GiB -- --load-format dummy --dtype bfloat16 --batch-invariant

Greedy requests to a real `shoal serve` of the model; what follows -- goes to it. Each is asked alone first, and then
all of them at once, beside others, with the engine killed by SIGKILL half-way, in chunks of 64 and of 2,048 tokens,
and with so little KV memory (--tight) that some are preempted. Prints how many of them have the same tokens as alone,
and exits with 1 if one has not. The server's --seed is fixed, so that random weights are the same in every engine.
Needs no packages beyond the server's.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from restart_bf16 import Server, listen, wait

CHUNKS = {"in chunks of 64": ("--chunk-tokens", "64"), "in chunks of 2,048": ("--chunk-tokens", "2048")}


class Asked:
    """The requests, and what they must answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        source = random.Random(1)
        self.prompts, self.others = (
            [[source.randrange(args.vocab_size) for _ in range(source.randint(1, args.prompt))] for _ in range(count)]
            for count in (args.requests, args.others)
        )
        self.alone: list[list[int]] = []
        self.differing = 0

    def body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        return {"prompt": prompt, "max_tokens": tokens, **fixed}

    def ask_alone(self, url: str) -> None:
        self.alone = [[] for _ in self.prompts]
        for prompt, found in zip(self.prompts, self.alone, strict=True):
            listen(url, self.body(prompt, self.args.tokens), found)

    def together(self, server: Server, how: str, others: int = 0, kill: bool = False) -> None:
        """All at once, beside so many others; the engine is killed when half of the tokens have come."""
        found: list[list[int]] = [[] for _ in self.prompts]
        asked = [(self.body(prompt, self.args.tokens), into) for prompt, into in zip(self.prompts, found, strict=True)]
        asked += [(self.body(prompt, 2 * self.args.tokens), []) for prompt in self.others[:others]]
        random.Random(2).shuffle(asked)
        threads = [threading.Thread(target=listen, args=(server.url, body, into)) for body, into in asked]
        begun_s, preempted = time.monotonic(), server.counter("shoal_preemptions_total")
        for thread in threads:
            thread.start()
        if kill:
            wait(lambda: sum(map(len, found)) >= len(found) * self.args.tokens / 2, "half of all tokens")
            os.kill(server.engine(), signal.SIGKILL)
        for thread in threads:
            thread.join()
        same = sum(one == wanted for one, wanted in zip(found, self.alone, strict=True))
        self.differing += len(found) - same
        more = server.counter("shoal_preemptions_total") - preempted
        self.tell(how, same, time.monotonic() - begun_s, f"{more:.0f} preempted" if more > 0 else "")

    def tell(self, how: str, same: int, seconds: float, note: str = "") -> None:
        print(f"{how:<34} {same:>4} of {len(self.prompts)} the same   {seconds:6.1f} s   {note}", flush=True)


@contextmanager
def served(args: argparse.Namespace, *flags: str) -> Iterator[Server]:
    server = Server(args.model, "--no-prefix-caching", "--seed", "0", "--log-level", "error", *flags)
    try:
        yield server
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, .gguf file or hub name")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--prompt", type=int, default=3000, help="tokens of the longest prompt")
    parser.add_argument("--others", type=int, default=200, help="requests beside them")
    parser.add_argument("--tight", default="4GiB", help="KV memory in which not all of them fit (default: 4GiB)")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="token ids are below this (default: 30000)")
    parser.add_argument("--json", metavar="FILE", help="write the tokens of the requests alone there")
    own, more = sys.argv[1:], list[str]()
    if "--" in own:  # what follows goes to shoal serve
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    asked = Asked(args)
    with served(args, *more) as server:
        begun_s = time.monotonic()
        asked.ask_alone(server.url)
        asked.tell("alone, one after the other", len(asked.alone), time.monotonic() - begun_s)
        asked.together(server, "all at once")
        asked.together(server, f"beside {args.others} others", others=args.others)
        asked.together(server, "after a kill", kill=True)
    for how, flags in CHUNKS.items():
        with served(args, *more, *flags) as server:
            asked.together(server, f"{how}, beside {args.others}", others=args.others)
    with served(args, *more, "--kv-memory", args.tight) as server:
        asked.together(server, f"in {args.tight} of KV memory")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(asked.alone, file)
    return 1 if asked.differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
