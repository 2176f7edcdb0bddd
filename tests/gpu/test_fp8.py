"""fp8 on a GPU: kernels against ref at the sizes of real models, layers against ref, and whole engines.

A rounding to fp8 that tips makes a number differ by a sixteenth, and different kernels add in different orders: so
layers are compared by norm, and engines by the logprobs that they give to the same tokens.
"""

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.params import SamplingParams
from shoal.kernels import Batch, fp8
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import Fp8Weight, quantize_fp8
from tests.gpu.drive import Answers, ask, greedy, opened
from tests.gpu.test_engine import ragged_prompts
from tests.kernels.layers import a_layer, in_one_call, run_layers, with_weights
from tests.kernels.ragged import Tables
from tests.models.test_families import saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REF = RefOps()


@pytest.fixture(scope="module")
def ops() -> Any:
    from shoal.kernels.triton import TritonOps

    return TritonOps()


def difference(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-9))


def new_cache(blocks: int, kv_heads: int, dim: int, block: int = 16) -> Tensor:
    data = torch.zeros(blocks, fp8.block_bytes(block, kv_heads, dim), dtype=torch.uint8, device="cuda")
    return fp8.blocks_in(data, block, kv_heads, dim)


def bytes_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    return cache.view(torch.uint8).clone(), fp8.exponents_in(cache).clone()


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (1024, 4096), (48, 16), (1040, 2064)])
@pytest.mark.parametrize("count", [1, 2, 7, 64, 129, 1100])
def test_every_way_of_a_product(inputs: int, outputs: int, count: int) -> None:
    from shoal.kernels.triton import products8, rows8

    torch.manual_seed(count)
    weight = quantize_fp8(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5)
    arbitrary = Fp8Weight(weight.values, weight.scales * torch.rand(outputs, device="cuda"))
    x = torch.randn(count, inputs, device="cuda").to(torch.bfloat16)
    bias = torch.randn(outputs, device="cuda").to(torch.bfloat16)
    made = rows8.quantize(x)
    values, exponents = fp8.quantize_rows(x)
    assert torch.equal(made.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(made.scales, fp8.scales_of(exponents))
    for one in (weight, arbitrary):
        found = [products8.unit(made, one, bias, torch.bfloat16), products8.unit(made, one, bias, torch.float32)]
        found += [products8.rowwise(made, one, bias), products8.product(made, one, bias, torch.bfloat16)]
        for product in found:
            zero = torch.zeros(count, outputs, device="cuda")
            assert difference(rows8.add(zero, product), REF.linear(x.float(), one, bias)) < 5e-3


@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (2, 576), (37, 1024), (300, 4096), (5, 14336), (3, 11008)])
def test_row_kernels(tokens: int, size: int) -> None:
    from shoal.kernels.triton import rows8

    torch.manual_seed(size)
    rows, columns = torch.exp2(torch.randint(-9, -5, (tokens,)).float()).cuda(), torch.rand(size).cuda() / 64
    values = (3e3 * torch.randn(tokens, size)).to(torch.bfloat16).cuda()
    product = rows8.Product(values, rows, columns, None)
    true = values.float() * rows.unsqueeze(1) * columns
    residual, weight = torch.randn(2, tokens, size, device="cuda").to(torch.bfloat16)
    ours = residual.clone()
    found = rows8.add_norm(ours, product, weight[0], 1e-5)
    assert difference(ours, residual.float() + true) < 5e-3
    dense = found.values.float() * found.scales.unsqueeze(1)
    normed, exponents = fp8.quantize_rows(REF.rms_norm(ours, weight[0], 1e-5))
    assert difference(dense, normed.float() * fp8.scales_of(exponents).unsqueeze(1)) < 2e-2
    found = rows8.silu_mul(product)
    assert difference(found.values.float() * found.scales.unsqueeze(1), REF.silu_mul(true)) < 4e-2


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (32, 8)])
def test_keys_and_values_are_stored_as_ref_stores_them(kind: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    """Bit for bit the same whole and in pieces; a slot below 0 stores nothing."""
    from shoal.kernels.triton.rows import rotate_and_store

    torch.manual_seed(dim + heads)
    qkv = torch.randn(11, (heads + 2 * kv_heads) * dim, device="cuda").to(kind)
    angles = torch.randn(11, dim // 2, device="cuda")
    weights = torch.rand(2, dim, device="cuda").to(kind)
    slots = torch.randperm(60, device="cuda")[:11]
    slots[3] = -1
    for block, norms in ((16, None), (5, (weights[0], weights[1], 1e-6))):
        whole, cut, wanted = [tuple(new_cache(13, kv_heads, dim, block) for _ in "kv") for _ in range(3)]
        q = rotate_and_store(qkv, norms, (angles.cos(), angles.sin()), (whole[0], whole[1]), slots)
        rope = (angles.cos(), angles.sin())
        assert difference(q, REF.rotate_and_store(qkv, norms, rope, (wanted[0], wanted[1]), slots)) < 1e-2
        for first, end in ((0, 1), (1, 8), (8, 11)):
            part = (angles[first:end].cos(), angles[first:end].sin())
            rotate_and_store(qkv[first:end], norms, part, (cut[0], cut[1]), slots[first:end])
        for one, two, three in zip(whole, cut, wanted, strict=True):
            for ours, again in zip(bytes_of(one), bytes_of(two), strict=True):
                assert torch.equal(ours, again)
            every = torch.arange(13, device="cuda")
            numbers = [fp8.gathered(cache, every, torch.float32) for cache in (one, three)]
            assert difference(*numbers) < 1e-2
            assert torch.equal(fp8.exponents_in(one) > 0, fp8.exponents_in(three) > 0)


def on_gpu(batch: Batch, kind: torch.dtype = torch.int32) -> Batch:
    return replace(
        batch,
        positions=batch.positions.cuda(),
        slots=batch.slots.cuda(),
        block_tables=batch.block_tables.clamp(max=2**31 - 1).to(kind).cuda(),
    )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64), (4, 2, 80), (4, 1, 256), (7, 1, 96)])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("block", [16, 32, 4])
