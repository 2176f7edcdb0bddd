"""The block pool: O(1) moves between clean, held and cached."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


MOVE = st.sampled_from(["grab", "hold", "hold", "drop", "drop", "drop", "unpublish"])
MOVES = st.lists(st.tuples(MOVE, st.integers(0, 11)), min_size=20)


@settings(max_examples=100)
@given(st.integers(1, 6), MOVES)
def test_blocks_go_in_the_order_in_which_they_were_let_go(total: int, moves: list[tuple[str, int]]) -> None:
    """The cache beside a plain list of what is in it."""
    pool, order, held = BlockPool(total), list[int](), list[int]()
    for move, number in moves:
        if move == "grab":
            clean = pool.free - pool.cached
            taken = pool.grab(number % 3)
            if taken is not None:
                assert taken[clean:] == order[: len(taken[clean:])], "not the ones that were unused for longest"
                del order[: len(taken[clean:])]
                held += taken
                pool.publish(*taken[number % 2 :])
        elif move == "hold" and held + order:
            block = (held + order)[-1 - number % len(held + order)]
            pool.hold(block)
            held.append(block)
            if block in order:
                order.remove(block)
        elif move == "drop" and held:
            block = held.pop(number % len(held))
            pool.drop([block])
            if block not in held and pool.published[block]:
                order.append(block)
        elif move == "unpublish" and held + order:
            block = (held + order)[number % len(held + order)]
            if pool.published[block]:
                pool.unpublish(block)
            if block in order:
                order.remove(block)
        assert pool.cached == len(order)
        pool.check()
