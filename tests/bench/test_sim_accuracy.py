"""benchmarks/sim_accuracy.py: verdicts where they are known, and a whole run with a small model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sim_accuracy import (
    FIGURES,
    compare_load,
    figures_by_rate,
    figures_of,
    line_of,
    main,
    rate_that_shows,
    saturation,
    settings_of,
    simulated,
)
from shoal.sim.profile import Profile, read_profile
from tests.sim.made import trace

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def profile() -> Profile:
    return read_profile("smollm2-135m-cpu")


def load_with(share: float, *runs: dict[str, float]) -> dict[str, Any]:
    arrivals = [(one.at_s, one.prompt, one.output) for one in trace(30, rate=4, longest=200, outputs=40)]
    kept = [{"figures": run} for run in runs]
    return {"preset": "shoal", "share": share, "rate": 4.0, "settings": SETTINGS, "trace": arrivals, "runs": kept}


def as_predicted() -> dict[str, float]:
    return figures_of(simulated(profile(), SETTINGS, trace(30, rate=4, longest=200, outputs=40)))


def test_a_server_that_does_as_predicted_is_within_and_others_miss_or_are_undecided() -> None:
    exact = as_predicted()
    slower = exact | {name: 1.2 * exact[name] for name in FIGURES}
    assert {row["verdict"] for row in compare_load(profile(), load_with(0.5, exact, exact, slower))} == {"within"}
    assert {row["verdict"] for row in compare_load(profile(), load_with(0.5, slower, slower))} == {"MISS"}
    unsure = compare_load(profile(), load_with(0.5, slower, slower, exact))
    assert {row["verdict"] for row in unsure} == {"undecided"}
    assert [row["figure"] for row in unsure] == list(FIGURES)
    assert line_of(unsure[0]).startswith("| shoal | 50%, 4.00/s | throughput |")


def test_a_run_with_lost_requests_is_no_measurement() -> None:
    assert compare_load(profile(), load_with(0.5, as_predicted() | {"finished": 29})) == []


def test_near_saturation_the_rate_is_compared() -> None:
    arrivals = trace(60, rate=6, longest=200, outputs=40)
    faster = [replace(one, at_s=one.at_s / 1.1) for one in arrivals]
    shown = figures_of(simulated(profile(), SETTINGS, faster))["e2e p99"]
    by_rate = figures_by_rate(profile(), SETTINGS, arrivals)
    assert rate_that_shows(by_rate, "e2e p99", shown) == pytest.approx(1.1, rel=0.02)
    rows = compare_load(profile(), load_with(0.95, as_predicted()))
    assert [row["figure"] for row in rows if row["by_rate"]] == ["TTFT p50", "TTFT p99", "e2e p50", "e2e p99"]


def test_saturation_is_the_rate_of_completion_while_requests_wait() -> None:
    arrivals = trace(200, rate=1, longest=200, outputs=40)
    full = saturation(profile(), SETTINGS, arrivals)
    twice = saturation(profile(), {**SETTINGS, "max_num_seqs": 1}, arrivals)
    assert full > 1.2 * twice  # one request at a time completes fewer


def test_flags_that_concern_the_machine_alone_are_not_the_simulators() -> None:
    found = settings_of("orca", ["--load-format", "dummy", "--max-num-seqs", "7", "--threads", "1"])
    assert found["max_num_seqs"] == 7
    assert found["prefill"] == "inline"
    assert not {"load_format", "threads"} & found.keys()


@pytest.mark.slow
def test_a_whole_run_is_measured_kept_and_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL))
    flags = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--max-num-seqs", "8"]
    flags += ["--kv-memory", "64MiB"]
    few = ["--scale", "0.05", "--seconds", "2", "--warm", "0.1", "--runs", "1", "--saturating", "100"]
    few += ["--shares", "0.05"]
    args = [str(out), "--model", str(model), "--calibrate", "4", "--budget", "200", *few]
    assert main([*args, "--", *flags]) == 0
    assert "| shoal | 5%," in capsys.readouterr().out
    found = json.loads((out / "measured.json").read_text())
    (load,) = found["loads"]
    (run,) = load["runs"]
    assert run["figures"]["finished"] == run["figures"]["requests"] == len(load["trace"])
    assert len(found["rows"]) == len(FIGURES)
    assert (out / "runs" / "shoal-0.05-0.json.gz").exists()
    assert main([str(out), "--again", "--profile", str(out / "profile.json")]) == 0
    assert "passes of shoal-0.05-0" in capsys.readouterr().out
