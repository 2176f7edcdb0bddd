"""Arrival times: means, spreads, and that only times change."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import mean, pstdev

import pytest

from shoal.errors import BadConfig
from shoal.workload.arrivals import at_once, gamma, poisson, replay, replay_at_rate
from shoal.workload.traces import TraceRequest

TRACE = [TraceRequest(0, 1, 2), TraceRequest(1, 3, 4, (5,), 512), TraceRequest(4, 5, 6)]
MANY = [TraceRequest(0, 1, 1)] * 20_000


def gaps(requests: list[TraceRequest]) -> list[float]:
    return [later.at_s - one.at_s for one, later in pairwise(requests)]


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_replay_stretches_time_and_nothing_else(scale: float) -> None:
    assert replay(TRACE, scale) == [replace(one, at_s=one.at_s * scale) for one in TRACE]


def test_replay_at_a_rate_keeps_the_pattern() -> None:
    placed = replay_at_rate(TRACE, 5.0)
    assert [one.at_s for one in placed] == pytest.approx([0, 0.1, 0.4])
    assert 2 / placed[-1].at_s == pytest.approx(5.0)


@pytest.mark.parametrize("requests", [[], TRACE[:1], [TraceRequest(0, 1, 1)] * 3])
def test_replay_at_a_rate_needs_times(requests: list[TraceRequest]) -> None:
    with pytest.raises(BadConfig, match="no arrival times"):
        replay_at_rate(requests, 1.0)


@pytest.mark.parametrize("rate", [0.2, 7.0])
def test_poisson_has_the_rate_and_a_spread_of_1(rate: float) -> None:
    found = gaps(poisson(MANY, rate, seed=1))
    assert mean(found) * rate == pytest.approx(1, rel=0.05)
    assert pstdev(found) / mean(found) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0, 5.0])
def test_gamma_has_the_rate_and_the_spread(cv: float) -> None:
    found = gaps(gamma(MANY, 4.0, cv, seed=2))
    assert mean(found) * 4 == pytest.approx(1, rel=0.04 * max(1, cv))
    assert pstdev(found) / mean(found) == pytest.approx(cv, rel=0.15)
    assert min(found) >= 0


def test_the_seed_decides() -> None:
    assert gamma(MANY[:50], 1, 2, seed=3) == gamma(MANY[:50], 1, 2, seed=3)
    assert gamma(MANY[:50], 1, 2, seed=3) != gamma(MANY[:50], 1, 2, seed=4)


def test_twice_the_rate_is_the_same_pattern_in_half_the_time() -> None:
    slow, fast = poisson(MANY[:100], 1), poisson(MANY[:100], 2)
    assert [one.at_s for one in slow] == pytest.approx([one.at_s * 2 for one in fast])


@pytest.mark.parametrize("place", [lambda t: poisson(t, 3), lambda t: gamma(t, 3, 4), at_once])
def test_only_times_change_and_the_first_is_at_0(place: Callable[[list[TraceRequest]], list[TraceRequest]]) -> None:
    placed = place(TRACE)
    assert [replace(one, at_s=0) for one in placed] == [replace(one, at_s=0) for one in TRACE]
    assert placed[0].at_s == 0
    assert place([]) == []


def test_at_once() -> None:
    assert {one.at_s for one in at_once(TRACE)} == {0.0}


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_invalid_numbers_are_named(bad: float) -> None:
    with pytest.raises(BadConfig, match="time scale"):
        replay(TRACE, bad)
    with pytest.raises(BadConfig, match="rate"):
        replay_at_rate(TRACE, bad)
    with pytest.raises(BadConfig, match="rate"):
        poisson(TRACE, bad)
    with pytest.raises(BadConfig, match="variation"):
        gamma(TRACE, 1, bad)
