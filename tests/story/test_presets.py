"""Every preset, and odd combinations of axes, give every request the same greedy tokens, in float32; with drafts, too,
where the layout is ragged."""

import random
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from shoal.config.presets import PRESETS
from tests.drafting import drafting
from tests.models.test_families import SIZES, saved

ODD = {
    "padded continuous, chunked": {"layout": "padded", "chunk_tokens": 5},
    "shrinking, exclusive, predicted": {"layout": "shrink", "prefill": "exclusive", "memory": "predict"},
    "static, ragged, in chunks": {"batching": "static", "group_size": 3, "chunk_tokens": 4},
    "dynamic, shrinking, on demand": {"batching": "dynamic", "group_size": 5, "window_ms": 1.0, "layout": "shrink"},
    "padded, three in flight": {"layout": "padded", "prefill": "inline", "depth": 3},
}
ONE_ENGINE = {name: preset for name, preset in PRESETS.items() if preset.settings["prefill"] != "disaggregated"}
SETTINGS = {name: {"preset": name} for name in ONE_ENGINE} | ODD
RAGGED = [name for name, preset in ONE_ENGINE.items() if preset.settings["layout"] == "ragged"]
RAGGED += ["static, ragged, in chunks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    saved("mistral-window", path)  # a sliding window, so that the padded mask has to know about it
    return path


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    source = random.Random(3)
    prompts = [[source.randrange(SIZES["vocab_size"]) for _ in range(1 + 7 * number)] for number in range(9)]
    prompts[5] = prompts[7][:20] + prompts[5]
    outputs = [source.randint(1, 24) for _ in prompts]
    return prompts, [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    prompts, params = requests()
    with LLM(folder, dtype="float32", kv_memory="16MiB") as llm:
        return [llm.generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("memory", ["2MiB", "60KiB"])
def test_the_same_tokens(name: str, memory: str, folder: Path, expected: list[list[int]]) -> None:
    options = {"group_size": 4, **SETTINGS[name]}
    prompts, params = requests()
    with LLM(folder, dtype="float32", kv_memory=memory, check=True, max_num_seqs=6, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert llm.loop.scheduler.kv.pool.held == 0


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("memory", "depth"), [("2MiB", 2), ("60KiB", 1)])
def test_the_same_tokens_with_drafts(
    name: str, memory: str, depth: int, folder: Path, expected: list[list[int]]
) -> None:
    options = {"group_size": 4, "speculate": "grammar+suffix", "depth": depth, **SETTINGS[name]}
    prompts, params = requests()
    with LLM(folder, dtype="float32", kv_memory=memory, check=True, max_num_seqs=6, **options) as llm:
        with drafting(llm) as drafts:
            outputs = llm.generate(prompts, params)
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert llm.loop.scheduler.kv.pool.held == 0
    assert min(drafts.accepted["suffix"], drafts.rejected) > 1


def test_padding_is_counted_by_the_runner(folder: Path) -> None:
    """The closed formula, this time on the real rectangle: 4 rows, 60 passes, 110 of 240 positions useful."""
    outputs = (60, 10, 30, 10)
    with LLM(folder, dtype="float32", kv_memory="16MiB", preset="fastertransformer", group_size=4) as llm:
        batch = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in outputs]
        padded = useful = 0
        step = llm.loop.step

        def counted(until_s: float | None = None):  # type: ignore[no-untyped-def]
            nonlocal padded, useful
            events = step(until_s)
            padded, useful = padded + events.padded_tokens, useful + events.computed_tokens
            return events

        llm.loop.step = counted  # type: ignore[method-assign]
        llm.generate([[1], [2], [3], [4]], batch)
    assert (useful, useful + padded) == (110, 240)
