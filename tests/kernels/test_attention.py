"""Attention in C: however a prompt is split into chunks, every position gets the same bits, which are near ref's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import kernels
from shoal.kernels.cpu import NativeOps
from shoal.kernels.ref import RefOps
from tests.effort import examples
from tests.kernels.pretended import older, pretended
from tests.kernels.ragged import Tables

REF = RefOps()
NATIVE = [
    pytest.param(ops, id=name)
    for name, ops in [*kernels.available(), *pretended(), *older()]
    if isinstance(ops, NativeOps)
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("ops", NATIVE)
@examples(8, of=25)
@given(
    chunks=st.lists(
        st.sampled_from([1, 1, 2, 3, 4, 5, 7, 11, 16, 21, 22, 43, 64, 65, 130, 256]), min_size=1, max_size=8
    ),
    dtype=st.sampled_from(TYPES),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.sampled_from([1, 2, 3, 4, 7, 17, 33]),
    dim=st.sampled_from([16, 32, 48, 64, 80, 128]),
    block_size=st.sampled_from([5, 16]),
    window=st.sampled_from([0, 0, 1, 7, 90, 300]),
    sharpness=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_chunks_change_no_bit(
    ops: NativeOps,
    chunks: list[int],
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    window: int,
    sharpness: float,
    seed: int,
) -> None:
    """A chunk of one position is a decode, one of few verifies drafts; the whole prompt at once is one chunk more."""
    if dtype not in ops.types or dim % ops.lanes:
        return  # torch computes it
    length, scale = sum(chunks), sharpness * dim**-0.5
    torch.manual_seed(seed)
    tables = Tables([length, 70], block_size, seed)
    cache = torch.randn(2, tables.blocks, block_size, kv_heads, dim).to(dtype)
    q = torch.randn(length, kv_heads * group, dim).to(dtype).float()
    whole = tables.batch([(0, 0, length)])
    found = ops.attention(q, cache[0], cache[1], whole, scale, window)
    wanted = REF.attention(q, cache[0].float(), cache[1].float(), whole, scale, window)
    # tiles round queries after scaling, which changes a score by up to 1/512 of itself
    rounded = dtype == torch.bfloat16 and ops.library.bfloat16_products == "tiles"
    bound = 5e-2 + 2e-2 * sharpness if rounded else 1e-4
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)
    before = 0
    for count in chunks:
        rows = slice(before, before + count)
        beside = torch.cat((q[rows], torch.randn(3, kv_heads * group, dim)))
        for pieces in ([(0, before, count)], [(0, before, count), (1, 67, 3)]):
            batch = tables.batch(pieces)
            part = ops.attention(beside[: batch.starts[-1]], cache[0], cache[1], batch, scale, window)
            assert torch.equal(part[:count], found[rows]), (before, count)
        before += count


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_a_position_may_not_see_is_not_read(ops: NativeOps, dtype: torch.dtype) -> None:
    """The rest of a sequence's last block, and the blocks of others, may hold anything."""
    if dtype not in ops.types:
        pytest.skip("torch computes it")
    tables = Tables([300, 37], 16)
    clean = torch.randn(2, tables.blocks, 16, 2, 64).to(dtype)
    dirty = torch.full_like(clean, float("nan"))
    for row, length in enumerate((300, 37)):
        for token in range(length):
            block, offset = tables.tables[row][token // 16], token % 16
            dirty[:, block, offset] = clean[:, block, offset]
    batch = tables.batch([(0, 200, 100), (1, 20, 17)])
    q = torch.randn(117, 6, 64).to(dtype).float()
    found = [ops.attention(q, cache[0], cache[1], batch, 0.125, 0) for cache in (clean, dirty)]
    assert torch.equal(*found)
