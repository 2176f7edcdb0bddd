"""Options, presets, and pairs that cannot work."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.config.engine import EngineConfig
from shoal.config.presets import PRESETS, preset_of
from shoal.config.speculate import DRAFTERS as NAMES
from shoal.config.speculate import MODEL
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.errors import BadConfig, EngineError, ImpossiblePair, QueueFull, UnknownName
from shoal.sched.admission import Limits
from shoal.sched.batching import BATCHING
from shoal.sched.budget import BUDGET
from shoal.sched.layout import LAYOUT
from shoal.sched.make import make_scheduler
from shoal.sched.memory import MEMORY
from shoal.sched.ordering import ORDER
from shoal.sched.preempt import PREEMPT
from shoal.sched.prefill import PREFILL
from shoal.spec.make import DRAFTERS

TABLES = {
    "batching": BATCHING,
    "layout": LAYOUT,
    "prefill": PREFILL,
    "memory": MEMORY,
    "order": ORDER,
    "when_short": PREEMPT,
    "budget": BUDGET,
}


@pytest.mark.parametrize("axis", TABLES)
def test_every_policy_can_be_chosen_and_every_choice_is_a_policy(axis: str) -> None:
    choices = EngineConfig.__dataclass_fields__[axis].metadata["choices"]
    assert set(choices) == set(TABLES[axis])  # type: ignore[call-overload]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_axes_and_flags_override_it(name: str) -> None:
    config = EngineConfig.from_mapping({"preset": name})
    for option, value in PRESETS[name].settings.items():
        assert getattr(config, option) == value
    assert EngineConfig.from_mapping({"preset": name, "depth": 3}).depth == 3


def test_no_two_presets_are_the_same() -> None:
    for (one, first), (two, second) in itertools.combinations(PRESETS.items(), 2):
        configs = [EngineConfig.from_mapping(preset.settings) for preset in (first, second)]
        assert configs[0] != configs[1], f"{one} and {two} are the same settings"


def test_every_preset_has_its_description_and_its_difference() -> None:
    for preset in PRESETS.values():
        assert preset.does
        assert preset.differs


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="did you mean 'sglang'"):
        EngineConfig.from_mapping({"preset": "slang"})


@pytest.mark.parametrize("memory", ["ondemand", "predict"])
def test_waiting_without_reservation_is_refused_with_the_reason(memory: str) -> None:
    with pytest.raises(ImpossiblePair, match="deadlock"):
        EngineConfig(memory=memory, when_short="wait")


@pytest.mark.parametrize("other", [{"layout": "padded"}, {"layout": "shrink"}, {"cpu_kernels": "off"}])
def test_what_adds_in_an_order_of_the_batch_is_not_batch_invariant(other: dict[str, Any]) -> None:
    with pytest.raises(ImpossiblePair, match=f"{next(iter(other))}=.* with batch_invariant=True: .* use "):
        EngineConfig(batch_invariant=True, **other)


def test_a_group_larger_than_the_slots_is_refused() -> None:
    with pytest.raises(ImpossiblePair, match="never fills"):
        EngineConfig(batching="static", group_size=65, max_num_seqs=64)


def test_the_rules_of_admission_reach_the_scheduler() -> None:
    limits = Limits(100, 16, 64, 50)
    config = EngineConfig(max_queue=3, max_wait=2.5)
    scheduler = make_scheduler(config, limits, 20)
    assert (scheduler.tables.admission.max_queue, scheduler.tables.deadlines.max_wait_s) == (3, 2.5)
    params = SamplingParams(max_tokens=1)
    for id in "abc":
        scheduler.submit(Request(id, [1] * 4, params, tenant="t"), 0.0)
    with pytest.raises(QueueFull):
        scheduler.submit(Request("d", [1], params), 0.0)
    boundless = make_scheduler(EngineConfig(), limits, 20)
    for number in range(2000):
        boundless.submit(Request(str(number), [1] * 9, params, tenant="t"), 0.0)


def test_every_other_combination_builds() -> None:
    limits = Limits(100, 16, 64, 50)
    axes = {name: list(table) for name, table in TABLES.items()}
    built = 0
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        try:
            config = EngineConfig(**chosen, group_size=4)  # type: ignore[arg-type]
        except ImpossiblePair:
            apart = chosen["prefill"] == "disaggregated"
            assert chosen["when_short"] == "wait" or (
                apart and (chosen["when_short"] in ("swap", "auto") or chosen["batching"] != "continuous")
            )
            continue
        make_scheduler(config, limits, 20)
        built += 1
    orders, budgets, others = 5, 2, 4  # of when_short, all but `wait`, which needs reserve
    of_one = 3 * 3 * 3 * orders * budgets * (3 * others + 1)
    of_two = 1 * 3 * 1 * orders * budgets * (3 * (others - 2) + 1)  # continuous alone, and neither swap nor auto
    assert built == of_one + of_two


TIERS = "premium: {ttft: 0.3, itl: 0.04, weight: 8}, batch: {}"


def test_tiers_come_from_text_from_a_file_or_from_a_table(tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text("premium:\n  ttft: 0.3\n  itl: 0.04\n  weight: 8\nbatch:\n")
    table = {"premium": {"ttft": 0.3, "itl": 0.04, "weight": 8}, "batch": {}}
    for given in (TIERS, f"{{{TIERS}}}", str(file), table):
        tiers = list(EngineConfig.from_mapping({"tiers": given}).read_tiers())
        assert (tiers[0].name, tiers[0].ttft_s, tiers[0].weight) == ("premium", 0.3, 8.0)
        assert tiers[1].name == "batch"


def test_slo_has_default_tiers() -> None:
    assert [tier.name for tier in EngineConfig(order="slo").read_tiers()] == ["premium", "standard", "batch"]
    assert len(EngineConfig().read_tiers()) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tiers": "no-such-file"}, "cannot read the tiers from no-such-file"),
        ({"tiers": "{a: {"}, "not YAML"),
        ({"tiers": "a: {tfft: 1}"}, "did you mean 'ttft'"),
        ({"tiers": "a: {ttft: -1}"}, "above 0"),
        ({"headroom": 1.0}, "below 1"),
        ({"headroom": -0.1}, "at least 0"),
        ({"long_share": 1.5}, "below 1"),
        ({"lane_tokens": 50, "long_share": 0.0}, "never run"),
        ({"lane_tokens": -1}, "at least 0"),
        ({"max_preemptions": 0}, "at least 1"),
        ({"host_kv_memory": -5}, "at least 0"),
        ({"when_short": "swop"}, "did you mean 'swap'"),
        ({"budget": "promises"}, "did you mean 'promise'"),
    ],
)
def test_invalid_policies_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(BadConfig, match=match):
        EngineConfig.from_mapping(options)


def test_a_preset_with_other_settings_can_be_compared() -> None:
    settings = preset_of("shoal+order=sjf+depth=1+watermark=0.05+prefix-caching=false").settings
    assert (settings["order"], settings["depth"], settings["watermark"]) == ("sjf", 1, 0.05)
    assert EngineConfig.from_mapping(settings).prefix_caching is False
    assert preset_of("shoal") is PRESETS["shoal"]
    for wrong, match in (("shoal+order", "option=value"), ("shaol+order=sjf", "did you mean 'shoal'")):
        with pytest.raises(BadConfig, match=match):
            preset_of(wrong)


def test_the_default_size_of_a_pass_depends_on_the_device() -> None:
    config = EngineConfig()
    assert (config.settled("cpu").slots, config.settled("cpu").pass_tokens) == (64, 512)
    assert (config.settled("cuda").slots, config.settled("cuda").pass_tokens) == (512, 2048)
    told = EngineConfig(max_num_seqs=3, max_num_batched_tokens=70)
    assert told.settled("cuda") == told


def test_a_group_may_be_as_large_as_a_device_allows() -> None:
    config = EngineConfig(batching="static", group_size=128)
    assert config.settled("cuda").group_size == 128
    with pytest.raises(ImpossiblePair, match="max_num_seqs 64"):
        config.settled("cpu")


# ---- speculation ----------------------------------------------------------------------------------------------------


def test_every_drafter_can_be_named_and_every_name_is_a_drafter() -> None:
    assert set(NAMES) == {*DRAFTERS, MODEL}


def test_an_unknown_drafter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadConfig, match=r"unknown drafter 'sufix'.*off, ngram, suffix, grammar.*grammar\+suffix"):
        EngineConfig(speculate="sufix")
    with pytest.raises(BadConfig, match="draft_tokens must be at least 1"):
        EngineConfig(draft_tokens=0)


def test_synthetic_drafts_are_for_benchmarks_only() -> None:
    config = EngineConfig(speculate="synthetic:0.7")
    assert config.speculation.synthetic == 0.7
    with pytest.raises(BadConfig, match=r"synthetic:0\.7 is for benchmarks only"):
        config.for_answers()
    assert EngineConfig(speculate="suffix").for_answers().speculate == "suffix"


def test_a_server_refuses_synthetic_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--speculate", "synthetic:0.7"]) == 2
    assert "for benchmarks only" in capsys.readouterr().err


def test_a_scheduler_that_speculates_needs_a_drafter() -> None:
    with pytest.raises(EngineError, match="needs a drafter"):
        make_scheduler(EngineConfig(speculate="suffix"), Limits(100, 4, 64, 50), 100)
