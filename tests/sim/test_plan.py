"""shoal plan: the smallest number of replicas, against brute force over whole runs; and bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.bench.recorder import RunRecorder
from shoal.cli import main
from shoal.cli.plan import in_words
from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig
from shoal.sim.cost import DeviceTimes
from shoal.sim.planner import FleetPlanner, FleetSetup
from shoal.sim.profile import Profile, profile_text, read_profile
from shoal.sim.promises import parse_promises, tier_names
from shoal.workload.arrivals import gamma
from tests.sim.made import trace

# slow passes: a load of few requests takes long
DEVICE = DeviceTimes(((1, 0.020), (64, 0.030)), ((1, 0.020), (512, 0.200)), read_s=1e-6)
RATE_S = 16.0


def slow_profile() -> Profile:
    return replace(read_profile("smollm2-135m-cpu"), name="slow", device=DEVICE, error=0.1, kv_tokens=4000)


def fleet(*promises: str, **settings: Any) -> FleetSetup:
    config = EngineConfig.from_mapping({"max_num_seqs": 8, "max_num_batched_tokens": 256, **settings})
    return FleetSetup("x", slow_profile(), config, max_tokens=40, promises=parse_promises(promises))


def brute_force(one: FleetSetup, load: Any, most: int) -> list[bool]:
    """Whether 1, 2, … replicas keep the promise, from the records of whole runs."""
    found = []
    for replicas in range(1, most + 1):
        recorder = RunRecorder()
        one.run(replicas, load, recorder)
        tiers = tier_names(one.promises)
        kept = True
        for promise in one.promises:
            mine = [r for number, r in enumerate(recorder.requests) if tiers[number % len(tiers)] == promise.tier]
            values = {
                "ttft": [r.ttft_s for r in mine],
                "gap": [gap for r in mine for gap in r.gaps_s],
                "e2e": [r.e2e_s for r in mine],
            }
            for target in promise.targets:
                exceeding = np.sum(np.array(values[target.what]) > target.seconds)
                kept &= bool(exceeding <= (1 - target.percent / 100) * len(values[target.what]) + 1e-9)
        found.append(kept)
    return found


@pytest.mark.parametrize(
    ("promises", "cv", "settings"),
    [
        (("ttft_p95=1.5,gap_p99=0.2",), 1.0, {}),
        pytest.param(("e2e_p90=2.5",), 3.0, {}, marks=pytest.mark.slow),
        pytest.param(
            ("tier=premium,share=0.25,ttft_p95=0.6", "tier=batch,e2e_p90=2.5"),
            1.0,
            {"order": "slo", "tiers": "{premium: {ttft: 0.6}, batch: {}}"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_number_of_replicas_is_the_smallest(promises: tuple[str, ...], cv: float, settings: dict[str, Any]) -> None:
    requests = trace(100, rate=1, longest=200, outputs=40)
    planner = FleetPlanner(lambda rate: gamma(requests, rate, cv, seed=1), RATE_S, most=20, loads=(0.5, 0.9))
    one = fleet(*promises, **settings)
    plan = planner.plan([one])
    kept = brute_force(one, planner.trace, plan.replicas + 1)
    assert plan.replicas > 1
    assert kept == [False] * (plan.replicas - 1) + [True, True]
    assert all(target.kept for target in plan.targets)
    assert plan.fewer is None or not all(target.kept for target in plan.fewer)
    assert plan.least <= plan.replicas <= plan.most
    assert plan.headroom >= 1
    assert planner.keeps(one, plan.replicas, RATE_S * plan.headroom)
    by_promise = dict(planner.by_promise(plan, (0.01, 1.0, 4.0)))
    assert by_promise[1.0] == plan.replicas
    assert by_promise[0.01] is None
    assert (by_promise[4.0] or 0) <= plan.replicas


def test_settings_that_need_fewer_replicas_are_chosen() -> None:
    requests = trace(100, rate=1, longest=200, outputs=40)
    planner = FleetPlanner(lambda rate: gamma(requests, rate, 1.0, seed=1), RATE_S, most=20, loads=(0.5, 0.9))
    narrow = replace(fleet("ttft_p95=1.5", max_num_seqs=2), label="narrow")
    plan = planner.plan([narrow, replace(fleet("ttft_p95=1.5"), label="wide")])
    assert plan.fleet.label == "wide"
    assert plan.replicas < (plan.tried["narrow"] or 0)


def test_a_promise_that_no_number_keeps_is_refused_with_the_reason() -> None:
    requests = trace(60, rate=1, longest=200, outputs=40)
    planner = FleetPlanner(lambda rate: gamma(requests, rate, 1.0, seed=1), RATE_S, most=20, loads=(0.5, 0.9))
    with pytest.raises(BadConfig, match=r"no number of replicas.*even one request at a time has ttft_p99 = 0\.\d+ s"):
        planner.plan([fleet("ttft_p99=0.01")])
    with pytest.raises(BadConfig, match=r"no number of replicas.*gap_p50"):
        planner.plan([fleet("gap_p50=0.01")])
    with pytest.raises(BadConfig, match=r"need at least \d+ replicas, and --max-replicas is 1"):
        FleetPlanner(lambda rate: gamma(requests, rate, 1.0), 1000.0, most=1).plan([fleet("ttft_p99=9")])


def test_the_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.json").write_text(profile_text(slow_profile()))
    common = ["plan", "--profile", str(tmp_path / "slow.json"), "--requests", "60", "--output-scale", "0.05"]
    args = [*common, "--prompt-scale", "0.1", "--rate", "4", "--budgets", "256", "--promise", "ttft_p90=1"]
    assert main([*args, "--json", "--price-per-hour", "3.6"]) == 0
    found = json.loads(capsys.readouterr().out)
    replicas, tokens_s = found["replicas"], found["cost_per_million_tokens"]
    assert tokens_s == pytest.approx(1e3 * replicas / (4 * found["output_tokens"] / 60), rel=1e-6)
    assert found["settings"] == {"max_num_batched_tokens": 256}
    words = in_words(found)
    assert f"replicas    {replicas} " in words
    assert "--max-num-batched-tokens 256" in words


PROFILE = ["--profile", "llama-8b-h200", "--requests", "5"]
RATE = [*PROFILE, "--rate", "1"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*RATE, "--price-per-hour", "-1"], "not negative"),
        ([*RATE, "--price-per-hour", "nan"], "not negative"),
        ([*PROFILE, "--rate", "-2"], "above 0"),
        (PROFILE, "give --rate"),
        ([*RATE, "--max-replicas", "0"], "between 1 and"),
        ([*RATE, "--budgets", "0"], "above 0"),
        ([*RATE, "--arrivals", "gamma:x"], "poisson, replay or gamma"),
        ([*RATE, "--promise", "ttft=1"], "ttft_pN"),
        ([*RATE, "--promise", "ttft_p99=-1"], "not a number above 0"),
        ([*RATE, "--promise", "ttft_p0=1"], "percentile above 0"),
        ([*RATE, "--promise", "tier=x"], "has no times"),
        ([*RATE, "--promise", "ttft_p99=1", "--promise", "ttft_p99=2"], "tier=NAME"),
        ([*RATE, "--promise", "tier=a,share=0.2,ttft_p99=1", "--promise", "tier=b,share=0.2,ttft_p99=2"], "add up"),
        ([*RATE, "--promise", "ttft_p99=0.0001"], "no number of replicas"),
        ([*RATE, "--model", "SmolLM2"], "is of Llama"),
        (["--profile", "none", "--rate", "1"], "unknown profile"),
    ],
)
def test_bad_input_is_refused_with_what_to_change(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *args]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.csv").write_text("arrival_s,prompt_tokens,output_tokens\n")
    assert main(["plan", *RATE, "--trace", str(tmp_path / "empty.csv")]) == 2
    assert "has no requests" in capsys.readouterr().err
