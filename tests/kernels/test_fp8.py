"""What fp8 means: rows with a power of two each, weights, and a KV cache with its exponents behind the values."""

import pytest
import torch

from shoal.kernels import fp8
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import DenseWeight, quantize_fp8
from shoal.models.spec import spec_from_config
from shoal.runner.kvstore import KVStore, bytes_per_block
from tests.kernels.ragged import Tables
from tests.models.test_spec import config

REF = RefOps()
E4M3 = 2.0**-4  # half the distance of two neighbours, relative


def test_a_scale_is_the_least_power_of_two_that_fits() -> None:
    largest = torch.tensor([448.0, 448.1, 1.0, 1.75, 1.7500001, 3e-3, 2.0**-120, 3e38, 0.0])
    scales = fp8.scales_of(fp8.exponents_for(largest))
    assert scales[:5].tolist() == [1.0, 2.0, 2.0**-8, 2.0**-8, 2.0**-7]
    assert torch.equal(scales.log2(), scales.log2().round())
    assert (largest <= 448 * scales.double()).all()
    assert (largest[:6] > 224 * scales[:6]).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e3])
def test_rows_come_back_with_the_precision_of_e4m3(kind: torch.dtype, size: float) -> None:
    x = (torch.randn(7, 33, generator=torch.Generator().manual_seed(1)) * size).to(kind)
    x[3] = 0
    values, exponents = fp8.quantize_rows(x)
    back = values.float() * fp8.scales_of(exponents).unsqueeze(-1)
    error = (back - x.float()).abs()
    least = x.float().abs().amax(-1, keepdim=True) * 2.0**-16  # subnormal numbers are as far apart everywhere
    assert (error <= torch.maximum(x.float().abs() * E4M3, least)).all()
    assert not back[3].any()


def test_one_row_does_not_depend_on_others() -> None:
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(2))
    values, exponents = fp8.quantize_rows(x)
    for row in range(6):
        alone, exponent = fp8.quantize_rows(x[row : row + 1])
        assert torch.equal(alone.view(torch.uint8)[0], values.view(torch.uint8)[row])
        assert exponent.item() == exponents[row].item()


def test_a_damaged_number_stays_visible() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = float("nan")
    values, _ = fp8.quantize_rows(x)
    assert values.float().isnan().tolist() == x.isnan().tolist()


def test_a_weight_is_rounded_per_output_and_multiplied_by_rounded_rows() -> None:
    source = torch.Generator().manual_seed(3)
    matrix, x = torch.randn(32, 48, generator=source), torch.randn(5, 48, generator=source)
    matrix[7] *= 1e4
    bias = torch.randn(32, generator=source)
    weight = quantize_fp8(matrix)
    assert weight.shape == (32, 48)
    assert weight.nbytes == 32 * 48 + 4 * 32
    assert torch.equal(weight.rows(torch.tensor([7, 1])), weight.dense()[[7, 1]])
    assert ((weight.dense() - matrix).abs() <= (matrix.abs() * E4M3).clamp(min=1e-2)).all()
    values, exponents = fp8.quantize_rows(x)
    rounded = values.float() * fp8.scales_of(exponents).unsqueeze(-1)
    wanted = REF.linear(rounded, DenseWeight(weight.dense()), bias)
    torch.testing.assert_close(REF.linear(x, weight, bias), wanted)
    residual = torch.randn(5, 32, generator=source)
    torch.testing.assert_close(REF.linear_add(x, weight, bias, residual), wanted + residual)


# ---- the KV cache ---------------------------------------------------------------------------------------------------


def made(blocks: int, block: int = 4, heads: int = 2, dim: int = 16) -> torch.Tensor:
    data = torch.zeros(blocks, fp8.block_bytes(block, heads, dim), dtype=torch.uint8)
    return fp8.blocks_in(data, block, heads, dim)


def test_values_and_exponents_share_the_memory_of_a_block() -> None:
    cache = made(5)
    assert cache.shape == (5, 4, 2, 16)
    assert cache.stride(0) == 144  # 4 × 2 × 17, in whole units of 16
    exponents = fp8.exponents_in(cache)
    assert exponents.shape == (5, 2, 4)
    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(4))
    slots = torch.tensor([3, 4, 9, 19, 0, 11])
    fp8.store(x, cache, slots)
    back = fp8.gathered(cache, torch.arange(5), torch.float32).flatten(0, 1)
    assert ((back[slots] - x).abs() <= (x.abs() * E4M3).clamp(min=1e-3)).all()
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert not back[others].any()
    raw = cache.view(torch.uint8)
    assert int((exponents > 0).sum()) == 12
    assert int((raw.flatten(0, 1).flatten(1) > 0).any(1).sum()) == 6


def test_what_is_stored_does_not_depend_on_how_a_prompt_was_cut() -> None:
    k, v = torch.randn(2, 9, 2, 16, generator=torch.Generator().manual_seed(5))
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(6))[:9]
    whole, cut = (made(5), made(5)), (made(5), made(5))
    REF.store_kv(k, v, *whole, slots)
    for first, end in ((0, 1), (1, 6), (6, 9)):
        REF.store_kv(k[first:end], v[first:end], *cut, slots[first:end])
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(fp8.exponents_in(one), fp8.exponents_in(other))


@pytest.mark.parametrize("width", [0, 3])
def test_attention_reads_the_rounded_keys_and_values(width: int) -> None:
    """Ragged, and over a rectangle."""
    pieces = [(0, 5, 3), (1, 0, 3)] if width else [(0, 5, 3), (1, 0, 7), (2, 12, 1)]
    tables = Tables([past + new for _, past, new in pieces], 4)
    batch = tables.batch(pieces)
    if width:
        from dataclasses import replace

        batch = replace(batch, width=width, block_tables=batch.block_tables.clamp(max=tables.blocks - 1))
    source = torch.Generator().manual_seed(7)
    stored, plain = [], []
    for _ in range(2):
        cache = made(tables.blocks)
        fp8.store(torch.randn(tables.blocks * 4, 2, 16, generator=source), cache, torch.arange(tables.blocks * 4))
        stored.append(cache)
        plain.append(fp8.gathered(cache, torch.arange(tables.blocks), torch.float32))
    q = torch.randn(len(batch.positions), 4, 16, generator=source)
    wanted = REF.attention(q, plain[0], plain[1], batch, 0.25, 0)
    torch.testing.assert_close(REF.attention(q, stored[0], stored[1], batch, 0.25, 0), wanted)


def test_a_store_counts_and_holds_the_scales() -> None:
    spec = spec_from_config(config())
    assert bytes_per_block(spec, 16, fp8.FP8) == 2 * spec.layers * 16 * spec.kv_heads * (spec.head_dim + 1)
    assert bytes_per_block(spec, 16, fp8.FP8) < 0.6 * bytes_per_block(spec, 16, torch.bfloat16)
    store = KVStore(spec, 6, 4, fp8.FP8, "cpu", host_blocks=2)
    assert store.host is not None
    assert store.data[:, :, 0].nbytes == store.host[:, :, 0].nbytes == bytes_per_block(spec, 4, fp8.FP8)
    k, v = torch.randn(2, 4, spec.kv_heads, spec.head_dim)
    REF.store_kv(k, v, *store.layers[1], torch.arange(8, 12))
    assert fp8.exponents_in(store.layers[1][0])[2].all()
    assert not fp8.exponents_in(store.layers[0][0]).any()
    assert store.data[1, :, 2].any()
    assert not store.data[1, :, [0, 1, 3, 4, 5]].any()
