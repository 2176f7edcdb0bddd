"""Triton kernels against ref: on a GPU, or interpreted on the CPU where Triton is installed."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.core.plan import DRAFTED, FROM_DEVICE
from shoal.kernels import Batch
from shoal.kernels.ref import RefOps
from tests.kernels.interpreted import DEVICE, triton_ops
from tests.kernels.ragged import Tables

REF = RefOps()
TOLERANCE = {torch.float32: 2e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
KINDS = list(TOLERANCE) if DEVICE == "cuda" else [torch.float32, torch.float16]  # the interpreter has no bfloat16


@pytest.fixture(scope="module")
def ops() -> Any:
    return triton_ops()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.isfinite().all()
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert difference < TOLERANCE[wanted.dtype], float(difference)


def compare(ops: Any, pieces: list[tuple[int, int, int]], shape: tuple[int, int, int], kind: Any, window: int) -> None:
    """pieces: (sequence, its past, its queries); shape: heads, KV heads, head_dim."""
    heads, kv_heads, dim = shape
    tables = Tables([past + new for _, past, new in sorted(pieces)], 16, seed=len(pieces))
    batch: Batch = tables.batch(pieces)
    torch.manual_seed(len(pieces))
    cache = torch.randn(2, tables.blocks, 16, kv_heads, dim).to(kind)
    q = torch.randn(batch.starts[-1], heads, dim).to(kind)
    wanted = REF.attention(q, cache[0], cache[1], batch, dim**-0.5, window)
    there = replace(batch, block_tables=batch.block_tables.clamp(max=2**31 - 1).to(torch.int32).to(DEVICE))
    found = ops.attention(q.to(DEVICE), cache[0].to(DEVICE), cache[1].to(DEVICE), there, dim**-0.5, window)
    close(found.cpu(), wanted)


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 64), (2, 2, 80), (7, 1, 64)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 3, 70])
def test_few_queries_beside_single_ones_and_prompts(ops: Any, shape: Any, kind: Any, window: int) -> None:
    """Pasts that end on the border of a tile, before it and behind it, so that a query's own part may be empty."""
    queries, pasts = [2, 5, 1, 4, 16, 33], [0, 60, 127, 63, 190, 20]
    pieces = [(at, past, new) for at, (past, new) in enumerate(zip(pasts, queries, strict=True))]
    compare(ops, pieces, shape, kind, window)


@pytest.mark.parametrize("new", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("past", [0, 64, 2100])
def test_one_sequence_in_many_parts(ops: Any, new: int, past: int) -> None:
    compare(ops, [(0, past, new)], (4, 1, 64), torch.float16, 0)


def test_many_sequences_in_one_part(ops: Any) -> None:
    """Too many for parts: every program computes a whole past."""
    rng = random.Random(3)
    pieces = [(at, rng.randint(0, 40), rng.randint(1, 4)) for at in range(36)]
    compare(ops, pieces, (16, 16, 64), torch.float16, 0)


@pytest.mark.parametrize(("rows", "drafts"), [(1, 0), (5, 3), (7, 15)])
def test_ids_that_the_host_does_not_know_are_read_from_the_device(ops: Any, rows: int, drafts: int) -> None:
    """FROM_DEVICE, and draft tokens of any number, beside known ids and padding; in two programs."""
    rng, count, size = random.Random(rows), 300, 4
    late = torch.tensor([[rng.randrange(200_000) for _ in range(rows)] for _ in range(1 + drafts)])
    tables = torch.tensor([[rng.randrange(900) for _ in range(9)] for _ in range(rows)], dtype=torch.int32)
    ids = [
        rng.choice((rng.randrange(200_000), FROM_DEVICE, DRAFTED - rng.randrange(drafts or 1))) for _ in range(count)
    ]
    ids = [max(one, FROM_DEVICE - drafts) for one in ids]
    owners = [rng.randrange(-1, rows) for _ in range(count)]
    ids = [0 if owner < 0 else one for one, owner in zip(ids, owners, strict=True)]  # padding
    places = [rng.randrange(9 * size) for _ in range(count)]
    numbers = torch.tensor([ids, owners, places], dtype=torch.int32)
    found = ops.place_tokens(*numbers.to(DEVICE), late.to(DEVICE), tables.to(DEVICE), size)
    at = list(zip(ids, owners, places, strict=True))
    assert found[0].tolist() == [int(late[-1 - id, row]) if id < 0 else id for id, row, _ in at]
    assert found[1].tolist() == places
    slots = [int(tables[row, place // size]) * size + place % size if row >= 0 else -1 for _, row, place in at]
    assert found[2].tolist() == slots
