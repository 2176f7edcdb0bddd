"""Lengths without a data file: like the trace they were fitted to."""

from statistics import mean

import numpy as np
import pytest

from shoal.errors import UnknownName
from shoal.workload.synthetic import QUANTILES, TABLES, at_quantile, draw_lengths
from shoal.workload.traces import read_trace
from tests.workload.real import AZURE_CODE, AZURE_CONV, needs

REAL = [
    pytest.param("azure-conv", AZURE_CONV, marks=needs(AZURE_CONV)),
    pytest.param("azure-code", AZURE_CODE, marks=needs(AZURE_CODE)),
]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_a_table_is_whole_and_rises(name: str, side: str) -> None:
    table = getattr(TABLES[name], side)
    assert len(table) == len(QUANTILES)
    assert list(table) == sorted(table)
    assert [at_quantile(table, u) for u in QUANTILES] == list(table)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_drawn_quantiles_are_the_tables(name: str, side: str) -> None:
    drawn = [getattr(one, side) for one in draw_lengths(name, 60_000, seed=5)]
    inner = [u for u in QUANTILES if 0.05 <= u <= 0.99]
    expected = [at_quantile(getattr(TABLES[name], side), u) for u in inner]
    assert np.quantile(drawn, inner) == pytest.approx(expected, rel=0.05, abs=1)
    assert min(drawn) >= at_quantile(getattr(TABLES[name], side), 0)
    assert max(drawn) <= at_quantile(getattr(TABLES[name], side), 1)


@pytest.mark.parametrize(("name", "path"), REAL)
def test_the_tables_are_the_traces_own_quantiles(name: str, path: str) -> None:
    trace = read_trace(path)
    for side in ("prompt", "output"):
        lengths = [getattr(one, side) for one in trace]
        assert np.quantile(lengths, QUANTILES) == pytest.approx(getattr(TABLES[name], side), abs=0.6)


@pytest.mark.parametrize(("name", "path"), REAL)
def test_means_are_the_traces_too(name: str, path: str) -> None:
    """Straight lines in the tail would give code 27% too many output tokens if the table ended at p99."""
    trace, drawn = read_trace(path), draw_lengths(name, 60_000, seed=6)
    for side in ("prompt", "output"):
        assert mean(getattr(one, side) for one in drawn) == pytest.approx(
            mean(getattr(one, side) for one in trace), rel=0.08
        )


def test_the_seed_decides_and_more_requests_only_append() -> None:
    assert draw_lengths("azure-conv", 20, seed=1) == draw_lengths("azure-conv", 30, seed=1)[:20]
    assert draw_lengths("azure-conv", 20, seed=1) != draw_lengths("azure-conv", 20, seed=2)
    assert {one.at_s for one in draw_lengths("azure-code", 9)} == {0.0}


def test_an_unknown_table_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="azure-code, azure-conv"):
        draw_lengths("azure-chat", 3)
