"""shoal tune: the search finds a known best, keeps the defaults where nothing is better, and measures what it chose."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.tune import in_words
from shoal.errors import BadConfig
from shoal.sim.cost import DeviceTimes
from shoal.sim.profile import profile_text, read_profile
from shoal.sim.tuner import Trial, Tuner, axes_of
from tests.story.models import save_model

AXES = axes_of("cpu", 2**20)


def test_the_search_finds_the_best_of_axes_that_do_not_interact() -> None:
    good = {"max_num_batched_tokens": 256, "order": "sjf", "block_size": 32}

    def worth(settings: dict[str, Any]) -> float:
        return 1.0 + sum(settings.get(name) == value for name, value in good.items())

    told: list[Trial] = []
    tuner = Tuner(AXES, worth, 1000, told.append)
    assert tuner.search().settings == good
    assert told[0].settings == {}
    assert tuner.best(1)[0].settings == good
    assert len({repr(sorted(one.settings.items())) for one in told}) == len(told)  # none was tried twice


def test_the_defaults_stay_where_nothing_is_clearly_better() -> None:
    def worth(settings: dict[str, Any]) -> float:
        return 1.005 if settings else 1.0

    assert Tuner(AXES, worth, 1000).search().settings == {}


def test_settings_that_cannot_be_used_are_left_out_and_trials_are_bounded() -> None:
    def worth(settings: dict[str, Any]) -> float:
        if settings.get("order") == "sjf":
            raise BadConfig("no")
        return 1.0 + len(settings)

    told: list[Trial] = []
    tuner = Tuner(AXES, worth, 12, told.append)
    tuner.search()
    assert len(told) == 12
    assert not any(one.settings.get("order") for one in told)
    with pytest.raises(BadConfig, match="cannot be simulated"):
        Tuner(AXES, lambda settings: worth({"order": "sjf"}), 5).search()


def test_what_the_user_has_fixed_is_not_searched() -> None:
    axes = axes_of("cuda", 0, fixed=["when_short", "depth"])
    assert "memory" not in axes
    assert "depth" not in axes
    assert {"max_num_seqs": 512} in axes["max_num_seqs"]


def test_the_command_finds_better_settings_by_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a large pass costs hardly more than a small one, so larger ones are better
    table = ((1, 0.02), (4096, 0.03))
    slow = replace(read_profile("smollm2-135m-cpu"), device=DeviceTimes(table, table), kv_tokens=50_000)
    (tmp_path / "slow.json").write_text(profile_text(slow))
    args = ["tune", "--no-live", "--profile", str(tmp_path / "slow.json"), "--requests", "24", "--prompt-scale", "1",
            "--output-scale", "0.02", "--objective", "throughput", "--trials", "12"]  # fmt: skip
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["winner"] > 0
    best = found["chosen"][found["winner"]]
    assert best["settings"]["max_num_batched_tokens"] > 512
    assert best["predicted"]["output_tok_s"] > 1.2 * found["chosen"][0]["predicted"]["output_tok_s"]
    assert "use: --max-num-batched-tokens" in in_words(found)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["goodput", "tail"])
def test_the_best_are_measured_on_the_real_engine(
    objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path, max_position_embeddings=2048)
    args = ["tune", "--model", str(model), "--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB", "--requests"]
    args += ["20", "--seconds", "8", "--trials", "15", "--best", "2", "--objective", objective, "--json"]
    assert main([*args, "--out", str(tmp_path / "tuned.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "tuned.json").read_text()) == found
    assert found["rate"] > 0
    assert len(found["chosen"]) >= 1
    assert all(one["measured"]["output_tok_s"] > 0 for one in found["chosen"])
    assert 0 <= found["winner"] < len(found["chosen"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-live"], "give --profile"),
        (["--no-live", "--profile", "llama-8b-h200", "--rate", "-1"], "--rate must be above 0"),
        (["--no-live", "--profile", "llama-8b-h200", "--trials", "0"], "--trials must be at least 1"),
        (["--no-live", "--profile", "llama-8b-h200", "--promise-gap", "0"], "--promise-gap must be above 0"),
        (["--no-live", "--profile", "llama-8b-h200", "--model", "SmolLM2"], "is of Llama"),
    ],
)
def test_bad_input_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--requests", "3", *args]) == 2
    assert message in capsys.readouterr().err
