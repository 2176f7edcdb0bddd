"""A plan as tables of numbers: every position, decode and block of queries is where kernels look for it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.params import SamplingParams
from shoal.core.plan import FROM_DEVICE, RowStart, StepPlan
from shoal.runner.cuda import LONG_DRAFTS, CudaExecutor, head_lines, most_lines, verifying_shapes
from shoal.runner.draws import draws_of
from shoal.runner.graphs import LINES, TOKENS, size_for
from shoal.runner.step import ALIGN, PADDING, PassShape, Tables, count_blocks, fill, lay_out, layout_of, new_blocks

QUERIES = 4  # in a block
FEW = 6  # in a decode


def plan_of(*parts: tuple[int, int, int, int], grown: tuple[tuple[int, int, int], ...] = ()) -> StepPlan:
    """Each part: row, first position, how many, how many tokens it draws."""
    rows, starts, counts, samples = (np.array(column) for column in zip(*parts, strict=True))
    tokens = np.arange(100, 100 + counts.sum())
    tokens[counts.cumsum()[counts == 1] - 1] = FROM_DEVICE
    return StepPlan(
        0,
        (),
        np.array(grown, dtype=np.int64).reshape(-1, 3),
        rows,
        rows * 0,
        starts,
        counts,
        samples.astype(np.int64),
        tokens,
    )


def filled(plan: StepPlan, shape: PassShape, first: int = 8) -> Tables:
    buffer = np.full(first + shape.size, 777, dtype=np.int32)
    tables = lay_out(buffer, shape, first)
    fill(tables, plan, draws_of(plan), QUERIES, FEW)
    assert (buffer[:first] == 777).all()
    return tables


def test_one_position_each() -> None:
    tables = filled(plan_of((7, 20, 1, 1), (3, 0, 1, 1)), PassShape(3, 3, 0, 3))
    assert tables.tokens.tolist() == [[-1, -1, 0], [7, 3, PADDING], [20, 0, 0]]
    assert tables.decodes.tolist() == [[7, 3, 0], [21, 1, 0], [0, 1, 0], [1, 1, 0]]
    assert tables.blocks.shape == (5, 0)
    assert tables.index.tolist() == [0, 1, 0]


def test_chunks_beside_decodes() -> None:
    """Row 5 computes positions 10 to 18 in three blocks of queries; the last has the longest past: it is first."""
    plan = plan_of((7, 20, 1, 1), (5, 10, 9, 0), (2, 4, 1, 1), (1, 0, 2, 1))
    assert count_blocks(plan.counts[layout_of(plan, FEW).chunks], QUERIES) == 4
    tables = filled(plan, PassShape(16, 4, 6, 4))
    assert tables.tokens[1].tolist() == [7] + [5] * 9 + [2] + [1] * 2 + [PADDING] * 3
    assert tables.tokens[2].tolist() == [20, *range(10, 19), 4, 0, 1, 0, 0, 0]
    assert tables.decodes.tolist() == [[7, 2, 0, 0], [21, 5, 0, 0], [0, 10, 0, 0], [1, 1, 0, 0]]
    assert tables.blocks[:, :4].T.tolist() == [
        [5, 1, 9, 8, 19],
        [5, 1, 9, 4, 19],
        [5, 1, 9, 0, 19],
        [1, 11, 2, 0, 2],
    ]
    assert (tables.blocks[0, 4:] == PADDING).all()
    assert tables.index.tolist() == [0, 10, 12, 0]


def test_rows_that_verify_drafts_are_decodes() -> None:
    """Up to FEW positions; a longer draft, and a chunk that ends a prompt, are blocks of queries."""
    plan = plan_of((7, 20, 3, 3), (5, 10, 3, 1), (2, 4, 1, 1), (1, 8, FEW, FEW), (3, 30, FEW + 1, FEW + 1))
    assert layout_of(plan, FEW).decodes.tolist() == [0, 2, 3]
    assert layout_of(plan, 1).decodes.tolist() == [2]
    tables = filled(plan, PassShape(24, 4, 4, 20, queries=FEW))
    assert tables.decodes.T.tolist() == [[7, 23, 0, 3], [2, 5, 6, 1], [1, 8 + FEW, 7, FEW], [0, 0, 0, 0]]
    assert tables.blocks[:, :3].T.tolist() == [[3, 13, 7, 4, 37], [3, 13, 7, 0, 37], [5, 3, 3, 0, 13]]
    assert tables.index.tolist() == [0, 1, 2, 5, *range(6, 20), 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_every_query_is_in_exactly_one_table(seed: int) -> None:
    source = np.random.default_rng(seed)
    count = int(source.integers(1, 20))
    counts = np.where(source.random(count) < 0.5, 1, source.integers(2, 30, count))
    draws = np.where(source.random(count) < 0.5, 1, counts)
    parts = [(row, int(source.integers(0, 50)), int(counts[row]), int(draws[row])) for row in range(count)]
    plan = plan_of(*parts)
    blocks = count_blocks(plan.counts[layout_of(plan, FEW).chunks], QUERIES)
    shape = PassShape(int(counts.sum()) + 3, count + 1, blocks + 2, int(draws.sum()))
    tables = filled(plan, shape)
    seen = []
    for row, context, begin, many in tables.decodes.T.tolist():
        if context:
            seen += range(begin, begin + many)
            assert (many, context) == (counts[row], parts[row][1] + many)
    for row, begin, many, first, context in tables.blocks.T.tolist():
        if row != PADDING:
            seen += range(begin + first, begin + min(first + QUERIES, many))
            assert context == parts[row][1] + many
    assert sorted(seen) == list(range(int(counts.sum())))


def test_tables_are_aligned() -> None:
    buffer = np.zeros(1000, dtype=np.int32)
    for size in range(1, 9):
        shape = PassShape(size, size, size, size)
        tables = lay_out(buffer, shape, 16)
        for lines in (tables.tokens, tables.decodes, tables.blocks, tables.index[None]):
            for line in lines:
                offset = line.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
                assert offset % (4 * ALIGN) == 0


def test_what_is_new_in_the_block_tables() -> None:
    start = RowStart(4, 0, (1, 2), 2, SamplingParams(), 0, 0, frozenset(), (9, 8), 0)
    plan = plan_of((4, 0, 2, 1), grown=((2, 5, 6),))._replace(starting=(start,))
    assert new_blocks(plan).tolist() == [[2, 5, 6], [4, 0, 9], [4, 1, 8]]
    assert new_blocks(plan_of((1, 1, 1, 1))).shape == (0, 3)


def test_sizes_grow() -> None:
    for sizes in (LINES, TOKENS):
        assert list(sizes) == sorted(set(sizes))
        for count in range(1, sizes[-1] + 1):
            found = size_for(sizes, count)
            assert found is not None
            assert count <= found <= max(count * 1.5, count + 16)
        assert size_for(sizes, sizes[-1] + 1) is None


# ---- graphs that are recorded before they are needed ----------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=1, max_size=LONG_DRAFTS), st.sampled_from([1, 4, 7, 15]), st.booleans())
def test_passes_of_a_few_rows_with_drafts_have_graphs(drafts: list[int], most: int, wide: bool) -> None:
    """Whatever is drafted for up to eight rows, its graph was recorded, with the head's."""
    few, slots = (1, 4, 8, 16) if wide else (1, 2, 4, 8), 32
    counts = [1 + min(count, most, few[-1] - 1) for count in drafts]
    lines = most_lines(slots, most)
    plan = plan_of(*((row, 20, count, count) for row, count in enumerate(counts)))
    executor = SimpleNamespace(few=few, queries=QUERIES, ops=SimpleNamespace(long_context=8192), _lines=lines)
    shape, recorded = CudaExecutor._shape(executor, plan, draws_of(plan))  # type: ignore[arg-type]
    assert recorded
    assert shape.tokens >= len(plan.tokens)
    assert shape.decodes >= len(counts)
    if max(counts) > 1:
        shapes = verifying_shapes(slots, most + 1, few, lines)
        assert shape in shapes
        assert len(set(shapes)) == len(shapes)
        assert head_lines(draws_of(plan)) in {one.lines for one in shapes}
