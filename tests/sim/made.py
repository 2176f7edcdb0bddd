"""Small simulated engines and traces, and an observer that keeps what it is told."""

import random
from typing import Any

from shoal.config.engine import EngineConfig
from shoal.core.events import PassEvents
from shoal.engine.loop import EngineLoop
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.sched.scheduler import Scheduler
from shoal.sim.cost import Coin, CopyCosts, CostModel, DeviceTimes, HostTimes, Times
from shoal.sim.virtual import virtual_loop
from shoal.spec.make import make_drafter
from shoal.workload.traces import TraceRequest

COSTS = CostModel(
    DeviceTimes(((1, 0.010), (64, 0.012)), ((1, 0.010), (512, 0.050)), 1e-5, 1e-5, 1e-7, 1e-8),
    HostTimes(1e-4, 1e-6, 1e-5),
    CopyCosts(1e-5, 1e-4, 1e-4),
)


def engine(times: Times = COSTS, blocks: int = 400, depth: int = 2, check: bool = True, **settings: Any) -> EngineLoop:
    config = EngineConfig.from_mapping({"max_num_seqs": 16, "max_num_batched_tokens": 256, **settings})
    limits = Limits(blocks * config.block_size, config.slots, config.pass_tokens, vocab_size=1000)
    host = blocks if config.when_short in ("swap", "auto") else 0
    chance = config.speculation.synthetic
    drafter = None if chance is None else make_drafter(config.speculation)
    scheduler = make_scheduler(config, limits, blocks, host, drafter)
    return virtual_loop(scheduler, times, depth, check, None if chance is None else Coin(chance))


def trace(count: int, rate: float, seed: int = 0, longest: int = 400, outputs: int = 80) -> list[TraceRequest]:
    chance = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(count):
        found.append(TraceRequest(at_s, chance.randint(1, longest), chance.randint(1, outputs)))
        at_s += chance.expovariate(rate)
    return found


class Seen:
    """What an observer is told, by request."""

    def __init__(self) -> None:
        self.arrived_s: dict[int, float] = {}
        self.token_s: dict[int, list[float]] = {}
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.passes: list[tuple[float, tuple[tuple[str, int, int], ...]]] = []

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None:
        self.arrived_s[number], self.token_s[number] = at_s, []

    def refused(self, number: int, kind: str) -> None:
        self.reasons[number] = kind

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        rows = zip(events.scheduled_ids, events.scheduled_starts, events.scheduled_counts, strict=True)
        if events.scheduled_ids:
            self.passes.append((events.committed_s, tuple(rows)))

    def delivered(self, events: PassEvents, at_s: float) -> None:
        for id in events.owners:
            self.token_s[int(id)].append(at_s)
        for end in events.finished:
            self.reasons[int(end.id)], self.cached[int(end.id)] = end.reason.value, end.cached_tokens
