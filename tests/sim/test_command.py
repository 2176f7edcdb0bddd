"""shoal simulate and compare --simulate: the report of shoal compare, repeatable, without torch; and bad input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.bench.record import Promise, RunRecord, summarise
from shoal.bench.recorder import RunRecorder
from shoal.bench.tally import RunTally
from shoal.cli import main, simulate
from shoal.cli.simulate import SIMULATED
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import OpenArrivals, VirtualServer
from tests.sim.made import engine, trace

PROFILE = ["--profile", "llama-8b-h200"]


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures alone: drawing plots takes longer than everything else."""
    monkeypatch.setattr(simulate, "DETAILED", 0)


def figures(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main([*args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    del found["meta"]["simulated_in_s"]
    return found


@pytest.mark.slow
def test_the_command_writes_the_report_of_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "report")]
    args = ("simulate", *PROFILE, "--requests", "20", "--rates", "5,50", "--presets", "orca,shoal", *out)
    found = figures(capsys, *args)
    assert [(run["preset"], run["rate"]) for run in found["runs"]] == [
        ("orca", 5.0), ("orca", 50.0), ("shoal", 5.0), ("shoal", 50.0)
    ]  # fmt: skip
    assert all(run["finished"] == 20 for run in found["runs"])
    assert {path.name for path in (tmp_path / "report").iterdir()} >= {"report.html", "report.md", "results.json"}


@pytest.mark.usefixtures("no_report")
def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("simulate", *PROFILE, "--requests", "15", "--rates", "20", "--replicas", "2", "--output-scale", "0.2")
    first = figures(capsys, *args)
    assert figures(capsys, *args) == first
    assert figures(capsys, *args, "--seed", "3")["runs"] != first["runs"]


@pytest.mark.usefixtures("no_report")
def test_compare_simulates_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "compare", "--simulate", "llama-8b-h200", "--requests", "20", "--rates", "20")
    assert [run["preset"] for run in found["runs"]] == list(SIMULATED)
    assert all(run["finished"] == 20 for run in found["runs"])
    assert "measured, passes within" in found["meta"]["model"]


