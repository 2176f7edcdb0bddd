"""Four engines on a virtual clock: what the choice of engine is worth. The benchmark prints the same figures."""

import pytest

from benchmarks import routing

COUNT = 400


def measured(policy: str, rate: float, hot: float = 0.0) -> routing.Figures:
    loops = [routing.engine() for _ in range(routing.ENGINES)]
    return routing.measured(policy, loops, routing.requests(COUNT, rate, seed=0, hot=hot))


@pytest.fixture(scope="module")
def by_prefix() -> routing.Figures:
    return measured("prefix", 12.0)


def test_prefixes_are_computed_hardly_more_often_than_with_one_big_cache(by_prefix: routing.Figures) -> None:
    trace = routing.requests(COUNT, 12.0, seed=0)
    big = routing.measured("prefix", [routing.engine(routing.ENGINES)], trace)
    assert len(by_prefix.requests) == COUNT
    assert by_prefix.computed <= 1.2 * big.computed


def test_requests_start_sooner_and_end_sooner_than_by_turns(by_prefix: routing.Figures) -> None:
    by_turns = measured("round-robin", 12.0)
    assert by_turns.ttft_s(50) >= 3 * by_prefix.ttft_s(50)
    assert by_turns.seconds >= 1.5 * by_prefix.seconds, "the same requests, so throughput is the inverse"


@pytest.mark.parametrize("hot", [0.5, 0.9, 1.0])
def test_a_hot_prefix_does_not_drown_one_engine(hot: float) -> None:
    found = measured("prefix", 24.0, hot)
    assert max(found.work) * len(found.work) / sum(found.work) <= 1.5
    assert sum(found.ended) == COUNT
    assert max(found.ended) <= 1.5 * COUNT / len(found.ended)