def test_attention(ops: Any, kind: torch.dtype, shape: tuple[int, int, int], window: int, block: int) -> None:
    """Decodes, rows that verify drafts and prompts of odd lengths; scales differ from token to token."""
    heads, kv_heads, dim = shape
    source = random.Random(dim)
    pieces = [(0, 0, 1), (1, 63, 1), (2, 64, 1), (3, 3001, 1), (4, 200, 5), (5, 0, 16), (6, 0, 333), (7, 130, 77)]
    pieces += [(at, source.randint(0, 700), 1) for at in range(8, 40)]
    tables = Tables([past + new for _, past, new in pieces], block, seed=3)
    batch = tables.batch(pieces)
    torch.manual_seed(heads)
    caches = [new_cache(tables.blocks, kv_heads, dim, block) for _ in "kv"]
    for cache in caches:
        spread = torch.exp2(torch.randn(tables.blocks * block, kv_heads, 1, device="cuda"))
        x = spread * torch.randn(tables.blocks * block, kv_heads, dim, device="cuda")
        fp8.store(x, cache, torch.arange(tables.blocks * block, device="cuda"))
    q = torch.randn(batch.starts[-1], heads, dim, device="cuda").to(kind)
    found = ops.attention(q, caches[0], caches[1], on_gpu(batch), dim**-0.5, window)
    wanted = REF.attention(q, caches[0], caches[1], on_gpu(batch, torch.int64), dim**-0.5, window)
    assert difference(found, wanted) < (2e-2 if kind == torch.bfloat16 else 1e-3)


# ---- layers ---------------------------------------------------------------------------------------------------------


def moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return replace(value, **{one.name: moved(getattr(value, one.name)) for one in fields(value)})


