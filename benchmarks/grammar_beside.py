"""Do requests without a grammar slow down beside requests with one?

    python benchmarks/grammar_beside.py --requests 8 --tokens 64 --rounds 3 [--json out.json]

The default model. The same measured requests run alone, beside as many other plain requests, and beside as many that
follow a JSON schema; the three cases alternate. Prints the time between two tokens of the measured requests while all
are running, and the ratio of the third case to the second. "masks" is the host's time per pass for computing masks,
which overlaps with the device; "device busy" is the share of the time in which the device computes, and falls where it
waits for masks.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from shoal.bench.cpu_noise import NoiseWatch, banner, noise_figures
from shoal.build import Built, build, need_tokenizer
from shoal.config.engine import EngineConfig
from shoal.core.job import GrammarSpec
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.text.grammar import Grammars

SCHEMA = {  # long enough that no request ends before max_tokens
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "colours"],
        "additionalProperties": False,
    },
}
WAYS = ("alone", "beside plain", "beside grammar")


class Bench:
    """One engine, and the three cases."""

    def __init__(self, built: Built, requests: int, tokens: int) -> None:
        self.loop = built.loop
        self.requests = requests
        self.params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True).resolved({})
        tokenizer = need_tokenizer(built)
        self.grammars = Grammars(tokenizer, built.spec.vocab_size, sorted(built.eos))
        self.spec = GrammarSpec("json", json.dumps(SCHEMA))
        self.grammars.check(self.spec)
        self.prompt = tokenizer.chat([{"role": "user", "content": "List some people as JSON."}])
        self.masks_s = 0.0
        self._masks = self.loop.scheduler.masks
        self.loop.scheduler.masks = self._timed  # type: ignore[method-assign]

    def _timed(self):  # type: ignore[no-untyped-def]
        begun_s = time.perf_counter()
        masks = self._masks()
        self.masks_s += time.perf_counter() - begun_s
        return masks

    def run(self, way: str) -> list[tuple[float, float, float]]:
        """(seconds since the previous pass, device busy, masks) of each pass that has all requests."""
        measured = [Request(f"measured {n}", self.prompt, self.params, seed=n) for n in range(self.requests)]
        others = [Request(f"other {n}", self.prompt, self.params, seed=1000 + n) for n in range(self.requests)]
        if way == "beside grammar":
            for request in others:
                request.grammar = self.grammars.make(self.spec)
        requests = measured if way == "alone" else measured + others
        for request in requests:
            self.loop.submit(request)
        passes: list[tuple[float, float, float]] = []
        last_s: float | None = None
        while not self.loop.idle:
            before_s = self.masks_s
            events = self.loop.step()
            whole = len(events.owners) == len(requests)  # else some have not started, or have ended
            if whole and last_s is not None:
                passes.append((events.committed_s - last_s, events.busy_s, self.masks_s - before_s))
            last_s = events.committed_s if whole else None
        return passes


def figures(way: str, requests: int, passes: list[tuple[float, float, float]]) -> dict[str, Any]:
    gaps, busy, masks = ([1000 * one[column] for one in passes] for column in range(3))
    cuts = statistics.quantiles(gaps, n=100)
    return {
        "way": way,
        "requests": requests * (1 if way == "alone" else 2),
        "passes": len(passes),
        "mean_ms": statistics.fmean(gaps),
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
        "masks_ms": statistics.fmean(masks),
        "busy_share": sum(busy) / sum(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8, help="measured requests, and as many beside them")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    config = EngineConfig.from_mapping({"max_num_seqs": 2 * args.requests, "prefix_caching": False})
    bench = Bench(build(config), args.requests, args.tokens)
    bench.run("beside grammar")  # warm-up: loads and compiles everything
    watch = NoiseWatch()
    passes: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            passes[way] += bench.run(way)
    noise = watch.noise()
    bench.loop.close()
    if headline := banner([noise]):
        print(headline)
    rows = [figures(way, args.requests, passes[way]) for way in WAYS]
    for row in rows:
        print(
            f"{row['way']:<16}{row['requests']:>4} requests   mean {row['mean_ms']:7.1f} ms   "
            f"p50 {row['p50_ms']:7.1f} ms   p99 {row['p99_ms']:7.1f} ms   "
            f"masks {row['masks_ms']:5.1f} ms   device busy {row['busy_share']:.1%}"
        )
    ratio = {key.removesuffix("_ms"): rows[2][key] / rows[1][key] for key in ("mean_ms", "p50_ms", "p99_ms")}
    print("grammar / plain beside:  " + "   ".join(f"{name} {value:.3f}" for name, value in ratio.items()))
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "ratio": ratio, **noise_figures(noise)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
