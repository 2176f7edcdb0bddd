"""The block map of the live page, beside the same written out block by block."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.clock import VirtualClock
from shoal.engine.block_map import CACHED, FREE, HELD, SHARED, block_map, condense, runs, states
from shoal.engine.loop import EngineLoop
from tests.fakes import FakeExecutor, make_request, make_scheduler

BLOCK = st.tuples(st.sampled_from([FREE, CACHED, HELD, SHARED]), st.integers(-1, 3))


@given(st.lists(BLOCK, min_size=1, max_size=60), st.integers(1, 9))
def test_a_cell_has_the_most_used_state_and_the_first_owner(blocks: list[tuple[int, int]], per_cell: int) -> None:
    state, owner = (np.array(values, dtype=np.int32) for values in zip(*blocks, strict=True))
    most, first = condense(state, owner, per_cell)
    expected = []
    for at in range(0, len(blocks), per_cell):
        cell = blocks[at : at + per_cell]
        count = Counter(one for one, _ in cell)
        common = min(count, key=lambda one: (-count[one], one))
        owners = [number for _, number in cell if number >= 0]
        expected.append((common, owners[0] if owners and common >= HELD else -1))
    assert list(zip(most.tolist(), first.tolist(), strict=True)) == expected
    assert [(one, number) for one, number, cells in runs(most, first) for _ in range(cells)] == expected


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 12))
def test_every_block_has_its_state_and_a_request_that_holds_it(prompts: list[int], passes: int) -> None:
    scheduler = make_scheduler(blocks=60, max_num_seqs=4)
    executor = FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)
    loop = EngineLoop(scheduler, executor, VirtualClock(), depth=1)
    for number, length in enumerate(prompts):
        loop.submit(make_request(f"{number}.0", [7] * length, 12))  # prompts that share their first blocks
    for _ in range(passes):
        loop.step()
    found, pool = block_map(scheduler), scheduler.kv.pool
    shown = [(state, owner) for state, owner, cells in found["runs"] for _ in range(cells)]
    held = {one.id: one.holding.blocks for one in scheduler.running if one.holding is not None}
    assert (found["total"], found["per_cell"], len(shown)) == (pool.total, 1, pool.total)
    assert [state for state, _ in shown] == states(pool).tolist()
    for block, (_, owner) in enumerate(shown):
        holders = [id for id, blocks in held.items() if block in blocks]
        assert (found["owners"][owner] in holders) if owner >= 0 else not holders