@pytest.mark.parametrize("kept", [fp8.FP8, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "normed", "biased"),
    [
        ((32, 8, 128, 4096, 14336), False, False),
        ((16, 8, 128, 1024, 3072), True, False),
        ((9, 3, 64, 576, 1536), False, True),
    ],
    ids=["llama-8b", "qwen3-0.6b", "smollm2"],
)
def test_a_layer(ops: Any, kept: torch.dtype, shape: tuple[int, ...], normed: bool, biased: bool) -> None:
    """Prompts, decodes, one row; against ref in fp8, and against the bfloat16 that was rounded."""
    heads, kv_heads, dim, hidden, inner = shape
    torch.manual_seed(hidden)
    plain = moved(a_layer(torch.bfloat16, heads, kv_heads, dim, normed, biased, hidden, inner))
    layer = with_weights(plain, lambda weight: quantize_fp8(weight.dense()))
    tables = Tables([340, 9, 130], 16)

    def cache(kind: torch.dtype) -> Any:
        if kind == fp8.FP8:
            return [(new_cache(tables.blocks, kv_heads, dim), new_cache(tables.blocks, kv_heads, dim))]
        made = torch.zeros(2, tables.blocks, 16, kv_heads, dim, dtype=kind, device="cuda")
        return [(made[0], made[1])]

    ours, theirs, unrounded, alone = cache(kept), cache(kept), cache(torch.bfloat16), cache(kept)
    for pieces in ([(0, 0, 300), (1, 0, 1), (2, 0, 99)], [(0, 300, 1), (1, 1, 1), (2, 99, 20)], [(0, 301, 1)]):
        batch = on_gpu(tables.batch(pieces))
        angles = torch.randn(len(batch.positions), dim // 2, device="cuda")
        rope = (angles.cos(), angles.sin())
        residual = torch.randn(len(batch.positions), hidden, device="cuda").to(torch.bfloat16)
        wide = replace(batch, block_tables=batch.block_tables.clamp(max=tables.blocks - 1).long())
        wanted = run_layers(REF, [layer], residual.clone(), rope, wide, theirs)
        whole = run_layers(REF, [plain], residual.clone(), rope, wide, unrounded)
        found = in_one_call(ops, [layer], residual.clone(), rope, batch, ours)
        one_by_one = run_layers(ops, [layer], residual.clone(), rope, batch, alone)
        # what the layer adds, not the residual that it is added to
        assert difference(found - residual, wanted - residual) < 4e-2
        assert difference(one_by_one - residual, wanted - residual) < 4e-2
        assert difference(found - residual, whole - residual) < 0.1


# ---- engines --------------------------------------------------------------------------------------------------------


def told(built: Any, prompts: list[list[int]]) -> Tensor:
    """Logprobs of all prompt tokens."""
    found: Answers = ask(built, prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    return torch.tensor([one.logprob for key in sorted(found.prompt_logprobs) for one in found.prompt_logprobs[key][1]])


FORMS: list[dict[str, Any]] = [
    {"quantization": "fp8"}, {"kv_dtype": "fp8"}, {"quantization": "fp8", "kv_dtype": "fp8"},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=["weights", "kv", "both"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_an_engine_says_what_the_plain_meaning_says(name: str, form: dict[str, Any], tmp_path: Path) -> None:
    """The CPU computes fp8 by ref. Both are as near to float32 without fp8 as rounding allows."""
    saved(name, tmp_path)
    prompts = ragged_prompts(9, seed=3, longest=150)
    with opened(tmp_path, dtype="float32", device="cpu", **form) as built:
        wanted = told(built, prompts)
    with opened(tmp_path, dtype="float32") as built:
        unrounded = told(built, prompts)
    for kind in ("float32", "bfloat16"):
        with opened(tmp_path, dtype=kind, **form) as built:
            found = told(built, prompts)
            assert built.loop.executor.model.dtype == getattr(torch, kind)  # type: ignore[attr-defined]
        near = float((wanted - unrounded).abs().mean())
        # another order of sums tips roundings to fp8, each by a whole step; all tipped at random would be 1.4 × near
        assert (found - wanted).abs().mean() < (1.0 if kind == "bfloat16" else 0.5) * near + 0.005
        assert (found - unrounded).abs().mean() < 1.5 * near + 0.01


@pytest.mark.parametrize("form", FORMS, ids=["weights", "kv", "both"])
def test_chunks_preemption_swap_and_cached_prefixes(form: dict[str, Any], tmp_path: Path) -> None:
    """Kernels for other numbers of rows add in another order, so a rounding may tip: nearly all answers are equal."""
    saved("llama", tmp_path)
    prompts = ragged_prompts(24, seed=2, longest=300)
    prompts += [[*prompt, 1, 2, 3] for prompt in prompts[:6]]
    block = 16 * 2 * 2 * 2 * (17 if "kv_dtype" in form else 64)  # tokens, layers, keys and values, KV heads
    tight: dict[str, Any] = {"kv_memory": 70 * block, "watermark": 0.0}
    swap = {**tight, "when_short": "swap", "host_kv_memory": 2**24}
    wanted: list[list[int]] = []
    for options in (
        {"prefix_caching": False},
        {"max_num_batched_tokens": 48},
        {"depth": 1},
        tight,
        swap,
        {"block_size": 32},
    ):
        with opened(tmp_path, dtype="float32", max_model_len=400, **form, **options) as built:
            found = ask(built, prompts, greedy(24))
            again = ask(built, prompts, greedy(24))
            assert (found.preemptions > 0) == ("kv_memory" in options)
            assert (again.cached > 0) == ("prefix_caching" not in options)
            assert (found.blocks_in > 0) == ("host_kv_memory" in options)
        wanted = wanted or found.of(30)
        for answers in (found.of(30), again.of(30)):
            assert sum(one == other for one, other in zip(answers, wanted, strict=True)) >= 27


def test_swapped_blocks_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Values and exponents: everything in the blocks that were copied out and in again."""
    from shoal.core.plan import BlockCopy

    saved("llama", tmp_path)
    with opened(tmp_path, kv_dtype="fp8", when_short="swap", host_kv_memory=2**22) as built:
        ask(built, ragged_prompts(8, seed=2, longest=100), greedy(8))
        runner = built.loop.executor.runner  # type: ignore[attr-defined]
        before = runner.kv.data.clone()
        assert fp8.exponents_in(runner.kv.layers[0][0]).any()
        runner.copier.submit(BlockCopy(1, (0, 3, 5), (2, 1, 0), "out"))
        runner.copier.take(all_of_them=True)
        runner.kv.data[:, :, [0, 3, 5]] = 7
        runner.copier.submit(BlockCopy(2, (2, 1, 0), (0, 3, 5), "in"))
        runner.copier.take(all_of_them=True)
        assert torch.equal(runner.kv.data, before)


def test_the_same_requests_give_the_same_tokens(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    prompts = ragged_prompts(20, seed=5, longest=200)
    options: dict[str, Any] = {"prefix_caching": False, "quantization": "fp8", "kv_dtype": "fp8"}
    with opened(tmp_path, **options) as built:
        first = ask(built, prompts, greedy(24)).tokens
        assert ask(built, prompts, greedy(24)).tokens == first


def test_float16_is_refused(tmp_path: Path) -> None:
    from shoal.errors import BadConfig

    saved("llama", tmp_path)
    with pytest.raises(BadConfig, match="use --dtype bfloat16"), opened(tmp_path, dtype="float16", kv_dtype="fp8"):
        pass
