"""The Triton kernels against ref, on a GPU."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.kernels import Batch, ref
from shoal.kernels.draw_table import COLUMNS, Filters, fill, filters_of
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import DenseWeight
from shoal.runner.sampler import Sampler
from tests.kernels.draw_rows import late, start_rows_of_all_kinds, start_with_edits
from tests.kernels.ragged import Tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REF = RefOps()
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FLOATS = list(TOLERANCE)


@pytest.fixture(scope="module")
def ops() -> "object":
    from shoal.kernels.triton import TritonOps

    return TritonOps()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """By relative norm: single values of 16-bit types may round differently."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-9)
    assert difference < TOLERANCE[wanted.dtype], float(difference)


def on_gpu(batch: Batch) -> Batch:
    return replace(
        batch,
        positions=batch.positions.cuda(),
        slots=batch.slots.cuda(),
        block_tables=batch.block_tables.clamp(max=2**31 - 1).to(torch.int32).cuda(),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (2, 576), (37, 1024), (300, 4096), (5, 14336)])
def test_row_by_row_kernels(ops, dtype: torch.dtype, tokens: int, size: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(tokens)
    x = torch.randn(tokens, size, device="cuda").to(dtype)
    scale = torch.rand(size, device="cuda").to(dtype)
    close(ops.silu_mul(x), REF.silu_mul(x))
    close(ops.rms_norm(x, scale, 1e-5), REF.rms_norm(x, scale, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (9, 3), (4, 4), (32, 8)])
def test_rotate_and_store(ops, dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:  # type: ignore[no-untyped-def]
    """With norms and without; a slot below 0 stores nothing."""
    qkv = torch.randn(11, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    angles = torch.randn(11, dim // 2, device="cuda")
    rope = (angles.cos(), angles.sin())
    weights = torch.rand(2, dim, device="cuda").to(dtype)
    slots = torch.randperm(20, device="cuda")[:11]
    slots[3] = -1
    for norms in (None, (weights[0], weights[1], 1e-6)):
        found, wanted = torch.zeros(2, 2, 5, 4, kv_heads, dim, dtype=dtype, device="cuda")
        q = ops.rotate_and_store(qkv, norms, rope, (found[0], found[1]), slots)
        close(q, REF.rotate_and_store(qkv, norms, rope, (wanted[0], wanted[1]), slots))
        close(found, wanted)
        assert torch.equal((found == 0).all(-1), (wanted == 0).all(-1))


def test_new_blocks_and_the_slots_of_tokens() -> None:
    from shoal.kernels.triton.step import add_blocks, place_tokens

    tables = torch.zeros(5, 9, dtype=torch.int32, device="cuda")
    new = torch.tensor([[2, 0, 7], [4, 8, 3], [2, 1, 5]], dtype=torch.int32, device="cuda")
    add_blocks(new, tables)
    assert tables[2, :2].tolist() == [7, 5]
    assert int(tables.sum()) == 15
    ids = torch.tensor([11, -1, -3, 0], dtype=torch.int32, device="cuda")
    rows = torch.tensor([2, 2, 2, -1], dtype=torch.int32, device="cuda")
    positions = torch.tensor([3, 4, 5, 0], dtype=torch.int32, device="cuda")
    late = torch.arange(100, 115, device="cuda").view(3, 5)
    found = place_tokens(ids, rows, positions, late, tables, 4)
    assert [one.tolist() for one in found] == [[11, 102, 112, 0], [3, 4, 5, 0], [31, 20, 21, -1]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [7, 4096, 32000, 128256, 151936])
def test_the_likeliest_token(dtype: torch.dtype, vocab: int) -> None:
    """The first of equals; NaN and infinity show in the best score."""
    from shoal.kernels.triton.step import likeliest

    scores = torch.randn(9, vocab, device="cuda").to(dtype)
    scores[3, [2, vocab - 1]] = 50.0
    scores[4, 1] = float("nan")
    scores[5] = float("-inf")
    rows = torch.tensor([4, 1, -1, 0, 2, 3, 6, 7, 8], dtype=torch.int32, device="cuda")
    last = torch.full((9,), -5, device="cuda")
    tokens = torch.zeros(9, dtype=torch.int32, device="cuda")
    best = torch.zeros(9, device="cuda")
    likeliest(scores, rows, last, tokens, best)
    twin_last, twins, twin_best = torch.full_like(last, -5), torch.zeros_like(tokens), torch.zeros_like(best)
    ref.likeliest(scores, rows, twin_last, twins, twin_best)
    has_meaning = best.isfinite()
    assert torch.equal(best, twin_best)
    assert torch.equal(tokens[has_meaning], twins[has_meaning])
    assert last[[0, 1, 4]].tolist() == twin_last[[0, 1, 4]].tolist()
    firsts = [int((line == line.max()).nonzero()[0]) for line in scores[[0, 1, 2, 3, 6, 7, 8]]]
    assert tokens[[0, 1, 2, 3, 6, 7, 8]].tolist() == firsts
    assert torch.equal(best[:4], scores[:4].float().max(-1).values)
    assert best.isfinite().tolist() == [True] * 4 + [False] * 2 + [True] * 3
    assert last.tolist()[:2] == [firsts[3], firsts[1]]
    assert last[5] == -5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
@pytest.mark.parametrize(("lines", "vocab"), [(1, 7), (60, 4096), (200, 32003), (40, 151936)])
def test_draws_are_those_of_ref_and_of_the_sampler(dtype: torch.dtype, spread: float, lines: int, vocab: int) -> None:
    """Every mix of temperature and filters; all lines at once, then each graph's kinds of filters alone."""
    from shoal.kernels.triton.draw import draw

    source = random.Random(vocab + int(100 * spread))
    torch.manual_seed(vocab)
    scores = (spread * torch.randn(lines, vocab, device="cuda")).to(dtype)
    scores[0, 3] = float("-inf")
    sampler = Sampler(lines, vocab, "cuda")
    start_rows_of_all_kinds(sampler, source)
    rows, positions = np.arange(lines), np.array([source.randrange(10**5) for _ in range(lines)])
    wanted, best, _ = sampler.sample(scores.float(), rows, positions)
    table = np.zeros((COLUMNS, lines + 3), dtype=np.int32)
    fill(table, sampler.state, rows, positions)
    draw_table = torch.from_numpy(table).cuda()
    padded = torch.cat([scores, torch.zeros(3, vocab, device="cuda", dtype=dtype)])
    tokens = torch.full((lines + 3,), -1, dtype=torch.int32, device="cuda")
    found, last = torch.zeros(lines + 3, device="cuda"), torch.full((lines,), -1, device="cuda")
    filters = filters_of(sampler.state, rows) or Filters(True, True)
    draw(padded, draw_table, last, tokens, found, filters)
    assert tokens[:lines].tolist() == wanted.tolist() == last.tolist()
    assert torch.equal(found[:lines], best)
    twins, twin_found, twin_last = tokens.clone(), found.clone(), last.clone()
    for one in (twins, twin_found, twin_last):
        one.fill_(-1)
    ref.draw(padded, draw_table, twin_last, twins, twin_found)
    assert tokens.tolist() == twins.tolist()
    assert last.tolist() == twin_last.tolist()
    assert torch.equal(found, twin_found)


def test_tokens_are_chosen_as_ref_does(ops) -> None:  # type: ignore[no-untyped-def]
    """Edits, masks, temperature and filters, over passes in which rows end and others take their place."""
    numbers, vocab, rows = np.random.default_rng(5), 517, 12
    made = [Sampler(rows, vocab, "cuda", one) for one in (ops, REF)]

    def begin(row: int, at: int) -> None:
        start = start_with_edits(row, vocab, at, numbers)
        for one in made:
            one.start(start)

    for row in range(rows):
        begin(row, 30)
    for at in range(30, 50):
        begin(int(numbers.integers(rows)), at)
        present = numbers.permutation(rows)[:9]
        logits = torch.from_numpy(numbers.normal(size=(9, vocab)).astype(np.float32)).cuda() * 2
        masked = sorted(numbers.permutation(9)[:3].tolist())
        allowed = {line: numbers.integers(vocab, size=60).tolist() for line in masked}
        masks = late(allowed, vocab) if at % 2 else None
        got, want = (one.ops.choose(logits, present, np.full(9, at), one.state, masks) for one in made)
        assert torch.equal(got[1], want[1]), "the best scores differ"
        assert torch.equal(got[0], want[0])
    assert torch.equal(made[0].edits.counts, made[1].edits.counts)
    assert torch.equal(made[0].edits.seen, made[1].edits.seen)


def test_a_line_without_numbers_spoils_no_other() -> None:
    from shoal.kernels.triton.draw import draw

    scores = torch.randn(3, 5000, device="cuda").to(torch.bfloat16)
    sampler = Sampler(3, 5000, "cuda")
    start_rows_of_all_kinds(sampler, random.Random(4))
    rows = np.arange(3)
    sampler.state.temperature[:], sampler.state.top_k[:], sampler.state.top_p[:] = 1.0, 40, 0.9
    wanted = sampler.sample(scores.float(), rows, rows)[0].tolist()
    table = np.zeros((COLUMNS, 3), dtype=np.int32)
    fill(table, sampler.state, rows, rows)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = scores.clone()
        spoilt[1] = bad
        spoilt[1, 7] = float("nan")
        last, tokens = torch.full((3,), -1, device="cuda"), torch.full((3,), -1, dtype=torch.int32, device="cuda")
        best = torch.zeros(3, device="cuda")
        draw(spoilt, torch.from_numpy(table).cuda(), last, tokens, best, Filters(True, True))
        assert [tokens.tolist()[0], tokens.tolist()[2]] == [wanted[0], wanted[2]]
        assert best.isfinite().tolist() == [True, False, True]
        assert 0 <= int(tokens[1]) < 5000


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1024, 4096), (576, 192), (3072, 1024), (4096, 6144), (14336, 4096), (1024, 128256)]
)
def test_linear_layers_of_few_rows(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    """Several times: some kernels count arrivals, and must leave the count as they found it."""
    from shoal.kernels.triton.skinny import linear

    sizes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    x, weight, bias, residual = (torch.randn(size, device="cuda").to(dtype) for size in sizes)
    for one in (None, bias):
        wanted = REF.linear(x.float(), DenseWeight(weight.float()), None if one is None else one.float())
        for _ in range(3):
            close(linear(x, weight, one), wanted.to(dtype))
            close(linear(x, weight, one, residual.clone()), (wanted + residual.float()).to(dtype))


SHAPES = [(4, 4, 64), (9, 3, 64), (16, 2, 80), (12, 4, 96), (32, 8, 128), (8, 1, 128), (16, 8, 256)]
WINDOWS = [0, 1, 7, 50, 1000]


def pieces(rng: random.Random, longest: int) -> list[tuple[int, int, int]]:
    """Decodes, whole prompts and chunks, in any order."""
    found = []
    for sequence in range(rng.randint(1, 24)):
        before = rng.choice([0, 1, 15, 16, 17, 127, 128, 129, rng.randint(0, longest)])
        new = 1 if rng.random() < 0.5 else rng.choice([2, 16, 31, 128, rng.randint(1, 600)])
        found.append((sequence, before, new))
    rng.shuffle(found)
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_over_any_mix(ops, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    for seed in range(6):
        rng = random.Random(seed)
        block_size = 32 if dim == 96 else 16  # one for each shape: every other is compiled anew
        chosen = pieces(rng, 2000 if seed else 20000)
        tables = Tables([before + new for _, before, new in sorted(chosen)], block_size, seed)
        batch = on_gpu(tables.batch(chosen))
        torch.manual_seed(seed)
        cache = torch.randn(2, tables.blocks, block_size, kv_heads, dim, device="cuda").to(dtype)
        q = torch.randn(batch.starts[-1], heads, dim, device="cuda").to(dtype)
        window = WINDOWS[seed % len(WINDOWS)]
        found = ops.attention(q, cache[0], cache[1], batch, dim**-0.5, window)
        wanted = REF.attention(
            q, cache[0], cache[1], replace(batch, block_tables=batch.block_tables.long()), dim**-0.5, window
        )
        close(found, wanted)


@pytest.mark.parametrize("sequences", [1, 3, 64, 1000])
def test_many_or_few_decodes(ops, sequences: int) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(sequences)
    chosen = [(at, rng.randint(0, 300), 1) for at in range(sequences)]
    chosen[sequences // 2] = (sequences // 2, 20000, 1)  # one long past, alone or among short ones
    tables = Tables([before + 1 for _, before, _ in chosen], 16)
    batch = on_gpu(tables.batch(chosen))
    cache = torch.randn(2, tables.blocks, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(sequences, 32, 128, device="cuda", dtype=torch.bfloat16)
    found = ops.attention(q, cache[0], cache[1], batch, 128**-0.5, 0)
    close(
        found,
        REF.attention(q, cache[0], cache[1], replace(batch, block_tables=batch.block_tables.long()), 128**-0.5, 0),
    )
