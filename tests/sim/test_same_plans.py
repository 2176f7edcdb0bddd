"""A simulated run makes the plans of a real one: the same requests, with the times that the real run took.

The real engine is a small model computed by torch on the wall clock. Its clock's readings are written down, and the
simulated run, whose executor computes nothing, reads them again in the same order. So all decisions that depend on
time fall on the same moments, and every plan must be the same, pass by pass.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.replay import Replay
from shoal.build import assemble, load
from shoal.config.engine import EngineConfig
from shoal.core.clock import VirtualClock, WallClock
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import Executor, LateMasks
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.sched.make import make_scheduler
from shoal.sim.cost import CostModel, DeviceTimes, SimulatedExecutor
from shoal.sim.request import RequestMaker
from shoal.workload.prompts import make_prompts
from shoal.workload.traces import TraceRequest
from tests.sim.made import trace
from tests.story.models import save_model

WAYS: dict[str, dict[str, Any]] = {
    "shoal": {},
    "two in flight": {"depth": 2},
    "short of memory": {"kv_memory": 30, "depth": 2},
    "swap": {"kv_memory": 30, "when_short": "swap", "host_kv_memory": 60},
    "orca": {"preset": "orca"},
    "static": {"preset": "transformers", "group_size": 4},
    "slo": {"order": "slo", "tiers": '{premium: {ttft: 0.05, itl: 0.01}, batch: {}}', "budget": "promise"},
}  # fmt: skip


class WrittenClock(WallClock):
    """Wall time; writes down what it said."""

    def __init__(self) -> None:
        self.readings: deque[float] = deque()

    def now_s(self) -> float:
        self.readings.append(super().now_s())
        return self.readings[-1]


class ReadClock(VirtualClock):
    """Says what another clock said, in the same order; waits take no time."""

    def __init__(self, readings: deque[float]) -> None:
        super().__init__()
        self.readings = readings

    def now_s(self) -> float:
        return self.readings.popleft()

    def wait_until(self, at_s: float) -> None:
        pass


class Plans:
    """An executor that keeps the plans it was given, and the results' times."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.plans: list[tuple[Any, ...]] = []
        self.results: list[StepResult] = []

    def forward(self, plan: StepPlan) -> None:
        rows = zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.draws.tolist(), strict=True)
        starting = [(one.row, one.generation, one.blocks, one.ends_at) for one in plan.starting]
        copies = [(one.id, one.direction, one.source, one.target) for one in plan.copies]
        self.plans.append((plan.step, list(rows), starting, plan.grown.tolist(), copies, plan.width, plan.dead))
        self.inner.forward(plan)

    def sample(self, masks: LateMasks | None) -> None:
        self.inner.sample(masks)

    def result(self) -> StepResult:
        self.results.append(self.inner.result())
        return self.results[-1]

    def close(self) -> None:
        self.inner.close()


class RecordedTimes(SimulatedExecutor):
    """Passes and copies that take as long as another executor's."""

    def __init__(self, results: list[StepResult], rows: int) -> None:
        super().__init__(CostModel(DeviceTimes(((1, 1.0),), ((1, 1.0),))), VirtualClock(), rows)
        self._recorded = deque(results)

    def result(self) -> StepResult:
        own, then = super().result(), self._recorded.popleft()
        assert own.rows.tolist() == then.rows.tolist()
        return StepResult(
            own.step, own.rows, own.generations, own.accepted, own.tokens,
            copies_done=then.copies_done, padded=own.padded, busy_s=then.busy_s,
        )  # fmt: skip


class SimulatedReplay(Replay):
    make: RequestMaker

    def _request(self, number: int) -> Request:
        return self.make(number, self.trace[number])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(folder)
    return load(EngineConfig(model=str(folder), device="cpu", dtype="float32", threads=1))


def real_run(loaded: Any, config: EngineConfig, requests: list[TraceRequest], clock: WrittenClock) -> tuple[Any, Plans]:
    built = assemble(loaded, config, clock)
    plans = Plans(built.loop.executor)
    built.loop.executor = plans
    prompts = make_prompts(requests, loaded.spec.vocab_size)
    try:
        Replay(built.loop, requests, prompts, max_tokens=40).run()
    finally:
        built.loop.close()
    return built, plans


@pytest.mark.parametrize("way", WAYS)
def test_a_simulated_run_makes_the_plans_of_a_real_one(loaded: Any, way: str) -> None:
    from shoal.build_types import kv_dtype
    from shoal.runner.kvstore import bytes_per_block

    settings = dict(WAYS[way])
    block_bytes = bytes_per_block(loaded.spec, 16, kv_dtype(EngineConfig(), loaded.dtype))
    for name in ("kv_memory", "host_kv_memory"):
        if name in settings:
            settings[name] *= block_bytes
    config = EngineConfig.from_mapping({"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})
    shared = [replace(one, prefix=(n % 3,), prefix_block=32.0) for n, one in enumerate(trace(30, 400, 0, 100, 40))]
    requests = shared if way != "swap" else trace(30, 400, 0, 100, 40)
    clock = WrittenClock()
    built, real = real_run(loaded, config, requests, clock)
    config = built.config
    host = 60 if "host_kv_memory" in settings else 0
    scheduler = make_scheduler(config, built.limits, built.kv_blocks, host)
    simulated = Plans(RecordedTimes(real.results, built.limits.rows))
    loop = EngineLoop(scheduler, simulated, ReadClock(clock.readings), built.loop.depth)
    again = SimulatedReplay(loop, requests, [], max_tokens=40)
    again.make = RequestMaker(40, config.block_size, config.prefix_caching)
    again.run()
    assert len(real.plans) > 30
    assert any(copies for *_, copies, _, _ in real.plans) == (way == "swap")
    assert simulated.plans == real.plans
    assert not clock.readings, "the real run read its clock more often"
    assert type(scheduler) is type(built.loop.scheduler)
    assert type(scheduler.kv) is type(built.loop.scheduler.kv)
    ours, theirs = vars(scheduler.policies), vars(built.loop.scheduler.policies)
    assert {name: type(one) for name, one in ours.items()} == {name: type(one) for name, one in theirs.items()}
