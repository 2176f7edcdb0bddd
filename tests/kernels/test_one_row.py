"""All layers of a pass with one row against ref: on a GPU, or interpreted on the CPU where Triton is installed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.kernels.ref import RefOps
from shoal.runner.cuda import REHEARSED
from tests.kernels.interpreted import DEVICE, PROCESSORS, triton_ops
from tests.kernels.layers import a_layer, in_one_call, on, run_layers
from tests.kernels.ragged import Tables

from shoal.kernels.triton import AttentionTables, attention, one_row  # isort: skip  (after the interpreter has been chosen)

REF = RefOps()
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
KINDS = list(TOLERANCE) if DEVICE == "cuda" else [torch.float16]  # the interpreter has no bfloat16


@pytest.fixture(scope="module")
def ops() -> Any:
    return triton_ops()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert difference < TOLERANCE[wanted.dtype], float(difference)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "wide"), [(96, 24), (576, 40), (2048, 16), (2100, 16), (4096, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_a_normed_row(size: int, wide: int, biased: bool, kind: Any) -> None:
    """As norm, product and SwiGLU one after the other, of sizes that fill no tile."""
    torch.manual_seed(size)
    x, norm = 3 * torch.randn(1, size).to(kind), torch.rand(size).to(kind)
    weight = (torch.randn(2 * wide, size) * size**-0.5).to(kind)
    bias = torch.randn(2 * wide).to(kind) if biased else None
    both = torch.nn.functional.linear(REF.rms_norm(x, norm, 1e-6).float(), weight.float()).to(kind)
    if bias is not None:
        both = (both.float() + bias.float()).to(kind)
    bias = None if bias is None else bias.to(DEVICE)
    for gated, wanted in ((False, both), (True, REF.silu_mul(both))):
        found = one_row.normed(x.to(DEVICE), norm.to(DEVICE), 1e-6, weight.to(DEVICE), bias, gated)
        close(found.cpu(), wanted)


@pytest.mark.slow  # for the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "normed", "biased"), [(64, False, False), (64, True, True), (32, True, False)])
def test_whole_layers(ops: Any, dim: int, normed: bool, biased: bool, kind: Any) -> None:
    """Token after token, with heads whose attention is computed here and others."""
    torch.manual_seed(dim)
    heads, kv_heads, hidden = 4, 2, 64
    plain = [a_layer(kind, heads, kv_heads, dim, normed, biased, hidden, 96) for _ in range(2)]
    layers = [on(DEVICE, layer) for layer in plain]
    tables = Tables([4], 2)
    caches = torch.zeros(2, len(layers), 2, tables.blocks, 2, kv_heads, dim, dtype=kind)
    wanted_kv = [(one[0], one[1]) for one in caches[0]]
    there_kv = [(one[0], one[1]) for one in caches[1].to(DEVICE)]
    for past in range(3):
        batch = tables.batch([(0, past, 1)])
        there = replace(
            batch,
            positions=batch.positions.to(DEVICE),
            slots=batch.slots.to(DEVICE),
            block_tables=batch.block_tables.to(torch.int32).to(DEVICE),
        )
        angles = torch.randn(1, dim // 2)
        rope = angles.cos(), angles.sin()
        residual = torch.randn(1, hidden).to(kind)
        wanted = run_layers(REF, plain, residual.clone(), rope, batch, wanted_kv)
        rope_there = rope[0].to(DEVICE), rope[1].to(DEVICE)
        found = in_one_call(ops, layers, residual.to(DEVICE), rope_there, there, there_kv)
        close(found.cpu(), wanted)
        close(
            caches[1].cpu() if DEVICE == "cpu" else torch.stack([torch.stack(one) for one in there_kv]).cpu(), caches[0]
        )


def test_a_pass_of_padding_changes_nothing(ops: Any) -> None:
    """As graphs are recorded: no context, no slot; and a decode may stand anywhere among padding."""
    kind, dim, kv_heads, heads = torch.float16, 64, 2, 4
    tables = Tables([9], 4)
    batch = tables.batch([(0, 8, 1)])
    torch.manual_seed(1)
    cache = torch.randn(2, tables.blocks, 4, kv_heads, dim).to(kind)
    qkv = torch.randn(1, (heads + 2 * kv_heads) * dim).to(kind)
    rope = torch.ones(1, dim // 2), torch.zeros(1, dim // 2)
    q = REF.rotate_and_store(qkv, None, rope, (wanted := cache.clone()).unbind(), batch.slots)
    answer = REF.attention(q, wanted[0], wanted[1], batch, 0.125, 0)
    blocks = batch.block_tables.to(torch.int32).to(DEVICE)
    for context, slots in ((0, torch.tensor([-1])), (9, batch.slots)):
        decodes = torch.zeros(4, 4, dtype=torch.int32)
        decodes[1, 3] = context
        made = AttentionTables(blocks, decodes.to(DEVICE), torch.zeros(5, 0, dtype=torch.int32, device=DEVICE))
        there = replace(batch, slots=slots.to(DEVICE), block_tables=blocks, prepared=made)
        found_cache = cache.clone().to(DEVICE)
        on_device = rope[0].to(DEVICE), rope[1].to(DEVICE)
        found = ops.attention_of_one(qkv.to(DEVICE), None, on_device, found_cache.unbind(), there, 0.125, 0)
        assert not ops._arrived[: 4 * kv_heads].any()
        if context:
            close(found.cpu(), answer)
        assert torch.equal(found_cache.cpu(), wanted if context else cache)


@pytest.mark.parametrize("kv_heads", range(1, 33))
def test_every_decode_kernel_is_compiled_before_it_is_needed(kv_heads: int) -> None:
    """One row may take kernels of its own, so the others must not count on it."""

    def kernel(rows: int) -> Any:
        shape = attention.decode_shape(rows, 4 * kv_heads, kv_heads, 128, False, False, PROCESSORS)
        return replace(shape, least=0)  # no kernel is compiled for it

    rehearsed = {kernel(rows) for rows in REHEARSED if rows > 1} | {kernel(512)}
    assert all(kernel(rows) in rehearsed for rows in range(2, 513))


def test_other_passes_and_layers_are_computed_one_operation_after_the_other(ops: Any) -> None:
    kind = torch.float16
    fused = ops.fused([on(DEVICE, a_layer(kind, 2, 1, 64, False, False, 64, 96))])
    batch = Tables([3, 1], 2).batch([(0, 2, 1), (1, 0, 1)])
    residual = torch.zeros(2, 64, dtype=kind, device=DEVICE)
    assert fused(residual, (residual, residual), batch, [(residual, residual)]) is None
    assert fused(residual[:1], (residual, residual), replace(batch, width=1), [(residual, residual)]) is None
    for layer in (a_layer(torch.float32, 2, 1, 64, False, False), a_layer(kind, 2, 1, 64, False, False, inner=36)):
        assert ops.fused([on(DEVICE, layer)]) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "past", "window"),
    [
        *[((4, 2, 64), past, window) for past in (0, 1, 63, 64, 65, 200) for window in (0, 3, 70)],
        *[((3, 1, 128), past, window) for past in (0, 130, 2200) for window in (0, 70)],
        ((34, 2, 64), 66, 0), ((34, 2, 64), 190, 100), ((8, 8, 64), 70, 0),
    ],
)  # fmt: skip
def test_attention_of_one_token(ops: Any, shape: tuple[int, int, int], past: int, window: int, kind: Any) -> None:
    """With norms of heads and without; the new key and value are stored, and nothing else changes."""
    heads, kv_heads, dim = shape
    tables = Tables([past + 1], 16, seed=past)
    batch = tables.batch([(0, past, 1)])
    torch.manual_seed(past)
    qkv = torch.randn(1, (heads + 2 * kv_heads) * dim).to(kind)
    angles = torch.randn(1, dim // 2)
    rope = angles.cos(), angles.sin()
    weights = torch.rand(2, dim).to(kind) + 0.5
    cache = torch.randn(2, tables.blocks, 16, kv_heads, dim).to(kind)
    there = replace(
        batch,
        positions=batch.positions.to(DEVICE),
        slots=batch.slots.to(DEVICE),
        block_tables=batch.block_tables.clamp(max=2**31 - 1).to(torch.int32).to(DEVICE),
    )
    for norms in (None, (weights[0], weights[1], 1e-6)):
        wanted_cache, found_cache = cache.clone(), cache.clone().to(DEVICE)
        q = REF.rotate_and_store(qkv, norms, rope, (wanted_cache[0], wanted_cache[1]), batch.slots)
        wanted = REF.attention(q, wanted_cache[0], wanted_cache[1], batch, dim**-0.5, window)
        on_device = None if norms is None else (norms[0].to(DEVICE), norms[1].to(DEVICE), norms[2])
        rope_there = rope[0].to(DEVICE), rope[1].to(DEVICE)
        both = found_cache[0], found_cache[1]
        found = ops.attention_of_one(qkv.to(DEVICE), on_device, rope_there, both, there, dim**-0.5, window)
        close(found.cpu(), wanted)
        close(found_cache.cpu(), wanted_cache)
        assert ((found_cache.cpu() != cache).any(-1).sum() <= 2 * kv_heads).item()
        assert not ops._arrived[: 4 * kv_heads].any(), "counters are left as they were"
