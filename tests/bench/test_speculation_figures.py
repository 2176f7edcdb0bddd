"""benchmarks/speculation.py: its requests, figures and pictures. What it measures needs a real model and time."""

import json
from pathlib import Path

import pytest
import speculation
from speculation_plots import draw
from speculation_prompts import WORKLOADS


def measured(tokens: int, seconds: float, cpu_s: float, passes: int = 10) -> speculation.Measured:
    return speculation.Measured(tokens, seconds, cpu_s, passes, 8, 6, [[1, 2]])


def test_a_ratio_is_that_of_one_round_and_figures_are_medians() -> None:
    """The machine was twice as slow in the second round, and someone else disturbed the third."""
    runs = [
        {"off": measured(100, 10.0, 5.0), "suffix": measured(100, 5.0, 2.0)},
        {"off": measured(100, 20.0, 10.0), "suffix": measured(100, 10.0, 4.0)},
        {"off": measured(100, 10.0, 5.0), "suffix": measured(100, 40.0, 2.0)},
    ]
    row = speculation.figures("quote", runs, "suffix", 2.0)
    assert (row["ratio"], row["cpu_ratio"]) == (2.0, 2.5)
    assert (row["off_tok_s"], row["tok_s"]) == (10.0, 10.0)
    assert (row["tokens_a_pass"], row["proposed"], row["accepted"]) == (10.0, 24, 18)
    assert "18 of 24" in speculation.table([row], "one request", "suffix")


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_round_asks_for_something_else(name: str) -> None:
    asked = [json.dumps(WORKLOADS[name][0](number).chat) for number in range(12)]
    assert len(set(asked)) == 12
    assert [json.dumps(WORKLOADS[name][0](number).chat) for number in range(12)] == asked


def test_what_is_shown_for_an_edit_is_the_edit() -> None:
    chat = WORKLOADS["edit"][0](4).chat
    old, new = chat[0]["content"].splitlines()[2:], chat[1]["content"].splitlines()
    changed = [line for before, line in zip(old, new, strict=True) if before != line]
    assert changed == ["port = 8080", 'log_level = "error"']


def test_pictures_of_kept_figures(tmp_path: Path) -> None:
    runs = [{"off": measured(100, 10.0, 5.0), "suffix": measured(100, 5.0, 2.0)}]
    rows = [speculation.figures(name, runs, "suffix", target) for name, (_, target) in WORKLOADS.items()]
    load = [speculation.load_row("chat", count, runs, "suffix") for count in (1, 8, 32)]
    about = {"speculate": "suffix", "model": "m", "dtype": "float32", "threads": 1}
    kept = json.loads(json.dumps({**about, "rows": rows, "load": load}))
    paths = draw(kept, tmp_path)
    assert [path.name for path in paths] == ["speculation.svg", "speculation-load.svg"]
    assert all("float32" in path.read_text() for path in paths)
