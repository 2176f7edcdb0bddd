"""Every kernel implementation against ref, and ref against the definition."""

import random

import pytest
import torch

from shoal import kernels
from shoal.kernels import Ops
from shoal.kernels.cpu import CpuOps, computes_natively
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import DenseWeight
from tests.effort import covering
from tests.kernels.pretended import older, pretended
from tests.kernels.ragged import Tables

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
EVERYTHING = [*kernels.available(), *pretended(), *older()]
IMPLEMENTATIONS = [pytest.param(ops, id=name) for name, ops in EVERYTHING if name != "ref"]
REF = RefOps()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_row_by_row_kernels(impl: Ops, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, other = torch.randn(tokens, 96).to(dtype), torch.randn(tokens, 64).to(dtype)
    weight = DenseWeight(torch.randn(64, 96).to(dtype) / 10)
    bias, scale = torch.randn(64).to(dtype), torch.rand(96).to(dtype)
    close(impl.linear(x, weight, None), REF.linear(x, weight, None))
    close(impl.linear(x, weight, bias), REF.linear(x, weight, bias))
    close(impl.silu_mul(x), REF.silu_mul(x))
    close(impl.rms_norm(x, scale, 1e-5), REF.rms_norm(x, scale, 1e-5))
    heads = x.view(tokens, 6, 16)  # as the per-head norm of Qwen3 is called
    close(impl.rms_norm(heads, scale[:16], 1e-5), REF.rms_norm(heads, scale[:16], 1e-5))
    close(impl.linear_add(x, weight, bias, other.clone()), REF.linear_add(x, weight, bias, other))


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, pytest.param(REF, id="ref")])
@pytest.mark.parametrize("kept_as", FLOATS)
@pytest.mark.parametrize("tokens", [1, 12, 80])
def test_a_linear_layer_takes_float32_inputs_beside_weights_of_any_type(
    impl: Ops, kept_as: torch.dtype, tokens: int
) -> None:
    """The result has the inputs' type, whatever the CPU can multiply by itself."""
    torch.manual_seed(tokens)
    x, residual = torch.randn(tokens, 96), torch.randn(tokens, 64)
    values, bias = torch.randn(64, 96).to(kept_as) / 10, torch.randn(64).to(kept_as)
    weight, wanted = DenseWeight(values), x @ values.float().T
    tolerance = {"atol": 3e-2, "rtol": 3e-2}  # some round the inputs to the weights' type
    torch.testing.assert_close(impl.linear(x, weight, None), wanted, **tolerance)
    torch.testing.assert_close(impl.linear(x, weight, bias), wanted + bias.float(), **tolerance)
    added = impl.linear_add(x, weight, bias, residual.clone())
    torch.testing.assert_close(added, wanted + bias.float() + residual, **tolerance)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("whole", [False, True])
