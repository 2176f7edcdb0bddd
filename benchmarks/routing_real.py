"""The workload of benchmarks/routing.py on real engines: four processes of a small model with random weights.

    python -m benchmarks.routing_real [--requests 400] [--streams 16] [--policies round-robin prefix]

Eight prefixes of 2,000 tokens over `shoal serve --replicas 4`; the KV cache of each engine holds three of them beside
its running requests. So many streams run at once, each with the next request as soon as the last one has ended. Prints
the prompt tokens that were computed, TTFT and requests per second of each policy. Needs nothing beyond the server's
packages.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))  # for its neighbours, with -m, too

from restart_bf16 import Server
from restart_under_load import HEADERS, chunks

from shoal.bench.sse import Events

ENGINES, PREFIXES, PREFIX_TOKENS, BLOCK, SLOTS, CACHED = 4, 8, 2000, 16, 16, 3
SUFFIX, OUTPUT = (16, 96), (16, 96)  # tokens, at random between
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def flags(folder: Path, policy: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    own = SLOTS * -(-(SUFFIX[1] + OUTPUT[1] + BLOCK) // BLOCK)  # blocks that running requests do not share
    block_bytes = 2 * BLOCK * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]  # type: ignore[operator]
    memory = ENGINES * (CACHED * PREFIX_TOKENS // BLOCK + own) * block_bytes
    return [
        *(str(folder), "--load-format", "dummy", "--dtype", "float32", "--kv-memory", f"{memory}B"),
        *("--max-num-seqs", str(SLOTS), "--max-model-len", "2400", "--replicas", str(ENGINES), "--routing", policy),
        *("--log-level", "warning"),
    ]


async def ask(url: str, prompt: list[int], tokens: int) -> float:
    """The time to its first token."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    ).encode()
    host = urlsplit(url).netloc
    begun_s, first_s = time.monotonic(), 0.0
    reader, writer = await asyncio.open_connection(*host.rsplit(":", 1))
    writer.write(HEADERS.format(host=host, size=len(body)).encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    assert head.split()[1] == "200", head + (await reader.read()).decode()
    events = Events()
    async for part in chunks(reader):
        if events.feed(part) and not first_s:
            first_s = time.monotonic() - begun_s
    writer.close()
    return first_s


async def load(url: str, count: int, streams: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(5, 500) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    requests = [
        (
            prefixes[chance.randrange(PREFIXES)] + [chance.randrange(5, 500) for _ in range(chance.randint(*SUFFIX))],
            chance.randint(*OUTPUT),
        )
        for _ in range(count)
    ]
    waits: list[float] = []

    async def one_after_the_other() -> None:
        while requests:
            waits.append(await ask(url, *requests.pop()))

    await asyncio.gather(*(one_after_the_other() for _ in range(streams)))
    return sorted(waits)


def computed_tokens(url: str) -> float:
    """Prompt tokens that were not found in a prefix cache."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    return total("shoal_prompt_tokens_total") - total("shoal_prefix_hit_tokens_total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=16, help="at once (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", default=["round-robin", "least-load", "prefix"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'':<14} {'prompt tokens':>16} {'TTFT p50':>9} {'TTFT p99':>9} {'req/s':>8}")
    for policy in args.policies:
        with tempfile.TemporaryDirectory() as folder:
            server = Server(*flags(Path(folder), policy))
            try:
                begun_s = time.monotonic()
                waits = asyncio.run(load(server.url, args.requests, args.streams, args.seed))
                seconds = time.monotonic() - begun_s
                computed = computed_tokens(server.url)
            finally:
                server.close()
        p50, p99 = waits[len(waits) // 2], waits[int(0.99 * len(waits))]
        print(f"{policy:<14} {computed:>16,.0f} {p50:>9.3f} {p99:>9.3f} {len(waits) / seconds:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
