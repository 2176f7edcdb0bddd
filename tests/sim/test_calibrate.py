"""Calibration: known costs are found again, on an engine whose times are known; and files are refused when damaged."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.config.engine import EngineConfig
from shoal.core.clock import VirtualClock
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.sim.calibrate import Calibration, LoadStage, RecordingExecutor, stages, swap_stage
from shoal.sim.cost import CopyCosts, CostModel, DeviceTimes, HostTimes, PassSize, SimulatedExecutor, TimeTable
from shoal.sim.engines import check_model, simulated_loop
from shoal.sim.fit import TimedCopy, TimedPass, errors, fit_copies, fit_costs, nonnegative
from shoal.sim.profile import CARDS, derive, parse_profile, profile_text, read_profile, reshape, shipped

TRUE = CostModel(
    DeviceTimes(((1, 0.004), (16, 0.005), (64, 0.009)), ((1, 0.004), (64, 0.009), (512, 0.060)),
                0.0, 3e-5, 2e-8, 4e-9, 2e-6),
    HostTimes(2e-4, 3e-6, 2e-5),
    CopyCosts(1e-5, 2e-4, 3e-4),
)  # fmt: skip


def make_engine(settings: dict[str, object]) -> EngineLoop:
    config = EngineConfig.from_mapping({"max_num_batched_tokens": 256, **settings})
    clock = VirtualClock()
    swaps = config.when_short == "swap"
    blocks = 60 if swaps else 2000
    limits = Limits(960 if swaps else 2048, config.slots, config.pass_tokens, vocab_size=100)
    scheduler = make_scheduler(config, limits, blocks, host=blocks if swaps else 0)
    return EngineLoop(scheduler, SimulatedExecutor(TRUE, clock, limits.rows), clock, depth=1)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    found = Calibration(make_engine, vocab_size=100)
    for stage in stages(slots=32, context=2048, budget=256):
        assert found.run(stage, seconds=2.0) >= 9
    found.run(swap_stage(16, 960), seconds=3.0)
    return found


def test_a_calibration_finds_the_costs_of_an_engine_again(calibration: Calibration) -> None:
    fit = fit_costs(calibration.passes, calibration.copies)
    assert fit.held_back["p90"] < 0.02
    assert fit.held_back["total"] < 0.01
    assert fit.costs.host.pass_s == pytest.approx(2e-4, rel=0.05)
    assert fit.costs.host.start_s == pytest.approx(2e-5, rel=0.2)
    assert fit.costs.copies.out_block_s == pytest.approx(2e-4, rel=0.05)
    assert fit.costs.copies.in_block_s == pytest.approx(3e-4, rel=0.05)


def test_the_fit_predicts_sizes_that_calibration_never_saw(calibration: Calibration) -> None:
    costs = fit_costs(calibration.passes, calibration.copies).costs
    for size in (PassSize(24, 24, 24, 24 * 700, 0, 0, False, 0), PassSize(200, 9, 9, 3000, 60_000, 0, True, 1, 500)):
        assert costs.device_s(size) == pytest.approx(TRUE.device_s(size), rel=0.05)


def test_disturbed_passes_hardly_move_the_fit(calibration: Calibration) -> None:
    chance = random.Random(0)
    noisy = [
        replace(one, device_s=one.device_s * (3.0 if chance.random() < 0.05 else chance.uniform(0.98, 1.02)))
        for one in calibration.passes
    ]
    costs = fit_costs(noisy, calibration.copies).costs
    assert errors(costs, calibration.passes)["p90"] < 0.04


def test_terms_are_never_negative() -> None:
    chance = np.random.default_rng(0)
    a = chance.random((200, 5))
    for true in ([1.0, 0.0, 2.0, 0.0, 0.5], [0.0, 0.0, 0.0, 3.0, 0.0]):
        assert nonnegative(a, a @ np.array(true)) == pytest.approx(true, abs=1e-4)
    assert nonnegative(a, -a @ np.ones(5)) == pytest.approx([0.0] * 5)


def test_too_few_passes_are_refused() -> None:
    one = TimedPass(PassSize(1, 1, 1, 1, 0, 0, False, 0), 0.01, None)
    with pytest.raises(BadConfig, match="calibrate for longer"):
        fit_costs([one] * 10)
    assert fit_copies([TimedCopy("out", 3, 3e-3)] * 5).out_block_s > 0


def test_the_recorder_leaves_the_engine_as_it_is() -> None:
    plain, recorded = make_engine({"max_num_seqs": 4}), make_engine({"max_num_seqs": 4})
    recorded.executor = RecordingExecutor(recorded.executor, recorded.clock)
    ends = []
    for loop in (plain, recorded):
        found = Calibration(lambda settings, loop=loop: loop, vocab_size=100)
        found._drive(loop, RecordingExecutor(loop.executor, loop.clock), LoadStage("x", 4, (1, 50), (1, 9)), 1.0, 0)
        ends.append(loop.clock.now_s())
    assert ends[0] == ends[1]


# ---- profiles ------------------------------------------------------------------------------------------------------


def test_shipped_profiles_can_be_read_and_say_how_good_they_are() -> None:
    assert shipped()
    for name, text in shipped().items():
        profile = parse_profile(text, name)
        assert profile.name == name
        assert parse_profile(profile_text(profile), name) == profile
        assert profile.quality == "measured" or profile.note
        assert simulated_loop(profile, EngineConfig()).depth == profile.depth


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("depth", -1, "not negative"),
        ("kv_tokens", 0, "at least 1"),
        ("dtype", 3, "must be a text"),
        ("wrong", 1, "unknown key"),
        ("quality", "perfect", "unknown quality"),
        ("device", {"decode": [[1, 0.0]], "mixed": [[1, 0.1]]}, "more than 0 seconds"),
        ("device", {"decode": [[5, 0.1], [1, 0.2]], "mixed": [[1, 0.1]]}, "ascending"),
        ("device", {"decode": 3, "mixed": [[1, 0.1]]}, "pairs"),
        ("host", {"pass_s": float("nan")}, "not negative"),
        ("format", 7, "not a profile of format"),
    ],
)
def test_a_damaged_profile_is_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    values = json.loads(shipped()["llama-8b-h200"])
    values[key] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(BadConfig, match=message):
        read_profile(str(path))


def test_missing_keys_files_and_json_are_refused(tmp_path: Path) -> None:
    values = json.loads(shipped()["llama-8b-h200"])
    del values["model"]["layers"]
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "b.json").write_text("{")
    for name, message in (("a.json", "has no layers"), ("b.json", "not JSON"), ("c.json", "cannot read")):
        with pytest.raises(BadConfig, match=message):
            read_profile(str(tmp_path / name))
    with pytest.raises(BadConfig, match="unknown profile"):
        read_profile("none")


def test_a_derived_profile_is_slower_on_a_slower_card_and_marked() -> None:
    profile = read_profile("llama-8b-h200")
    slower = derive(profile, CARDS["l40s"])
    assert slower.quality == "estimated"
    assert slower.error >= 0.25
    assert profile.card.bandwidth_gb_s < CARDS["h200"].bandwidth_gb_s  # measured; and compared is what datasheets say
    ratio = CARDS["h200"].bandwidth_gb_s / CARDS["l40s"].bandwidth_gb_s
    assert slower.device.decode[0][1] == pytest.approx(profile.device.decode[0][1] * ratio)
    assert slower.kv_tokens < profile.kv_tokens
    with pytest.raises(BadConfig, match="choose a larger card"):
        derive(replace(profile, model=replace(profile.model, weight_bytes=10**11)), CARDS["rtx4090"])


def test_a_profile_scaled_to_another_model_is_near_the_one_measured_with_it() -> None:
    llama, measured = read_profile("llama-8b-h200"), read_profile("qwen3-0.6b-h200")
    scaled = reshape(llama, measured.model)
    assert scaled.quality == "estimated"
    assert scaled.error >= 0.25
    assert scaled.device.decode[0][1] == pytest.approx(measured.device.decode[0][1], rel=0.25)
    for positions in (2048, 8192):  # beyond what the first was measured with
        seconds = TimeTable(scaled.device.mixed).at(positions)
        assert seconds == pytest.approx(TimeTable(measured.device.mixed).at(positions), rel=0.3)
    assert scaled.kv_tokens == pytest.approx(measured.kv_tokens, rel=0.05)
    same = reshape(llama, llama.model).device
    assert same.decode == tuple((at, pytest.approx(seconds)) for at, seconds in llama.device.decode)
    with pytest.raises(BadConfig, match="choose a larger card"):
        reshape(llama, replace(llama.model, weight_bytes=10**12))


def test_what_a_profile_says_nothing_of_is_refused() -> None:
    profile = read_profile("llama-8b-h200")
    for settings in ({"speculate": "ngram"}, {"dtype": "float32"}, {"quantization": "fp8"}, {"max_model_len": 10**6}):
        with pytest.raises(BadConfig):
            simulated_loop(profile, EngineConfig.from_mapping(settings))
    with pytest.raises(BadConfig, match="is of Llama"):
        check_model(profile, "SmolLM2")
