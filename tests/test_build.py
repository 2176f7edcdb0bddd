"""Wiring: what cannot be built is refused before anything is loaded."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal import build as wiring
from shoal.build import build, check_memory, check_size, host_blocks, kv_blocks, make_limits, pick_device
from shoal.build_ranks import check_ranks, kv_over_ranks, visible_first
from shoal.build_types import as_stored, check_batch_invariant, check_quantization, fitting_fp8, kv_dtype
from shoal.config.engine import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.errors import BadConfig, ImpossiblePair, UnknownName
from shoal.kernels.fp8 import FP8
from shoal.models.formats import CheckpointFormat
from shoal.models.spec import ModelSpec, spec_from_config
from shoal.runner import threads
from shoal.runner.kvstore import bytes_per_block
from tests.story.models import SIZES, save_model


def test_auto_is_a_device_that_is_there() -> None:
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadConfig, match="no usable NVIDIA GPU"):
        pick_device("cuda")


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="known: auto, cpu, cuda"):
        pick_device("tpu")


# ---- memory limits --------------------------------------------------------------------------------------------------


@pytest.fixture
def spec() -> ModelSpec:
    return spec_from_config({"architectures": ["LlamaForCausalLM"], **SIZES})


def in_a_container(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    monkeypatch.setattr(wiring, "total_bytes", lambda: total)
    monkeypatch.setattr(wiring, "available_bytes", lambda: free)
    monkeypatch.setattr(wiring, "memory_owner", lambda: "this container (its control group)")


def test_the_kv_cache_is_sized_by_what_the_container_has_left(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    block = bytes_per_block(spec, 16, torch.float32)
    in_a_container(monkeypatch, 100 * block, 40 * block)
    assert kv_blocks(EngineConfig(block_size=16), spec, torch.float32) == 20
    assert kv_blocks(EngineConfig(block_size=16, kv_share=0.25), spec, torch.float32) == 10
    swapping = EngineConfig(block_size=16, when_short="swap")
    assert host_blocks(swapping, spec, torch.float32, 20) == 10, "host memory is the same memory: a quarter of it"


def test_no_memory_left_says_so(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    in_a_container(monkeypatch, 2**30, 1000)
    with pytest.raises(BadConfig, match=r"does not fit; this container \(its control group\) has 0 MiB left"):
        kv_blocks(EngineConfig(), spec, torch.float32)
    with pytest.raises(BadConfig, match="raise --kv-memory"):
        kv_blocks(EngineConfig(kv_memory=100), spec, torch.float32)


def test_what_the_container_can_never_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_container(monkeypatch, 2**30, 2**30)
    with pytest.raises(BadConfig, match=r"asks for 2.0 GiB.*: this container .* has 1.0 GiB in total"):
        check_memory(EngineConfig(kv_memory=2**31), "cpu")
    with pytest.raises(BadConfig, match=r"weights take 1\.9 GiB in float32, and this container .* 1\.0 GiB.*; do that"):
        check_size(500_000_000, torch.float32, "cpu", "do that")
    check_size(500_000_000, torch.bfloat16, "cpu", "")


def test_a_model_larger_than_the_container_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model")
    in_a_container(monkeypatch, 2**16, 2**16)
    with pytest.raises(BadConfig, match=r"weights take .* choose a smaller model, or --dtype bfloat16"):
        build(EngineConfig(model=str(model), dtype="float32", device="cpu"))


def test_a_short_context_for_lack_of_memory_is_a_warning(caplog: pytest.LogCaptureFixture, spec: ModelSpec) -> None:
    with caplog.at_level(logging.INFO):
        assert make_limits(EngineConfig(), spec, 64).max_model_len == 64
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "memory is short" in caplog.text


# ---- CPUs that change -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two CPUs")
def test_a_running_engine_follows_its_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "LOOK_EVERY_S", 0.0)
    before = torch.get_num_threads()
    model = save_model(tmp_path / "model")
    built = build(EngineConfig(model=str(model), device="cpu", kv_memory=2**20, max_model_len=128))
    try:
        worker = built.loop.executor._worker  # type: ignore[attr-defined]

        def run(name: str) -> list[int]:
            built.loop.submit(Request(name, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8), seed=0))
            tokens: list[int] = []
            while not built.loop.idle:
                tokens += built.loop.step().tokens
            return tokens

        wanted = run("all")
        cpus = sorted(os.sched_getaffinity(0))
        worker.submit(os.sched_setaffinity, 0, cpus[:1]).result()
        assert run("one") == wanted
        assert worker.submit(torch.get_num_threads).result() == 1
        worker.submit(os.sched_setaffinity, 0, cpus).result()
        assert run("all again") == wanted
        assert worker.submit(torch.get_num_threads).result() >= 1
    finally:
        built.loop.close()
        torch.set_num_threads(before)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadConfig, match="tensor_parallel_size 2 needs a GPU for each rank, and 1 can be used here"):
        check_ranks(EngineConfig(tensor_parallel_size=2), spec, "cuda", threads.ThreadChoice(1))


def test_more_ranks_than_cpus_are_warned_of(spec: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_ranks(EngineConfig(tensor_parallel_size=2), spec, "cpu", threads.ThreadChoice(10_000))
    assert "2 ranks of 10000 threads share" in caplog.text


def test_the_ranks_must_be_one_or_more() -> None:
    with pytest.raises(BadConfig, match="tensor_parallel_size must be at least 1, not 0"):
        EngineConfig(tensor_parallel_size=0)


def test_a_draft_model_over_ranks_is_refused() -> None:
    with pytest.raises(ImpossiblePair, match="a draft model is not split over ranks; use another drafter"):
        EngineConfig(tensor_parallel_size=2, speculate="draft", draft_model="small")


def test_a_kv_head_on_several_ranks_takes_memory_on_each(spec: ModelSpec) -> None:
    assert spec.kv_heads == 2
    assert [kv_over_ranks(spec, size).kv_heads for size in (1, 2, 4)] == [2, 2, 4]


def test_each_rank_sees_its_gpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert visible_first(2) == {"CUDA_VISIBLE_DEVICES": "7,4,5"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_first(1) == {"CUDA_VISIBLE_DEVICES": "1,0,2"}


# ---- fp8 ------------------------------------------------------------------------------------------------------------


def test_fp8_counts_in_the_size_of_the_kv_cache(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    block = bytes_per_block(spec, 16, FP8)
    in_a_container(monkeypatch, 100 * block, 40 * block)
    config = EngineConfig(block_size=16, kv_dtype="fp8")
    assert kv_dtype(config, torch.float32) == FP8
    assert kv_dtype(EngineConfig(), torch.bfloat16) == torch.bfloat16
    assert kv_blocks(config, spec, FP8) == 20


def test_fp8_computes_in_bfloat16_on_a_gpu() -> None:
    """On a CPU the plain meaning is computed in any type."""
    fp8, kv = EngineConfig(quantization="fp8"), EngineConfig(kv_dtype="fp8", dtype="float16")
    assert fitting_fp8(fp8, torch.float16, "cuda") == torch.bfloat16
    assert fitting_fp8(fp8, torch.float16, "cpu") == torch.float16
    assert fitting_fp8(EngineConfig(), torch.float16, "cuda") == torch.float16
    assert fitting_fp8(EngineConfig(kv_dtype="fp8", dtype="float32"), torch.float32, "cuda") == torch.float32
    with pytest.raises(BadConfig, match="--kv-dtype fp8 computes in bfloat16 on a GPU, not in float16"):
        fitting_fp8(kv, torch.float16, "cuda")


def test_int8_on_a_gpu_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"^quantization int8 works on CPUs only; use --quantization fp8 on a GPU"):
        check_quantization(EngineConfig(quantization="int8"), "cuda")
    draft = EngineConfig(speculate="draft", draft_quantization="int8")
    with pytest.raises(BadConfig, match="draft_quantization int8 works on CPUs only; leave it out on a GPU"):
        check_quantization(draft, "cuda")
    check_quantization(draft, "cpu")
    check_quantization(EngineConfig(quantization="fp8"), "cuda")
    check_quantization(EngineConfig(quantization="int4"), "cpu")


def test_kernels_without_a_fixed_order_of_sums_are_not_batch_invariant() -> None:
    with pytest.raises(BadConfig, match="batch_invariant with quantization=int4: on a GPU"):
        check_batch_invariant(EngineConfig(quantization="int4", batch_invariant=True), "cuda")
    for config in (EngineConfig(quantization="fp8"), EngineConfig(kv_dtype="fp8")):
        with pytest.raises(BadConfig, match="batch_invariant with fp8: a CPU"):
            check_batch_invariant(replace(config, batch_invariant=True), "cpu")
        check_batch_invariant(replace(config, batch_invariant=True), "cuda")
    check_batch_invariant(EngineConfig(quantization="int4", batch_invariant=True), "cpu")


def test_int4_over_ranks_is_refused() -> None:
    with pytest.raises(ImpossiblePair, match="quantization=int4 with tensor_parallel_size=2: blocks of 4-bit weights"):
        EngineConfig.from_mapping({"quantization": "int4", "tensor_parallel_size": 2})


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_dtype": "fp8"}])
def test_fp8_over_ranks_is_refused(options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(ImpossiblePair, match=f"{name}=fp8 with tensor_parallel_size=2: fp8 kernels do not add up over"):
        EngineConfig.from_mapping({**options, "tensor_parallel_size": 2})


def test_a_checkpoint_in_fp8_stays_so_on_a_gpu() -> None:
    plain, form = EngineConfig(), CheckpointFormat("fp8")
    assert as_stored(plain, form, "cuda").quantization == "fp8"
    assert as_stored(plain, form, "cpu") == as_stored(plain, None, "cuda") == plain
    assert as_stored(plain, CheckpointFormat("awq"), "cuda") == plain
    split = EngineConfig(tensor_parallel_size=2)
    assert as_stored(split, form, "cpu") == split
    with pytest.raises(BadConfig, match="the checkpoint is in FP8, and tensor_parallel_size is 2"):
        as_stored(split, form, "cuda")


def test_a_draft_model_keeps_its_kv_in_the_computed_type(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    options = {"kv_dtype": "fp8", "speculate": "draft", "draft_layers": 1, "dtype": "float32"}
    sizes = {"model": str(model), "device": "cpu", "kv_memory": 2**20, "max_model_len": 128, "max_num_seqs": 4}
    built = build(EngineConfig.from_mapping({**options, **sizes}))
    (beside,) = built.loop._beside
    stores = [executor.runner.kv for executor in (built.loop.executor, beside)]  # type: ignore[attr-defined]
    assert [store.layers[0][0].dtype for store in stores] == [FP8, torch.float32]
    assert sum(store.data.nbytes for store in stores) <= 2**20 * 1.05  # and a block for padding in each
    built.loop.submit(Request("a", [5, 6, 7, 8] * 9, SamplingParams(temperature=0.0, max_tokens=8), seed=0))
    ends = []
    while not built.loop.idle:
        ends += built.loop.step().finished
    assert [end.error for end in ends] == [""]
    built.loop.close()


def test_fp8_on_a_cpu_says_that_it_is_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_model(tmp_path / "model")
    options = {"quantization": "fp8", "kv_dtype": "fp8", "when_short": "swap", "host_kv_memory": 2**20}
    sizes = {"model": str(model), "device": "cpu", "kv_memory": 2**20, "max_model_len": 128}
    with caplog.at_level(logging.WARNING):
        built = build(EngineConfig.from_mapping({**options, **sizes}))
    assert "--quantization int8 is fast on CPUs" in caplog.text
    found = built.loop.executor.runner.kv  # type: ignore[attr-defined]
    assert found.layers[0][0].dtype == FP8
    assert found.host is not None
    for prompt in ([5, 6, 7], [5, 6, 7, 8] * 9, [5, 6, 7, 8] * 9 + [4]):  # the last finds the prefix of the one before
        built.loop.submit(Request(f"{prompt}", prompt, SamplingParams(temperature=0.0, max_tokens=4), seed=0))
        ends = []
        while not built.loop.idle:
            ends += built.loop.step().finished
        assert [end.error for end in ends] == [""]
    assert ends[0].cached_tokens > 0
    built.loop.close()
