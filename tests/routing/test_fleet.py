"""Four engines on a virtual clock: what the choice of engine is worth. The benchmark prints the same figures."""

import pytest

from benchmarks import routing

COUNT = 400


@pytest.fixture(scope="module")
def by_prefix() -> routing.Figures:
    return routing.measured("prefix", COUNT, 12.0, seed=0)


def test_prefixes_are_computed_hardly_more_often_than_with_one_big_cache(by_prefix: routing.Figures) -> None:
    big = routing.one_big_cache(COUNT, 12.0, seed=0)
    assert sum(by_prefix.requests) == COUNT
    assert by_prefix.computed <= 1.2 * big.computed


def test_requests_start_sooner_and_end_sooner_than_by_turns(by_prefix: routing.Figures) -> None:
    by_turns = routing.measured("round-robin", COUNT, 12.0, seed=0)
    assert by_turns.ttft_p50_s >= 3 * by_prefix.ttft_p50_s
    assert by_turns.seconds >= 1.5 * by_prefix.seconds, "the same requests, so throughput is the inverse"


@pytest.mark.parametrize("hot", [0.9, 1.0])
def test_a_hot_prefix_does_not_drown_one_engine(hot: float) -> None:
    found = routing.measured("prefix", COUNT, 24.0, seed=0, hot=hot)
    assert found.most_loaded <= 1.5
    assert max(found.requests) <= 1.5 * COUNT / len(found.requests)
