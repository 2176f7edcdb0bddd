"""A draft model on a GPU: what it gains that its tokens stay on the device, instead of coming to the host one by one.

    python benchmarks/gpu_draft_model.py [layers, such as 2 or 2,4]

Random weights in the shape of Llama-8B, bfloat16, greedy; its first layers draft for it. Four tokens are drafted for
each row and pass, and all are verified, whether that pays or not. Random weights would agree on hardly any token, so
each draft token is accepted with probability 0.7, by a coin that depends on seed and position alone: both ways accept
the same numbers of tokens. Rounds alternate. Needs a CUDA device; reads no model; takes about three minutes.

    host      tokens come to the host after each pass of the draft model, with their probability
    device    they stay on the device, and the draft model's passes are queued one after the other
    round     ms from one commit to the next: the draft model's passes, the pass that verifies, and the host
    verify    ms that the device computes the latter, and `draft` the former
    waits     what is left of the round: the device waits for the host
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_drafts import DRAFTS, Watch
from gpu_verification import LLAMA_8B, check

from shoal import build_draft
from shoal.bench.throughput import run_throughput
from shoal.build import Built, assemble, load
from shoal.config.engine import EngineConfig
from shoal.core.drafts import Draft
from shoal.core.events import PassEvents
from shoal.core.request import Request
from shoal.runner.verify import CoinToss
from shoal.sched import speculation
from shoal.workload.lengths import Lengths, random_prompts

RUNS = ((1, 384, 4), (8, 256, 3))  # requests, output tokens, rounds
ACCEPTED = 0.7
PROMPT = 96


def all_drafts(offers: Sequence[speculation.Offer], costs: object, room: int) -> Mapping[Request, Draft]:
    return {request: draft for request, draft, _ in offers}


@dataclass
class Way:
    """An engine that drafts one way, and what was measured of it."""

    built: Built
    stays: bool
    drafting_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)

    def force(self) -> None:
        """Draft in every pass, and accept by chance."""
        loop = self.built.loop
        policy: Any = loop.scheduler.policies.drafts
        policy.times.learn = lambda *passed: None  # what passes take stays unknown
        loop.executor.runner.rule = CoinToss(ACCEPTED)  # type: ignore[attr-defined]
        models, committed = policy.models, policy.models.committed

        def noting() -> None:
            if models.asked:
                self.drafting_s.append(models.spent_s)
            committed()

        models.committed = noting

    def run(self, rows: int, output: int, number: int, counts: bool) -> None:
        lengths = [Lengths(PROMPT, output)] * rows
        prompts = random_prompts(lengths, self.built.spec.vocab_size)
        watch = Watch(rows)
        drafted: set[bool] = set()

        def see(events: PassEvents) -> None:
            watch.see(events)
            drafted.update(draft.on_device for flight in loop.scheduler.flights for draft in flight.drafts.values())

        loop = self.built.loop
        name = f"{rows}/{number} "
        run = run_throughput(loop, lengths, prompts, False, name, see, first_seed=number * rows)
        assert drafted == {self.stays}, "it drafts the other way"
        if counts:
            self.rates.append(run.output_tok_s)
            self.watches.append(watch)

    def line(self) -> tuple[float, str]:
        took, busy = (
            statistics.median(one for watch in self.watches for one in values(watch))
            for values in (lambda watch: watch.took_s, lambda watch: watch.busy_s)
        )
        tokens = statistics.mean(one for watch in self.watches for one in watch.tokens)
        drafting = statistics.median(self.drafting_s)
        rate = len(self.rates) / sum(1 / one for one in self.rates)
        ms = "".join(f"{1000 * one:9.3f}" for one in (took, busy, drafting, took - busy - drafting))
        return took, f"{rate:10,.1f}{ms}{tokens:9.2f}"

    def clear(self) -> None:
        self.drafting_s.clear()
        self.rates.clear()
        self.watches.clear()


def measure(layers: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        config = EngineConfig.from_mapping(
            {
                "model": folder, "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "prefix_caching": False,
                "max_num_seqs": 16, "kv_memory": "4GiB", "draft_tokens": DRAFTS, "speculate": "draft",
                "draft_layers": layers,
            }
        )  # fmt: skip
        loaded = load(config)
        ways: dict[str, Way] = {}
        for name, stays in (("host", False), ("device", True)):
            build_draft.STAY_ON_DEVICE["cuda"] = stays
            ways[name] = Way(assemble(loaded, config), stays)
            ways[name].force()
        lines = []
        for rows, output, rounds in RUNS:
            for number in range(rounds + 1):
                for way in ways.values():
                    way.run(rows, output, number, counts=number > 0)  # the first is a warm-up
                    if not number:
                        way.clear()
            host_s, _ = ways["host"].line()
            for name, way in ways.items():
                took_s, figures = way.line()
                lines.append(f"{layers:>6} {rows:>5} {name:>8}{figures}{host_s / took_s:9.3f}")
                print(lines[-1], flush=True)
                way.clear()
        for way in ways.values():
            way.built.loop.close()
        return lines


if __name__ == "__main__":
    check()
    speculation.best_drafts = all_drafts  # type: ignore[assignment]
    asked = [int(one) for one in (sys.argv[1] if len(sys.argv) > 1 else "2,4").split(",")]
    heading = "layers  rows   tokens     tok/s    round   verify    draft    waits   tokens   speed"
    print(heading, flush=True)
    table = [line for layers in asked for line in measure(layers)]
    print("\n" + "\n".join([heading, *table]), flush=True)
