"""Disaggregated prefill beside chunked prefill on the same hardware: two mixed engines, or one for each role.

    python benchmarks/disaggregation.py [--rates 1 2] [--prompt 1000] [--output 64] [--requests 60]

The same requests at the same random times, to `shoal serve --replicas 2` and to `shoal serve --prefill disaggregated`,
in turns. Prints the time to the first token, the gaps between tokens (of all streams together, and the mean of each
stream's largest one) and the tokens per second of each. On CPUs each engine has half of the cores.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from restart_bf16 import Server
from restart_under_load import HEADERS, chunks
from routing_real import SHAPE

from shoal.bench.sse import Events

SETTINGS = {
    "2 mixed, chunked": ("--replicas", "2"),
    "1 prefill, 1 decode": ("--prefill", "disaggregated"),
}


@dataclass
class Answer:
    """One request, as its client saw it."""

    asked_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


async def ask(url: str, prompt: list[int], tokens: int, at_s: float, begun_s: float) -> Answer:
    await asyncio.sleep(max(0.0, begun_s + at_s - time.monotonic()))
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    host = urlsplit(url).netloc
    answer = Answer(time.monotonic())
    reader, writer = await asyncio.open_connection(*host.rsplit(":", 1))
    writer.write(HEADERS.format(host=host, size=len(body)).encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    assert head.split()[1] == "200", head + (await reader.read()).decode()
    events = Events()
    async for part in chunks(reader):
        now_s, came = time.monotonic(), [json.loads(one) for one in events.feed(part) if one.startswith(b"{")]
        # prompts of token ids are answered with token ids; an event without any tells of the prompt, or of the end
        answer.token_s += [now_s] * sum(len(choice.get("token_ids", ())) for one in came for choice in one["choices"])
    writer.close()
    return answer


async def load(url: str, args: argparse.Namespace, rate: float) -> tuple[list[Answer], float]:
    chance = random.Random(args.seed)
    begun_s, at_s, asked = time.monotonic(), 0.0, []
    for _ in range(args.requests):
        at_s += chance.expovariate(rate)
        prompt = [chance.randrange(5, 500) for _ in range(chance.randint(args.prompt // 2, args.prompt * 3 // 2))]
        tokens = chance.randint(args.output // 2, args.output * 3 // 2)
        asked.append(asyncio.create_task(ask(url, prompt, tokens, at_s, begun_s)))
    answers = await asyncio.gather(*asked)
    return answers, time.monotonic() - begun_s


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def row(answers: list[Answer], seconds: float) -> str:
    first = [one.token_s[0] - one.asked_s for one in answers]
    gaps = [gap for one in answers for gap in one.gaps]
    worst = sum(max(one.gaps) for one in answers) / len(answers)
    tokens = sum(len(one.token_s) for one in answers)
    figures = (share(first, 0.5), share(first, 0.95), share(gaps, 0.5), share(gaps, 0.99), worst)
    return " ".join(f"{1e3 * one:>9.0f}" for one in figures) + f" {tokens / seconds:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0], help="requests per second")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens, on average")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: a small one with random weights")
    parser.add_argument("more", nargs="*", help="further flags of shoal serve, after --")
    args = parser.parse_args()
    print(
        f"{'':<28} {'TTFT p50':>9} {'p95':>9} {'gap p50':>9} {'p99':>9} {'largest':>9} {'tokens/s':>9}   (times in ms)"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        model = [args.model] if args.model else [folder, "--load-format", "dummy", "--dtype", "float32"]
        for rate in args.rates:
            for name, flags in SETTINGS.items():
                server = Server(*model, *flags, "--max-num-seqs", "32", "--log-level", "warning", *args.more)
                try:
                    asyncio.run(load(server.url, argparse.Namespace(**{**vars(args), "requests": 4}), 4.0))  # warm
                    print(f"{rate:g}/s  {name:<22} {row(*asyncio.run(load(server.url, args, rate)))}", flush=True)
                finally:
                    server.close()


if __name__ == "__main__":
    main()
