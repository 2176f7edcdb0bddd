"""fp8 kernels in Triton against ref: on a GPU, or interpreted on the CPU where Triton is installed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import Batch, fp8
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import quantize_fp8
from tests.kernels.interpreted import DEVICE, triton_ops
from tests.kernels.layers import a_layer, in_one_call, on, run_layers, with_weights
from tests.kernels.ragged import Tables

from shoal.kernels.triton import products8, rows8  # isort: skip  (after the interpreter has been chosen)

REF = RefOps()
KIND = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-3


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.dtype == wanted.dtype
    assert found.isfinite().all()
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert difference < tolerance, float(difference)


def same_rows(found: rows8.Fp8Rows, wanted: Tensor) -> None:
    """The fp8 rows of `wanted`; computed in another order, a few numbers may round to their neighbours."""
    values, exponents = fp8.quantize_rows(wanted)
    ours = found.values.float() * found.scales.unsqueeze(-1)
    theirs = values.float() * fp8.scales_of(exponents).unsqueeze(-1)
    assert ((ours - theirs).abs() <= theirs.abs() / 7 + theirs.abs().amax(-1, keepdim=True) * 2.0**-15).all()
    assert (ours != theirs).float().mean() < 0.05
    assert (found.scales != fp8.scales_of(exponents)).float().mean() < 0.2


def raw(tokens: int, size: int) -> rows8.Product:
    """A product whose scales are due."""
    rows = torch.exp2(torch.randint(-9, -5, (tokens,)).float()).to(DEVICE)
    columns = (torch.rand(size) * 2.0**-6).to(DEVICE)
    values = (3e3 * torch.randn(tokens, size)).to(KIND).to(DEVICE)
    return rows8.Product(values, rows, columns, torch.randn(size).to(KIND).to(DEVICE))


def true(product: rows8.Product) -> Tensor:
    assert product.rows is not None
    assert product.columns is not None
    assert product.bias is not None
    return product.values.float() * product.rows.unsqueeze(-1) * product.columns + product.bias.float()


@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (3, 576), (5, 1024)])
def test_products_are_scaled_by_the_kernel_that_reads_them(tokens: int, size: int) -> None:
    torch.manual_seed(size)
    residual = (20 * torch.randn(tokens, size)).to(KIND).to(DEVICE)
    weight = torch.rand(size).to(KIND).to(DEVICE)
    for one in (None, raw(tokens, size)):
        sum_of = residual if one is None else (residual.float() + true(one)).to(KIND)
        ours = residual.clone()
        found = rows8.add_norm(ours, one, weight, 1e-5)
        close(ours, sum_of, 1e-3)
        same_rows(found, REF.rms_norm(ours, weight, 1e-5))
    one = raw(tokens, size)
    close(rows8.add(residual.clone(), one), (residual.float() + true(one)).to(KIND), 1e-3)
    both = true(one)
    same_rows(rows8.silu_mul(one), REF.silu_mul(both))
    found = rows8.quantize(residual)
    values, exponents = fp8.quantize_rows(residual)
    assert torch.equal(found.scales, fp8.scales_of(exponents))
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 32), (1040, 64), (4112, 16)])
def test_one_row(inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    weight = quantize_fp8(torch.randn(outputs, inputs, device=DEVICE))
    x, bias = torch.randn(1, inputs, device=DEVICE), torch.randn(outputs, device=DEVICE).to(KIND)
    values, exponents = fp8.quantize_rows(x)
    rows = rows8.Fp8Rows(values, fp8.scales_of(exponents))
    for one in (None, bias):
        found = products8.one_row(rows, weight, one, KIND, products8.one_row_shape(inputs, outputs))
        assert (found.rows, found.columns, found.bias) == (None, None, None)
        close(found.values, REF.linear(x, weight, one).to(KIND), 5e-3)


def new_cache(blocks: int, block: int, heads: int, dim: int) -> Tensor:
    data = torch.zeros(blocks, fp8.block_bytes(block, heads, dim), dtype=torch.uint8, device=DEVICE)
    return fp8.blocks_in(data, block, heads, dim)


def numbers(cache: Tensor) -> Tensor:
    return fp8.gathered(cache, torch.arange(len(cache), device=cache.device), torch.float32)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(6, 2, 64, 4), (9, 3, 80, 16), (4, 4, 16, 5)])
def test_rotate_and_store(scaled: bool, heads: int, kv_heads: int, dim: int, block: int) -> None:
    """With norms and without; raw products and finished ones; a slot below 0 stores nothing."""
    from shoal.kernels.triton.rows import rotate_and_store

    torch.manual_seed(dim)
    product = raw(7, (heads + 2 * kv_heads) * dim)
    qkv = true(product).to(KIND)
    angles = torch.randn(7, dim // 2, device=DEVICE)
    rope = (angles.cos(), angles.sin())
    weights = torch.rand(2, dim, device=DEVICE).to(KIND)
    slots = torch.randperm(20, device=DEVICE)[:7]
    slots[3] = -1
    for norms in (None, (weights[0], weights[1], 1e-6)):
        found, wanted = [tuple(new_cache(20 // block + 1, block, kv_heads, dim) for _ in "kv") for _ in range(2)]
        q = rotate_and_store(product if scaled else qkv, norms, rope, (found[0], found[1]), slots)
        close(q, REF.rotate_and_store(qkv.clone(), norms, rope, (wanted[0], wanted[1]), slots), 1e-2)
        for one, other in zip(found, wanted, strict=True):
            close(numbers(one), numbers(other), 2e-2)
            assert torch.equal((numbers(one) == 0).all(-1), (numbers(other) == 0).all(-1))
            assert (fp8.exponents_in(one) != fp8.exponents_in(other)).float().mean() < 0.1
            assert torch.equal(fp8.exponents_in(one) > 0, fp8.exponents_in(other) > 0)


@pytest.fixture(scope="module")
def ops() -> Any:
    return triton_ops()


@pytest.mark.parametrize("shape", [(4, 2, 64, 16), (2, 2, 80, 5), (7, 1, 64, 16), (16, 1, 64, 6)])
@pytest.mark.parametrize("window", [0, 70])
def test_attention(ops: Any, shape: tuple[int, int, int, int], window: int) -> None:
    """Decodes, rows that verify drafts, and prompts; scales differ from token to token."""
    heads, kv_heads, dim, block = shape
    pieces = [(at, past, new) for at, (past, new) in enumerate(zip([0, 60, 127, 190, 20], [2, 5, 1, 16, 33]))]  # noqa: B905
    tables = Tables([past + new for _, past, new in pieces], block, seed=3)
    batch: Batch = tables.batch(pieces)
    torch.manual_seed(heads)
    caches = [new_cache(tables.blocks, block, kv_heads, dim) for _ in "kv"]
    for cache in caches:
        slots = torch.arange(tables.blocks * block, device=DEVICE)
        spread = torch.exp2(torch.randn(len(slots), 1, 1, device=DEVICE))
        fp8.store(spread * torch.randn(len(slots), kv_heads, dim, device=DEVICE), cache, slots)
    q = torch.randn(batch.starts[-1], heads, dim, device=DEVICE).to(KIND)
    there = replace(batch, block_tables=batch.block_tables.clamp(max=2**31 - 1).to(torch.int32).to(DEVICE))
    found = ops.attention(q, caches[0], caches[1], there, dim**-0.5, window)
    here = replace(batch, block_tables=batch.block_tables.to(DEVICE))
    close(found, REF.attention(q, caches[0], caches[1], here, dim**-0.5, window))


@pytest.mark.slow  # where it is interpreted
@pytest.mark.parametrize("kept", [fp8.FP8, KIND])
@pytest.mark.parametrize(("normed", "biased"), [(False, False), (True, True)])
def test_whole_layers(ops: Any, kept: torch.dtype, normed: bool, biased: bool) -> None:
    """One row alone, and several; a KV cache in fp8 and in the type of the activations."""
    torch.manual_seed(int(normed))
    heads, kv_heads, dim = 4, 2, 32
    plain = [a_layer(KIND, heads, kv_heads, dim, normed, biased, 64, 96) for _ in range(2)]
    layers = [on(DEVICE, with_weights(layer, lambda weight: quantize_fp8(weight.dense()))) for layer in plain]
    tables = Tables([40, 9, 30], 16)
    made = [
        [
            (new_cache(tables.blocks, 16, kv_heads, dim), new_cache(tables.blocks, 16, kv_heads, dim))
            if kept == fp8.FP8
            else tuple(torch.zeros(2, tables.blocks, 16, kv_heads, dim, dtype=kept, device=DEVICE))
            for _ in layers
        ]
        for _ in range(2)
    ]
    for pieces in ([(0, 0, 30), (1, 0, 1), (2, 0, 9)], [(0, 30, 1), (1, 1, 1), (2, 9, 21)], [(0, 31, 1)]):
        batch = tables.batch(pieces)
        there = replace(
            batch,
            positions=batch.positions.to(DEVICE),
            slots=batch.slots.to(DEVICE),
            block_tables=batch.block_tables.clamp(max=tables.blocks - 1).to(torch.int32).to(DEVICE),
        )
        angles = torch.randn(len(batch.positions), dim // 2, device=DEVICE)
        rope = (angles.cos(), angles.sin())
        residual = torch.randn(len(batch.positions), 64, device=DEVICE).to(KIND)
        wanted = run_layers(
            REF, layers, residual.clone(), rope, replace(there, block_tables=there.block_tables.long()), made[0]
        )
        found = in_one_call(ops, layers, residual.clone(), rope, there, made[1])
        close(found, wanted, 4e-2)  # by roundings to fp8, which tip at other places
        one_by_one = run_layers(ops, layers, residual.clone(), rope, there, made[1])
        close(one_by_one, wanted, 4e-2)
