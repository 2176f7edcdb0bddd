"""Where the time of a pass goes: times without nested calls, shares, and the time beyond computing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.bench.phases import REST, PassPhases, PhaseTimer, TimedCalls, timing
from shoal.core.events import PassEvents


class Hands:
    """A manual clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float, then: Callable[[], Any] | None = None) -> Callable[[], Any]:
        def call() -> Any:
            self.now_s += seconds
            return then() if then else seconds

        return call


def events(requests: int, tokens: int | None = None) -> PassEvents:
    made = PassEvents(0)
    made.scheduled_ids = [str(number) for number in range(requests)]
    made.computed_tokens = requests if tokens is None else tokens
    return made


def test_the_time_of_an_inner_call_is_not_the_outer_ones() -> None:
    clock = Hands()
    timer = PhaseTimer(clock)
    inner = timer.wrap(clock.spend(2.0), "inner")
    outer = timer.wrap(clock.spend(1.0, then=inner), "outer")
    assert outer() == 2.0
    outer()
    assert dict(timer.seconds) == {"outer": 2.0, "inner": 4.0}


def test_a_call_that_raises_is_timed_too() -> None:
    clock = Hands()
    timer = PhaseTimer(clock)

    def breaks() -> None:
        clock.now_s += 3.0
        raise ValueError("broken")

    outer = timer.wrap(clock.spend(1.0, then=timer.wrap(breaks, "inner")), "outer")
    with pytest.raises(ValueError, match="broken"):
        outer()
    assert dict(timer.seconds) == {"outer": 1.0, "inner": 3.0}
    timer.wrap(clock.spend(5.0), "outer")()
    assert timer.seconds["outer"] == 6.0


def made_phases() -> PassPhases:
    """Two passes of 32 and 16 requests, 10 s each: 1 s of planning, 8 s of layers; and others that do not count."""
    clock = Hands()
    phases = PassPhases(clock)
    plan, layers = phases.timer.wrap(clock.spend(1.0), "plan"), phases.timer.wrap(clock.spend(8.0), "layers")

    def one_pass(made: PassEvents) -> None:
        plan()
        layers()
        clock.now_s += 1.0
        phases.step(made)

    one_pass(events(32))  # the first
    one_pass(events(32))
    one_pass(events(4, tokens=900))  # prompts
    one_pass(events(0))
    one_pass(events(16))
    return phases


def test_shares_are_of_the_passes_that_are_decodes_alone() -> None:
    phases = made_phases()
    rows = {name: (milliseconds, share) for name, milliseconds, share in phases.rows()}
    assert rows["plan"] == pytest.approx((1000, 0.1))
    assert rows["layers"] == pytest.approx((8000, 0.8))
    assert rows[REST] == pytest.approx((1000, 0.1))
    assert sum(share for _, share in rows.values()) == pytest.approx(1)
    figures = phases.figures()
    assert (figures["passes"], figures["mean_batch"], figures["pass_ms"]) == (2, 24, pytest.approx(10_000))
    assert figures["host_share"] == pytest.approx(0.2)
    assert "host work: 20.0% of a pass" in phases.table()


def test_host_work_hidden_behind_computing_is_not_counted() -> None:
    """Two passes in flight: planning takes 3 s of the 10 s in which layers take 9."""
    clock = Hands()
    phases = PassPhases(clock)
    phases.step(events(1))
    phases.timer.seconds.update({"plan": 3.0, "layers": 9.0})
    clock.now_s = 10.0
    phases.step(events(1))
    assert phases.host_share == pytest.approx(0.1)
    assert {name: share for name, _, share in phases.rows()}[REST] == 0


def test_a_run_without_such_passes_says_so() -> None:
    assert "longer outputs" in PassPhases().table()
    assert PassPhases().host_share == 0


def test_the_parts_of_a_loop_are_timed_and_restored() -> None:
    clock = Hands()
    timer = PhaseTimer(clock)

    def part(**calls: Callable[..., Any]) -> Any:
        return type("Part", (), {name: staticmethod(call) for name, call in calls.items()})()

    library = SimpleNamespace(shoal_layers=clock.spend(5.0), shoal_linear=clock.spend(2.0), shoal_draw=clock.spend(1.0))
    ops = part()
    ops.calls = library
    model = part(logits=lambda: ops.calls.shoal_linear())
    model.ops = ops
    runner = part(update=clock.spend(0.1), forward=lambda: ops.calls.shoal_layers(), sample=lambda: model.logits())
    runner.model, runner.tables = model, part(gather=clock.spend(0.2))
    runner.sampler = part(sample=lambda: ops.calls.shoal_draw())
    loop: Any = SimpleNamespace(
        scheduler=part(plan=clock.spend(0.3), commit=clock.spend(0.4)), executor=SimpleNamespace(runner=runner)
    )
    with timing(loop, timer):
        for call in (loop.scheduler.plan, loop.scheduler.commit, runner.update, runner.tables.gather, runner.forward):
            call()
        runner.sample()
        runner.sampler.sample()
        assert isinstance(ops.calls, TimedCalls)
    found = {name: round(seconds, 6) for name, seconds in timer.seconds.items() if seconds}
    assert found == {"plan": 0.3, "commit": 0.4, "inputs": 0.3, "layers": 5.0, "head": 2.0, "draw": 1.0}
    timer.seconds.clear()
    for call in (loop.scheduler.plan, runner.update, runner.forward, runner.sample, runner.sampler.sample):
        call()
    assert ops.calls is library
    assert not timer.seconds