def test_rotary(impl: Ops, dtype: torch.dtype, whole: bool) -> None:
    """Both on slices of a fused product, whose rows are not contiguous; cos may be given for half or all values."""
    fused = torch.randn(11, 8 * 32).to(dtype)
    q, k = fused[:, : 6 * 32].view(11, 6, 32), fused[:, 6 * 32 :].view(11, 2, 32)
    angles = torch.randn(11, 16)
    cos, sin = (torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    if not whole:
        cos, sin = cos[:, :16], sin[:, :16]
    for found, wanted in zip(impl.rotary(q, k, cos, sin), REF.rotary(q, k, cos, sin), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_store(impl: Ops, dtype: torch.dtype, normed: bool) -> None:
    qkv = torch.randn(11, (6 + 2 * 2) * 32).to(dtype)
    angles = torch.randn(11, 16)
    norms = (torch.rand(32).to(dtype), torch.rand(32).to(dtype), 1e-6) if normed else None
    slots = torch.randperm(20)[:11]
    found, wanted = torch.zeros(2, 2, 5, 4, 2, 32, dtype=dtype)
    rope = (angles.cos(), angles.sin())
    q = impl.rotate_and_store(qkv.clone(), norms, rope, (found[0], found[1]), slots)
    close(q, REF.rotate_and_store(qkv, norms, rope, (wanted[0], wanted[1]), slots))
    close(found, wanted)
    assert q.shape == (11, 6, 32)
    assert torch.equal(found[1].view(20, 64)[slots], qkv[:, 8 * 32 :])


def test_a_slot_below_0_stores_nothing() -> None:
    k, v = torch.randn(2, 3, 2, 8)
    found = torch.zeros(2, 5, 4, 2, 8)
    REF.store_kv(k, v, found[0], found[1], torch.tensor([-1, 3, -1]))
    assert torch.equal(found[0, 0, 3], k[1])
    assert int((found != 0).any(-1).any(-1).sum()) == 2


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("cache_dtype", FLOATS)
def test_store_kv_writes_its_slots_only(impl: Ops, cache_dtype: torch.dtype) -> None:
    found = torch.zeros(2, 5, 4, 2, 8, dtype=cache_dtype)
    wanted = found.clone()
    k, v = torch.randn(2, 3, 2, 8)
    slots = torch.tensor([19, 0, 6])
    impl.store_kv(k, v, found[0], found[1], slots)
    REF.store_kv(k, v, wanted[0], wanted[1], slots)
    assert torch.equal(found, wanted)
    assert torch.equal(found[0, 4, 3], k[0].to(cache_dtype))
    assert int((found != 0).any(-1).any(-1).sum()) == 6


SHAPES = [(1, 1, 32), (4, 4, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128), (6, 3, 128)]
WINDOWS = [0, 1, 7, 50, 1000]


def random_pieces(rng: random.Random, sequences: int) -> list[tuple[int, int, int]]:
    """Decode rows, whole prompts, chunks of prompts and sequences that sit this pass out."""
    pieces = []
    for sequence in range(sequences):
        before = rng.choice([0, 0, rng.randint(1, 15), rng.randint(16, 300)])
        new = rng.choice([1, 1, 1, 2, rng.randint(3, 90)])
        pieces.append((sequence, before, new))
    rng.shuffle(pieces)
    return pieces


@pytest.mark.parametrize(
    ("impl", "dtype", "block_size", "heads", "kv_heads", "head_dim"),
    covering(IMPLEMENTATIONS, FLOATS, [1, 16, 32], SHAPES),
)
def test_ragged_attention(
    impl: Ops, dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    rng = random.Random(heads * block_size)
    torch.manual_seed(heads)
    for sequences, window in ((1, 0), (7, 0), *((5, window) for window in WINDOWS)):
        pieces = random_pieces(rng, sequences)
        lengths = [before + new for _, before, new in sorted(pieces)]
        tables = Tables(lengths, block_size, seed=sequences)
        batch = tables.batch(pieces)
        k_cache, v_cache = torch.randn(2, tables.blocks, block_size, kv_heads, head_dim).to(dtype)
        q = torch.randn(batch.starts[-1], heads, head_dim).to(dtype)
        scale = head_dim**-0.5
        wanted = REF.attention(q, k_cache, v_cache, batch, scale, window)
        close(impl.attention(q, k_cache, v_cache, batch, scale, window), wanted)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_decode_only_passes_of_all_lengths(impl: Ops) -> None:
    """One query each, contexts 1..200 around every border of block and piece."""
    contexts = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]
    tables = Tables(contexts, 16)
    batch = tables.batch([(row, context - 1, 1) for row, context in enumerate(contexts)])
    k_cache, v_cache = torch.randn(2, tables.blocks, 16, 3, 64)
    q = torch.randn(len(contexts), 9, 64) * 5
    for window in (0, 1, 16, 17, 64, 100):
        wanted = REF.attention(q, k_cache, v_cache, batch, 0.125, window)
        close(impl.attention(q, k_cache, v_cache, batch, 0.125, window), wanted)


@pytest.mark.parametrize("ops", [pytest.param(ops, id=name) for name, ops in EVERYTHING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_values_in_the_cache_are_never_read(ops: Ops, dtype: torch.dtype) -> None:
    """Everything outside the sequences' own tokens is NaN, past the end of their last block too; none comes out."""
    tables = Tables([20, 70, 5], 16)
    batch = tables.batch([(0, 19, 1), (1, 0, 70), (2, 2, 3)])
    k_cache, v_cache = torch.full((2, tables.blocks, 16, 2, 32), float("nan"), dtype=dtype)
    for sequence, length in enumerate((20, 70, 5)):
        full = tables.batch([(sequence, 0, length)])
        ops.store_kv(torch.randn(length, 2, 32), torch.randn(length, 2, 32), k_cache, v_cache, full.slots)
    for window in (0, 6):
        out = ops.attention(torch.randn(74, 4, 32).to(dtype), k_cache, v_cache, batch, 0.2, window)
        assert not out.isnan().any()


def test_ref_attention_of_one_token_is_its_value() -> None:
    tables = Tables([1], 4)
    k_cache, v_cache = torch.randn(2, tables.blocks, 4, 2, 8)
    out = REF.attention(torch.randn(1, 4, 8), k_cache, v_cache, tables.batch([(0, 0, 1)]), 1.0, 0)
    assert torch.allclose(out[0], v_cache[tables.tables[0][0], 0].repeat_interleave(2, 0))


def test_a_pass_is_split_once_and_forgotten_after_it() -> None:
    ops = CpuOps()
    tables = Tables([9, 9], 4)
    first, second = tables.batch([(0, 8, 1)]), tables.batch([(1, 0, 9)])
    assert ops._split_for(first, 0) is ops._split_for(first, 0)
    assert ops._split_for(first, 0) is not ops._split_for(first, 4)
    assert ops._split_for(second, 0).stretches
    assert not ops._split_for(first, 0).stretches


def test_pick_and_native_types() -> None:
    assert isinstance(kernels.pick("cpu"), CpuOps)
    assert isinstance(kernels.pick("meta"), RefOps)
    assert computes_natively(torch.float32)
    assert not computes_natively(torch.float64)
