"""Which engine should get a request? The three routing policies on one workload, on a virtual clock.

    python -m benchmarks.routing [--requests 480] [--rate 12] [--seed 0]

Eight prefixes of 2,000 tokens, shared by all requests, over four engines; the KV cache of each holds three of the
prefixes beside its running requests. The scheduler, the KV cache, the reports and the router are the real ones; a pass
takes what a linear model says. "one big cache" is one engine with the speed, the slots and the memory of all four. The
second table has one hot prefix for most requests: there, no engine may get much more work than the others.
"""

import argparse
import random

from shoal.core.request import Request
from shoal.sched.scheduler import Scheduler
from tests.fakes import VOCAB, make_scheduler
from tests.fleet import Figures, Fleet
from tests.sim import Costs, scripted

ENGINES, PREFIXES, PREFIX_TOKENS, BLOCK, SLOTS = 4, 8, 2000, 16, 16
SUFFIX, OUTPUT = (16, 96), (16, 96)  # tokens, at random between
CACHED = 3  # prefixes that fit into one engine's KV cache beside its running requests
POLICIES = ("round-robin", "least-load", "prefix")


def scheduler(engines: int = 1) -> Scheduler:
    """One that has the slots and the memory of so many engines."""
    own = SLOTS * -(-(SUFFIX[1] + OUTPUT[1] + BLOCK) // BLOCK)  # blocks that running requests do not share
    return make_scheduler(
        blocks=engines * (CACHED * PREFIX_TOKENS // BLOCK + own),
        block_size=BLOCK,
        max_model_len=PREFIX_TOKENS + SUFFIX[1] + OUTPUT[1] + 1,
        max_num_seqs=engines * SLOTS,
        max_num_batched_tokens=engines * 512,
    )


def requests(count: int, rate: float, seed: int, hot: float = 0.0) -> list[tuple[float, Request]]:
    """Poisson arrivals; a share `hot` of them has the first prefix, the others any."""
    chance = random.Random(seed)
    prefixes = [[chance.randrange(2, VOCAB) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    at_s, found = 0.0, []
    for number in range(count):
        at_s += chance.expovariate(rate)
        prefix = prefixes[0 if chance.random() < hot else chance.randrange(PREFIXES)]
        suffix = [chance.randrange(2, VOCAB) for _ in range(chance.randint(*SUFFIX))]
        found.append((at_s, scripted(f"r{number}", prefix + suffix, chance.randint(*OUTPUT), OUTPUT[1])))
    return found


def measured(policy: str, count: int, rate: float, seed: int, hot: float = 0.0) -> Figures:
    return Fleet(ENGINES, policy, scheduler).run(requests(count, rate, seed, hot)).figures()


def one_big_cache(count: int, rate: float, seed: int, hot: float = 0.0) -> Figures:
    """All engines as one, with the speed of all."""
    usual = Costs()
    costs = Costs(constant_s=usual.constant_s, token_s=usual.token_s / ENGINES)
    return Fleet(1, "round-robin", lambda: scheduler(ENGINES), costs).run(requests(count, rate, seed, hot)).figures()


def line(name: str, one: Figures, big: Figures) -> str:
    rate = sum(one.requests) / one.seconds
    shares = " ".join(f"{work * len(one.work) / sum(one.work):.2f}" for work in one.work)
    return (
        f"{name:<14} {one.computed:>9,} {one.computed / big.computed:>6.2f} {one.ttft_p50_s:>9.3f} "
        f"{one.ttft_p99_s:>9.3f} {rate:>8.2f}   {shares}"
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
        big = one_big_cache(args.requests, rate, args.seed, hot)
        print(f"{title}, {args.requests} requests")
        print(f"{'':<14} {'prompt tokens':>16} {'TTFT p50':>9} {'TTFT p99':>9} {'req/s':>8}   work by engine, mean 1")
        print(line("one big cache", big, big))
        for policy in POLICIES:
            print(line(policy, measured(policy, args.requests, rate, args.seed, hot), big))
        print()


if __name__ == "__main__":
    main()
