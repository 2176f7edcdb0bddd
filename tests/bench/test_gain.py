"""benchmarks/gain.py: lengths as asked for, and the gain where it is known."""

import statistics

import pytest

from benchmarks.gain import PROMPT, Case, equal_latency, gpt3, highest_rate, saturated
from shoal.sim.profile import parse_profile, profile_text, read_profile


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_lengths_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    lengths = [one.output for one in Case(1000, cv, 8).requests(20_000)]
    assert statistics.mean(lengths) == pytest.approx(1000, rel=0.05)
    assert statistics.pstdev(lengths) / statistics.mean(lengths) == pytest.approx(cv, abs=0.08)


def test_equal_lengths_gain_nothing_and_different_ones_about_the_longest_of_a_batch_over_the_mean() -> None:
    profile = read_profile("llama-8b-h200")
    equal, different = Case(60, 0.0, 4), Case(60, 1.0, 4)
    assert equal.predicted() == 1.0
    speeds = saturated(profile, equal, 4)
    assert speeds["continuous"] == pytest.approx(speeds["static"], rel=0.1)
    speeds = saturated(profile, different, 12)
    assert speeds["continuous"] / speeds["static"] == pytest.approx(different.predicted(), rel=0.3)


def test_the_highest_rate_is_found() -> None:
    assert highest_rate(lambda rate: rate, 7.0, 0.1, 100.0) == pytest.approx(7.0, rel=0.15)
    assert highest_rate(lambda rate: 0.0, 7.0, 0.1, 100.0) == 100.0


def test_at_equal_latency_continuous_batching_reaches_a_higher_rate() -> None:
    requests = Case(40, 1.0, 8).requests(30)
    (row,) = equal_latency(read_profile("llama-8b-h200"), (8,), requests, (2.0,))
    assert row["gain"] > 2
    assert all(one.prompt == PROMPT for one in requests)


def test_orcas_profile_is_a_valid_one() -> None:
    profile = gpt3()
    assert parse_profile(profile_text(profile), "gpt3") == profile
