"""The [prompt, output] file and its random prompts."""

import json
from pathlib import Path

import pytest

from shoal.errors import BadConfig
from shoal.workload.lengths import Lengths, random_prompts, read_lengths
from tests.workload.real import DATA, needs


@pytest.mark.parametrize("wrap", [None, "requests", "lengths"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_pairs_bare_or_under_a_name(tmp_path: Path, wrap: str | None, mark: str) -> None:
    pairs = [[3, 4], [1, 1]]
    path = tmp_path / "w.json"
    path.write_text(mark + json.dumps({wrap: pairs} if wrap else pairs), encoding="utf-8")
    assert read_lengths(path) == read_lengths(str(path)) == [Lengths(3, 4), Lengths(1, 1)]


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "no"])
def test_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(BadConfig, match=r"w\.json is not JSON"):
        read_lengths(path)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(b"\xff\xfe[[1, 2]]")
    with pytest.raises(BadConfig, match=r"w\.json"):
        read_lengths(path)


@pytest.mark.parametrize("text", ["[]", "{}", "7", '{"other": [[1, 2]]}', '{"requests": []}', '{"requests": null}'])
def test_no_list_of_pairs(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(BadConfig, match="must be a list"):
        read_lengths(path)


@pytest.mark.parametrize(
    "pair", ["[1]", "[1, 2, 3]", "[0, 1]", "[1, -1]", "[1, 2.0]", "[true, 1]", '["1", 2]', "5", "{}"]
)
def test_a_bad_pair_is_named(tmp_path: Path, pair: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(f"[[1, 1], {pair}]")
    with pytest.raises(BadConfig, match=r"request 1 of .*w\.json"):
        read_lengths(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"none\.json: No such file"):
        read_lengths(tmp_path / "none.json")


def test_random_prompts_have_their_lengths_and_share_nothing() -> None:
    lengths = [Lengths(30, 1), Lengths(1, 1), Lengths(30, 9)]
    prompts = random_prompts(lengths, 1000, seed=2)
    assert [len(prompt) for prompt in prompts] == [30, 1, 30]
    assert all(0 <= id < 1000 for prompt in prompts for id in prompt)
    assert prompts[0][:3] != prompts[2][:3]
    assert prompts == random_prompts(lengths, 1000, seed=2) != random_prompts(lengths, 1000, seed=3)


@needs(DATA / "workloads" / "nano256.json")
def test_a_real_workload() -> None:
    found = read_lengths(DATA / "workloads" / "nano256.json")
    assert (len(found), sum(one.prompt for one in found), sum(one.output for one in found)) == (256, 142_827, 133_966)
