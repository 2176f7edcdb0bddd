"""Workloads by name: known totals, the same numbers everywhere, and a message for a name that is not known."""

import json

import pytest

from shoal.errors import BadConfig
from shoal.workload.lengths import Lengths
from shoal.workload.named import WORKLOADS, find_lengths
from tests.workload.real import DATA, needs


@pytest.mark.parametrize(
    ("name", "first", "count", "prompts", "outputs"),
    [
        ("cpu64", (525, 74), 64, 11_865, 6_837),
        ("nano256", (964, 845), 256, 142_827, 133_966),
        ("single", (128, 256), 1, 128, 256),
        ("decodes", (32, 40), 32, 1024, 1280),
    ],
)
def test_totals_are_the_published_ones(
    name: str, first: tuple[int, int], count: int, prompts: int, outputs: int
) -> None:
    found = find_lengths(name)
    assert (len(found), found[0]) == (count, Lengths(*first))
    assert (sum(one.prompt for one in found), sum(one.output for one in found)) == (prompts, outputs)


def test_azure_is_like_the_trace() -> None:
    found = find_lengths("azure")
    assert len(found) == 1000
    assert sum(one.prompt for one in found) / 1000 == pytest.approx(1155, rel=0.1)
    assert sum(one.output for one in found) / 1000 == pytest.approx(211, rel=0.1)


@needs(DATA / "workloads")
@pytest.mark.parametrize("name", ["cpu64", "nano256", "single"])
def test_equal_to_the_files_of_the_measurements(name: str) -> None:
    pairs = json.loads((DATA / "workloads" / f"{name}.json").read_text())
    assert [[one.prompt, one.output] for one in find_lengths(name)] == pairs


def test_every_name_is_described() -> None:
    assert all(one.about for one in WORKLOADS.values())


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(BadConfig, match=r"no workload 'cpu46' \(did you mean cpu64\?\); name one of cpu64, nano256"):
        find_lengths("cpu46")
    with pytest.raises(BadConfig, match="did you mean cpu64"):
        find_lengths("cpu64.json")