@pytest.mark.usefixtures("no_report")
def test_more_engines_serve_more(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("simulate", *PROFILE, "--requests", "40", "--rates", "1000", "--output-scale", "0.2")
    one, three = (figures(capsys, *args, "--replicas", count)["runs"][0] for count in ("1", "3"))
    assert three["seconds"] < 0.7 * one["seconds"]


@pytest.mark.usefixtures("no_report")
def test_a_profile_is_scaled_to_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("simulate", *PROFILE, "--requests", "10", "--rates", "5", "--output-scale", "0.2")
    large, small = figures(capsys, *args), figures(capsys, *args, "--shape", "qwen3-0.6b")
    assert "qwen3-0.6b, bfloat16, on NVIDIA H200 (estimated, passes within 25%)" in small["meta"]["model"]
    assert small["runs"][0]["e2e_s"]["mean"] < 0.5 * large["runs"][0]["e2e_s"]["mean"]


def test_the_tally_agrees_with_the_records() -> None:
    promise = Promise(0.3, 0.02)
    recorder, tally = RunRecorder(), RunTally(promise)
    for observer in (recorder, tally):
        server = VirtualServer([engine(blocks=100, check=False)], observer, RequestMaker(80, 16))
        seconds = server.run(OpenArrivals(trace(200, rate=12)))
    run = RunRecord("x", "x", 20.0, {}, 16, recorder.requests, recorder.passes, seconds, recorder.busy_s)
    kept, counted = summarise(run, promise, 1.0), tally.figures(seconds, 16, 1.0)
    for name, value in kept.items():
        if isinstance(value, dict):
            assert counted[name]["mean"] == pytest.approx(value["mean"])
            assert counted[name]["max"] == pytest.approx(value["max"])
        elif name not in ("kv_waste", "tail_over_median", "goodput_share", "goodput_request_s"):
            assert counted[name] == pytest.approx(value), name
    found = {
        "ttft_s": [one.ttft_s for one in recorder.requests],
        "gap_s": [gap for one in recorder.requests for gap in one.gaps_s],
        "e2e_s": [one.e2e_s for one in recorder.requests],
    }
    for name, values in found.items():
        for percent in (50, 90, 95, 99):  # between two neighbours, to the step of the histogram
            low, high = (np.percentile(values, percent, method=side) for side in ("lower", "higher"))
            assert 0.997 * low <= counted[name][f"p{percent}"] <= 1.003 * high
    assert counted["goodput_share"] == pytest.approx(kept["goodput_share"], abs=0.02)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; from shoal.cli import main, simulate; simulate.DETAILED = 0; "
        "main(['simulate', '--profile', 'llama-8b-h200', '--requests', '3']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile", "none"], "unknown profile"),
        (["--profile", "llama-8b-h200@none"], "unknown card"),
        ([*PROFILE, "--shape", "none"], "unknown model shape"),
        ([*PROFILE, "--rates", "-1"], "not negative"),
        ([*PROFILE, "--requests", "0"], "at least 1"),
        ([*PROFILE, "--replicas", "0"], "at least 1"),
        ([*PROFILE, "--slots", "-4"], "at least 1"),
        ([*PROFILE, "--price-per-hour", "-1"], "at least 0"),
        ([*PROFILE, "--prompt-scale", "0"], "above 0"),
        ([*PROFILE, "--presets", "none"], "none"),
        ([*PROFILE, "--speculate", "ngram"], "synthetic:0.7"),
        ([*PROFILE, "--presets", "splitwise", "--decode-replicas", "0"], "at least 1"),
        ([*PROFILE, "--arrivals", "replay"], "no arrival times"),
        ([*PROFILE, "--arrivals", "sometimes"], "poisson, replay or gamma:CV"),
        ([*PROFILE, "--arrivals", "gamma:-1"], "above 0"),
        ([*PROFILE, "--promise-ttft", "-1"], "--promise-ttft must be a number that is at least 0"),
        ([*PROFILE, "--promise-gap", "nan"], "--promise-gap must be a number that is at least 0"),
        ([*PROFILE, "--users", "-1"], "at least 0"),
        ([*PROFILE, "--fronts", "0"], "at least 1"),
        ([*PROFILE, "--speculate", "synthetic:1.5"], "between 0 and 1"),
        ([*PROFILE, "--requests", "4", "--kv-tokens", "32"], "served none of the 4 requests"),
        ([*PROFILE, "--dtype", "float16"], "calibrate with --dtype float16"),
        ([*PROFILE, "--max-model-len", "999999"], "lower it"),
        ([*PROFILE, "--requests", "30000", "--rates", "0"], "at once"),
    ],
)
def test_bad_input_is_refused_with_what_to_change(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", *args, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_trace_and_a_profile_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.csv").write_text("arrival_s,prompt_tokens,output_tokens\n")
    assert main(["simulate", *PROFILE, "--trace", str(tmp_path / "empty.csv")]) == 2
    assert "has no requests" in capsys.readouterr().err
    (tmp_path / "negative.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,-5,10\n")
    assert main(["simulate", *PROFILE, "--trace", str(tmp_path / "negative.csv")]) == 2
    assert "'-5' is not a number of tokens" in capsys.readouterr().err
    assert main(["compare", "--simulate", "llama-8b-h200", "--model", "SmolLM2"]) == 2
    assert "is of Llama" in capsys.readouterr().err


def test_the_simulator_is_timed_and_keeps_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--requests", "60", "--rate", "40", "--preset-requests", "3")
    assert main(["bench", "simulator", *args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["long"]["finished"] == 60
    assert found["long"]["tokens"] > 60
    assert found["presets"]["count"] == len(SIMULATED)
    assert main(["bench", "simulator", "--rate", "0"]) == 2
    assert "--rate must be above 0" in capsys.readouterr().err


def test_a_long_run_keeps_nothing_of_requests_that_have_ended() -> None:
    tally = RunTally(Promise(1.0, 1.0))
    loop = engine(check=False)
    VirtualServer([loop], tally, RequestMaker(80, 16)).run(OpenArrivals(trace(300, rate=30)))
    assert tally.finished == 300
    assert not any((tally._open, tally._last_s, tally._latest))
    assert not loop.scheduler.requests
