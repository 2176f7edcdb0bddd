"""The autoscaler against a simple cluster: requests hold one of an engine's places for a while, or wait for one."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.cluster.autoscale import Autoscaler, EngineLoad, ScaleRules
from shoal.errors import BadConfig

TICK_S = 1.0


@dataclass
class Cluster:
    """Requests of 100 tokens that take `hold_s` each; engines with `places`, which take `start_s` to start."""

    scaler: Autoscaler
    places: int = 8
    hold_s: float = 4.0
    start_s: float = 6.0
    requests: float = 0.0  # in the system; a fluid
    up: int = 0
    starts: list[float] = field(default_factory=list)  # when those on their way are up
    now_s: float = 0.0
    history: list[int] = field(default_factory=list)  # of what was wanted
    answered: float = 0.0

    def __post_init__(self) -> None:
        self.up = self.scaler.wanted

    def loads(self) -> list[EngineLoad]:
        served = min(self.requests, self.up * self.places)
        fill = served / (self.up * self.places)
        waiting = (self.requests - served) * 100 / self.up
        rate = 100 * self.places / self.hold_s if fill else None
        return [EngineLoad(math.ceil(waiting) if waiting > 1e-6 else 0, rate, fill) for _ in range(self.up)]

    def run(self, seconds: float, arrivals_per_s: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self.requests += arrivals_per_s * TICK_S
            ended = min(self.requests, self.up * self.places) * TICK_S / self.hold_s
            self.requests -= ended
            self.answered += ended
            self.up += sum(at_s <= self.now_s for at_s in self.starts)
            self.starts = [at_s for at_s in self.starts if at_s > self.now_s]
            wanted = self.scaler.decide(self.loads(), len(self.starts), self.now_s)
            self.history.append(wanted)
            self.starts += [self.now_s + self.start_s] * (wanted - self.up - len(self.starts))
            if wanted < self.up:
                self.up = wanted  # at once: what ran there goes on elsewhere


def rules(most: int = 5, least: int = 1, **more: float) -> ScaleRules:
    return ScaleRules(least, most, **more)  # type: ignore[arg-type]


bounds = st.tuples(st.integers(1, 4), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair)))
phases = st.lists(st.tuples(st.floats(1, 200), st.floats(0, 40)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(bounds, phases, st.floats(0, 30))
def test_never_outside_its_bounds(bound: tuple[int, int], load: list[tuple[float, float]], start_s: float) -> None:
    least, most = bound
    cluster = Cluster(Autoscaler(rules(most, least, down_after_s=10, down_pause_s=5)), start_s=start_s)
    for seconds, arrivals in load:
        cluster.run(seconds, arrivals)
    assert all(least <= wanted <= most for wanted in cluster.history)


reports = st.lists(
    st.builds(EngineLoad, st.integers(0, 10**9), st.none() | st.floats(0, 1e6, allow_nan=False), st.floats(0, 1)),
    max_size=6,
)


@given(st.lists(st.tuples(reports, st.integers(0, 3), st.floats(0, 100)), max_size=20))
def test_no_report_breaks_it(said: list[tuple[list[EngineLoad], int, float]]) -> None:
    """Engines that vanish, rates of zero, huge queues."""
    scaler, now_s = Autoscaler(rules(most=7)), 0.0
    for loads, starting, passed_s in said:
        now_s += passed_s
        assert 1 <= scaler.decide(loads, starting, now_s) <= 7


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 15), st.floats(4, 10), st.floats(0, 30))
def test_a_steady_load_moves_nothing(arrivals: float, hold_s: float, start_s: float) -> None:
    cluster = Cluster(Autoscaler(rules(most=6)), hold_s=hold_s, start_s=start_s)
    assume(not 1 < arrivals * hold_s / cluster.places < 1.01)  # a queue so slow to grow is long only after an hour
    cluster.run(1200, arrivals)  # what gathered before there were enough is worked off
    settled = cluster.history[-1]
    cluster.run(800, arrivals)
    assert set(cluster.history[-800:]) == {settled}
    demand = arrivals * hold_s / cluster.places  # in engines
    if demand < 6:
        assert settled >= demand - 1e-9
        assert settled == 1 or demand > 0.7 * (settled - 1) - 1e-6, "one fewer would do"
    else:
        assert settled == 6


def test_a_burst_adds_engines_and_idleness_removes_them() -> None:
    cluster = Cluster(Autoscaler(rules(most=3, down_after_s=20, down_pause_s=10)))
    cluster.run(60, 1.0)
    assert set(cluster.history) == {1}
    cluster.run(30, 20.0)
    assert cluster.history[-1] == 3
    sent = 60 * 1.0 + 30 * 20.0
    cluster.run(600, 0.0)
    assert cluster.history[-1] == 1
    assert cluster.history[-600:] == sorted(cluster.history[-600:], reverse=True), "never up again"
    assert cluster.answered == pytest.approx(sent)


def test_a_short_peak_adds_none() -> None:
    cluster = Cluster(Autoscaler(rules(most=3, up_after_s=10)))
    cluster.run(4, 4.0)
    cluster.run(100, 0.5)
    assert set(cluster.history) == {1}


def test_a_large_queue_adds_as_many_as_it_takes_at_once() -> None:
    scaler = Autoscaler(rules(most=9, wait_s=2.0, up_after_s=0.0))
    busy = EngineLoad(10_000, 1000.0, 1.0)
    assert scaler.predicted_wait_s([busy]) == 10.0
    assert scaler.decide([busy], 0, 0.0) == 5
    assert scaler.decide([busy] * 2, 3, 1.0) == 5, "not again before those have started"


def test_engines_that_fill_the_others_are_kept() -> None:
    scaler = Autoscaler(rules(most=3, down_after_s=0.0, down_pause_s=0.0, up_after_s=0.0, up_pause_s=0.0))
    assert scaler.decide([EngineLoad(9000, 1000.0, 1.0)], 0, 0.0) == 3
    assert scaler.decide([EngineLoad(0, 1000.0, 0.5)] * 3, 0, 1.0) == 3, "0.75 of the two that would remain"
    assert scaler.decide([EngineLoad(0, 1000.0, 0.4)] * 3, 0, 2.0) == 2
    assert scaler.decide([EngineLoad(0, 1000.0, 0.0)], 0, 3.0) == 2, "the second one is being restarted"


@pytest.mark.parametrize(
    "wrong", [{"least": 0}, {"least": 4, "most": 3}, {"wait_s": 0.0}, {"fill": 1.0}, {"down_after_s": -1.0}]
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfig):
        ScaleRules(**{"most": 3, **wrong})  # type: ignore[arg-type]
