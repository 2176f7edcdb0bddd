"""What do tool calls cost beside the same number of tokens without tools?

    python benchmarks/tool_cost.py [MODEL] --requests 100 --at-once 8 --rounds 3 [--json out.json] [-- --threads 2]

A real `shoal serve`; what follows -- goes to it. A first run sends each chat with tools, and notes the tokens of its
prompt and how many it generated. Then runs alternate: with tools (the template, the grammar, the parser) and without
(the same prompt as token ids, as many tokens). Prints the median and the 99th percentile of the requests' times in
both, and their ratios. The tools are of --schemas different kinds, so that grammars are compiled and dropped as they
are where many programs share a server; --tools of them go with each request.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from restart_bf16 import Server
from tqdm import tqdm

from shoal.bench.cpu_noise import NoiseWatch, banner, noise_figures

Json = dict[str, Any]
WAYS = ("tools", "plain")
WORD, SMALL = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 999}
FIELDS: list[Json] = [  # texts and lists have limits, so that a call ends
    {"enum": ["celsius", "fahrenheit"]},
    WORD,
    SMALL,
    {"type": "boolean"},
    {"type": "array", "items": WORD, "maxItems": 3},
    {"type": "object", "properties": {"name": WORD, "age": SMALL}, "required": ["name", "age"]},
    {"anyOf": [SMALL, {"type": "null"}]},
    {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"id": SMALL}, "required": ["id"]}},
]


def tool(number: int) -> Json:
    """Two to four fields each, no two tools alike."""
    count = 2 + number % 3
    fields = {f"field_{number}_{place}": FIELDS[(number + 3 * place) % len(FIELDS)] for place in range(count)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": f"Does number {number}.", "parameters": schema},
    }


class Asked:
    """One request, in both ways."""

    def __init__(self, number: int, schemas: int, tools: int, most: int) -> None:
        self.common: Json = {"seed": number, "temperature": 1.0, "max_tokens": most}
        self.chat = {
            "messages": [{"role": "user", "content": f"Call a tool for customer {number}."}],
            "tools": [tool((number + place) % schemas) for place in range(tools)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        self.prompt: list[int] = []
        self.tokens = 0

    def body(self, way: str) -> tuple[str, Json]:
        if way == "tools":
            return "/v1/chat/completions", self.common | self.chat
        own = {"prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True}
        return "/v1/completions", self.common | own

    def note(self, url: str) -> None:
        path, body = self.body("tools")
        told = send(url + path, {**body, "return_token_ids": True})
        assert told["choices"][0]["message"]["tool_calls"], told
        self.prompt, self.tokens = told["prompt_token_ids"], told["usage"]["completion_tokens"]

    def time(self, url: str, way: str) -> float:
        path, body = self.body(way)
        begun_s = time.perf_counter()
        told = send(url + path, body)
        taken_s = time.perf_counter() - begun_s
        assert told["usage"]["completion_tokens"] == self.tokens, "the same seed gives the same tokens"
        return taken_s


def send(url: str, body: Json) -> Json:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        told: Json = json.load(answer)
    return told


def figures(taken_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(taken_s, n=100, method="inclusive")
    return {"p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98], "mean_ms": 1000 * statistics.fmean(taken_s)}


def measure(url: str, asked: list[Asked], at_once: int, rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    requests = len(asked) * (1 + len(WAYS) * rounds)
    with ThreadPoolExecutor(at_once) as threads, tqdm(total=requests, unit="request", disable=None) as bar:
        for _ in threads.map(lambda one: one.note(url), asked):
            bar.update()
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                for taken_s in threads.map(lambda one, way=way: one.time(url, way), asked):
                    taken[way].append(taken_s)
                    bar.update()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the default model")
    parser.add_argument("--requests", type=int, default=100, help="in each run")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--schemas", type=int, default=50, help="different tools")
    parser.add_argument("--tools", type=int, default=3, help="tools with each request")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--json", metavar="OUT")
    border = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:border]), sys.argv[border + 1 :]
    asked = [Asked(number, args.schemas, args.tools, args.max_tokens) for number in range(args.requests)]
    server = Server(*([args.model] if args.model else []), "--no-prefix-caching", "--log-level", "warning", *flags)
    watch = NoiseWatch()
    try:
        taken = measure(server.url, asked, args.at_once, args.rounds)
    finally:
        server.close()
    noise = watch.noise()
    if headline := banner([noise]):
        print(headline)
    rows = {way: figures(taken[way]) for way in WAYS}
    tokens = statistics.fmean(one.tokens for one in asked)
    prompts = statistics.fmean(len(one.prompt) for one in asked)
    print(
        f"{len(asked)} requests, {args.at_once} at once; on average {prompts:.0f} prompt tokens, {tokens:.0f} generated"
    )
    for way, row in rows.items():
        print(f"{way:<8}" + "   ".join(f"{name.removesuffix('_ms')} {value:8.1f} ms" for name, value in row.items()))
    ratio = {name.removesuffix("_ms"): rows["tools"][name] / rows["plain"][name] for name in rows["plain"]}
    print("tools / plain:  " + "   ".join(f"{name} {value:.3f}" for name, value in ratio.items()))
    if args.json:
        kept = {"rows": rows, "ratio": ratio, "tokens": tokens, "prompt_tokens": prompts, **noise_figures(noise)}
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
