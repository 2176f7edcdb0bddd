"""Which engine should get a request? The three routing policies on one workload, on a virtual clock.

    python -m benchmarks.routing [--requests 480] [--rate 12] [--seed 0]

Eight prefixes of 2,000 tokens, shared by all requests, over four engines; the KV cache of each holds three of the
prefixes beside its running requests. The scheduler, the KV cache, the reports and the router are the real ones, on the
simulator's virtual clock; a pass takes what a linear model says. "one big cache" is one engine with the speed, the
slots and the memory of all four. The second table has one hot prefix for most requests: there, no engine may get much
more work than the others.
"""

import argparse
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from shoal.bench.record import RequestRecord
from shoal.bench.recorder import RunRecorder
from shoal.config.engine import EngineConfig
from shoal.core.events import PassEvents
from shoal.engine.loop import EngineLoop
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.sched.scheduler import Scheduler
from shoal.sim.cost import CostModel, DeviceTimes
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import OpenArrivals, VirtualServer, virtual_loop
from shoal.workload.traces import TraceRequest

ENGINES, PREFIXES, PREFIX_TOKENS, BLOCK, SLOTS = 4, 8, 2000, 16, 16
SUFFIX, OUTPUT = (16, 96), (16, 96)  # tokens, at random between
CACHED = 3  # prefixes that fit into one engine's KV cache beside its running requests
POLICIES = ("round-robin", "least-load", "prefix")


@dataclass(frozen=True)
class Figures:
    """What came of one run."""

    requests: list[RequestRecord]
    seconds: float
    work: tuple[int, ...]  # positions computed, by engine
    ended: tuple[int, ...]  # requests, by engine

    @property
    def computed(self) -> int:
        """Prompt tokens; the first output token of each request comes with its prompt."""
        return sum(self.work) - sum(len(one.token_s) - 1 for one in self.requests)

    def ttft_s(self, percent: float) -> float:
        return float(np.percentile([one.ttft_s for one in self.requests], percent))


def engine(engines: int = 1) -> EngineLoop:
    """One that has the slots, the memory and the speed of so many."""
    own = SLOTS * -(-(SUFFIX[1] + OUTPUT[1] + BLOCK) // BLOCK)  # blocks that running requests do not share
    slots, tokens = engines * SLOTS, engines * 512
    config = EngineConfig(block_size=BLOCK, max_num_seqs=slots, max_num_batched_tokens=tokens)
    limits = Limits(PREFIX_TOKENS + SUFFIX[1] + OUTPUT[1] + 1, slots, tokens, vocab_size=1000)
    blocks = engines * (CACHED * PREFIX_TOKENS // BLOCK + own)
    points = ((1, 0.0105), (1001, 0.0105 + 0.5 / engines))
    return virtual_loop(make_scheduler(config, limits, blocks), CostModel(DeviceTimes(points, points)), depth=1)


def requests(count: int, rate: float, seed: int, hot: float = 0.0) -> list[TraceRequest]:
    """Poisson arrivals; a share `hot` of them has the first prefix, the others any."""
    chance = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate)
        prefix = 0 if chance.random() < hot else chance.randrange(PREFIXES)
        prompt = PREFIX_TOKENS + chance.randint(*SUFFIX)
        found.append(TraceRequest(at_s, prompt, chance.randint(*OUTPUT), (prefix,), PREFIX_TOKENS))
    return found


class ByEngine(RunRecorder):
    """Counts the positions that each engine computed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[Scheduler] = Counter()
        self.ended: Counter[Scheduler] = Counter()

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        super().passed(events, scheduler)
        self.work[scheduler] += events.computed_tokens
        self.ended[scheduler] += len(events.finished)


def measured(policy: str, loops: list[EngineLoop], trace: list[TraceRequest]) -> Figures:
    recorder = ByEngine()
    server = VirtualServer(loops, recorder, RequestMaker(OUTPUT[1], BLOCK), routing=policy)
    seconds = server.run(OpenArrivals(trace))
    schedulers = [loop.scheduler for loop in loops]
    work, ended = (tuple(count[one] for one in schedulers) for count in (recorder.work, recorder.ended))
    return Figures(recorder.requests, seconds, work, ended)


def line(name: str, one: Figures, big: Figures) -> str:
    rate = len(one.requests) / one.seconds
    shares = " ".join(f"{work * len(one.work) / sum(one.work):.2f}" for work in one.work)
    return (
        f"{name:<14} {one.computed:>9,} {one.computed / big.computed:>6.2f} {one.ttft_s(50):>9.3f} "
        f"{one.ttft_s(99):>9.3f} {rate:>8.2f}   {shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--hot-rate", type=float, default=24.0, help="… with the hot prefix (default: %(default)s)")
    parser.add_argument("--hot", type=float, default=0.9, help="share of the hot prefix (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for title, rate, hot in (
        (f"{PREFIXES} prefixes, {args.rate:g} requests/s", args.rate, 0.0),
        (f"one hot prefix ({args.hot:.0%}), {args.hot_rate:g} requests/s", args.hot_rate, args.hot),
    ):
        trace = requests(args.requests, rate, args.seed, hot)
        big = measured("round-robin", [engine(ENGINES)], trace)
        print(f"{title}, {args.requests} requests")
        print(f"{'':<14} {'prompt tokens':>16} {'TTFT p50':>9} {'TTFT p99':>9} {'req/s':>8}   work by engine, mean 1")
        print(line("one big cache", big, big))
        for policy in POLICIES:
            print(line(policy, measured(policy, [engine() for _ in range(ENGINES)], trace), big))
        print()


if __name__ == "__main__":
    main()
