"""Utilisation: counts of real passes against their rows one by one, and shares against a device of known rates."""

import math
import random

import pytest

from shoal.bench.record import RunRecord, utilisation
from shoal.bench.recorder import RunRecorder
from shoal.core.events import PassEvents
from shoal.core.work import DeviceRates, ModelWork
from shoal.obs.metrics import EngineMetrics
from shoal.obs.utilisation import Utilisation
from shoal.sched.scheduler import Scheduler
from shoal.sim.cost import PassSize
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import OpenArrivals, VirtualServer
from tests.fakes import FakeExecutor, make_request, make_scheduler
from tests.sim.made import engine, trace

WORK = ModelWork(flop_position=1000, flop_line=50, flop_pair=3, weight_bytes=10_000, kv_bytes=7)
RATES = DeviceRates(flop_s=1e6, bytes_s=2e6)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_pass_counts_what_its_rows_read_and_draw(layout: str) -> None:
    scheduler = make_scheduler(layout=layout, blocks=40, max_num_batched_tokens=16)
    executor, chance = FakeExecutor(40, 4), random.Random(1)
    for number in range(20):
        scheduler.submit(make_request(f"r{number}", [1] * chance.randint(1, 30), max_tokens=chance.randint(1, 9)), 0.0)
    passes = drawn = recomputed = 0
    while not scheduler.idle:
        plan = scheduler.plan(0.0)
        if plan is None:
            scheduler.take_events(0.0)
            continue
        executor.forward(plan)
        events = scheduler.commit(executor.result(), 0.0)
        rows = list(zip(events.scheduled_starts, events.scheduled_counts, strict=True))
        assert events.kv_reads == sum(start + count for start, count in rows)
        attended = [position + 1 for start, count in rows for position in range(start, start + count)]
        assert events.pairs == sum(attended)
        passes, drawn, recomputed = passes + 1, drawn + events.lines, recomputed + events.recomputed_tokens
        assert events.lines >= len(events.owners)
    assert passes > 10
    assert drawn >= 20


class ByBandwidth:
    """A device that is limited by memory alone, and reaches its rate."""

    def device_s(self, size: PassSize) -> float:
        return WORK.moved_bytes(1, size.reads + size.positions) / RATES.bytes_s

    def host_s(self, size: PassSize) -> float:
        return 0.0

    def copy_s(self, direction: str, blocks: int) -> float:
        return 0.0


class Watching(RunRecorder):
    """A recorder that also feeds metrics."""

    def __init__(self, metrics: EngineMetrics) -> None:
        super().__init__()
        self.metrics = metrics

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        super().passed(events, scheduler)
        self.metrics.take(events)


def test_a_device_at_its_limit_has_an_mbu_of_1() -> None:
    use = Utilisation(WORK)
    metrics = EngineMetrics(utilisation=use)
    recorder = Watching(metrics)
    assert math.isnan(use.shares()["mbu"])
    server = VirtualServer(
        [engine(ByBandwidth(), blocks=40, prefix_caching=False, watermark=0.0)], recorder, RequestMaker(200, 16)
    )
    seconds = server.run(OpenArrivals(trace(30, rate=600, longest=100, outputs=200)))
    assert math.isnan(use.shares()["mbu"])  # nothing is known of the device
    use.learn(RATES)
    shares = use.shares()
    assert shares["mbu"] == pytest.approx(1.0)
    run = RunRecord(
        "x", "x", 1.0, {}, 16, recorder.requests, recorder.passes, seconds, recorder.busy_s, work=WORK, rates=RATES
    )
    found = utilisation(run)
    assert found["mbu"] == pytest.approx(1.0)
    assert found["mfu"] == pytest.approx(use.flop / recorder.busy_s / RATES.flop_s)
    wasted = sum(one.recomputed + one.vain for one in recorder.passes)
    computed = sum(one.useful for one in recorder.passes)
    assert wasted > 0
    assert found["useful_work"] == pytest.approx(1 - wasted / computed)
    text = metrics.render().decode()
    assert "shoal_mbu_ratio 1.0" in text or "shoal_mbu_ratio 0.99999" in text
    assert "shoal_device_flop_rate 1e+06" in text


def test_padding_recomputation_and_rejected_drafts_are_not_useful() -> None:
    use = Utilisation(ModelWork(1, 0, 0, 0, 0))
    events = PassEvents(0, scheduled_ids=["a"], computed_tokens=8, padded_tokens=2, recomputed_tokens=3, busy_s=1.0)
    events.proposed, events.accepted = {"ngram": 4}, {"ngram": 3}
    use.take(events)
    assert (use.flop, use.useful_flop) == (10, pytest.approx(4))
    assert use.state() == {"useful": 0.4}


def test_a_row_of_a_request_that_had_ended_is_not_useful() -> None:
    use = Utilisation(ModelWork(1, 0, 0, 0, 0))
    events = PassEvents(0, scheduled_ids=["a", "b"], scheduled_counts=[1, 3], computed_tokens=4, busy_s=1.0)
    events.late_ids = ["b"]
    use.take(events)
    assert (use.flop, use.useful_flop) == (4, pytest.approx(1))
