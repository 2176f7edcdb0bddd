"""The block pool: O(1) moves between clean, held and cached."""

import pytest

from shoal.kv.pool import BlockPool


def test_grab_takes_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.grab(4) is None
    assert pool.free == 3
    assert pool.grab(3) == [0, 1, 2]
    assert pool.grab(1) is None
    pool.check()


def test_a_published_block_outlives_its_last_holder() -> None:
    forgotten: list[int] = []
    pool = BlockPool(2, forget=lambda *blocks: forgotten.extend(blocks))
    first, second = pool.grab(2) or []
    pool.publish(first)
    pool.drop([first, second])
    assert (pool.free, pool.cached) == (2, 1)
    pool.hold(first)  # a hit
    assert (pool.free, pool.cached, pool.references[first]) == (1, 0, 1)
    assert forgotten == []
    pool.check()


def test_clean_blocks_go_first_then_the_longest_unused() -> None:
    forgotten: list[int] = []
    pool = BlockPool(4, forget=lambda *blocks: forgotten.extend(blocks))
    blocks = pool.grab(3) or []
    for block in blocks:
        pool.publish(block)
    pool.drop([blocks[2]])
    pool.drop([blocks[0]])
    pool.drop([blocks[1]])
    assert pool.grab(2) == [3, blocks[2]]
    assert forgotten == [blocks[2]]
    pool.check()


def test_dropping_a_block_that_is_not_held_is_noticed() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="dropped more often"):
        pool.drop([0])


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._clean.pop()
    with pytest.raises(AssertionError, match="wrong list"):
        pool.check()


def test_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
