"""The KV manager: prefix hits, salts, growth and release."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kv.manager import Holding, KVManager


def fill(kv: KVManager, tokens: list[int], salt: str | None = "") -> Holding:
    """Reserve and compute all of it."""
    holding = kv.reserve(tokens, len(tokens), salt, [])
    assert holding is not None
    kv.publish(holding, tokens, len(tokens))
    return holding


def test_a_prefix_is_shared_by_reference() -> None:
    kv = KVManager(10, 4)
    first = fill(kv, list(range(10)))
    second = kv.reserve([*range(8), 99], 9, "", [])
    assert second is not None
    assert second.published == 2
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    kv.check([first, second])


def test_a_hit_leaves_one_token_to_compute() -> None:
    kv = KVManager(10, 4)
    first = fill(kv, list(range(8)))
    second = kv.reserve(list(range(8)), 8, "", [])
    assert second is not None
    assert second.published == 1
    kv.check([first, second])


def test_no_hit_across_salts() -> None:
    kv = KVManager(10, 4)
    kv.release(fill(kv, list(range(9)), "alice"))
    other = kv.reserve(list(range(9)), 9, "bob", [])
    assert other is not None
    assert other.published == 0


def test_no_hit_in_the_middle() -> None:
    """A block is found by its whole prefix, not by its own tokens."""
    kv = KVManager(10, 2)
    kv.release(fill(kv, [1, 2, 3, 4, 5]))
    other = kv.reserve([9, 9, 3, 4, 5], 5, "", [])
    assert other is not None
    assert other.published == 0


def test_nothing_moves_when_it_does_not_fit() -> None:
    kv = KVManager(3, 4)
    first = fill(kv, list(range(8)))
    assert kv.reserve([5] * 8, 8, "", []) is None
    assert not kv.grow(first, 13)
    assert kv.grow(first, 12)
    kv.check([first])


def test_spare_blocks_stay_free() -> None:
    kv = KVManager(4, 4)
    assert kv.reserve([5] * 8, 8, "", [], spare=3) is None
    assert kv.reserve([5] * 8, 8, "", [], spare=2) is not None


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    kv = KVManager(4, 2)
    kv.release(fill(kv, list(range(8))))
    taken = kv.reserve([99] * 4, 4, "", [])
    assert taken is not None
    again = kv.reserve(list(range(5)), 4, "", [])
    assert again is not None
    assert again.published == 2


def test_without_keeping_blocks_are_shared_only_while_held() -> None:
    kv = KVManager(10, 4, keep=False)
    leader = fill(kv, list(range(9)), "group")
    sibling = kv.reserve(list(range(9)), 9, "group", [])
    assert sibling is not None
    assert sibling.published == 2
    kv.check([leader, sibling])
    kv.release(leader)
    kv.release(sibling)
    assert (kv.pool.cached, len(kv.index)) == (0, 0)
    kv.check([])


def test_forget_all_empties_the_cache() -> None:
    kv = KVManager(10, 4)
    kv.release(fill(kv, list(range(12))))
    assert kv.pool.cached == 3
    assert kv.forget_all() == 3
    assert (kv.pool.cached, kv.pool.free) == (0, 10)
    kv.check([])


def test_forget_all_leaves_what_requests_hold_and_empties_host_memory() -> None:
    kv = KVManager(10, 4, host_blocks=8)
    held, tokens = fill(kv, list(range(12))), list(range(100, 112))
    gone = fill(kv, tokens)
    kv.spill(gone, tokens, 12)
    for order in kv.take_orders():
        kv.copied(order.id)
    kv.unpin(gone.names)
    kv.release(gone)
    assert kv.forget_all() == 6  # three on the device, three on the host
    assert kv.host is not None
    assert len(kv.host) == 0
    kv.check([held])
    again = kv.reserve(list(range(12)), 12, "", [])
    assert again is not None
    assert again.published == 2  # of the blocks that were held, all but the last


def test_drifted_counts_are_noticed() -> None:
    kv = KVManager(4, 4)
    holding = fill(kv, list(range(8)))
    kv.pool.references[holding.blocks[0]] += 1
    with pytest.raises(AssertionError, match="drifted"):
        kv.check([holding])


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12), st.integers(1, 5))
def test_hits_are_exactly_the_common_full_blocks(prompts: list[list[int]], size: int) -> None:
    """With room for everything, a hit is the longest run of full blocks that some earlier prompt began with."""
    kv = KVManager(300, size)
    holdings: list[Holding] = []
    for number, prompt in enumerate(prompts):
        holding = kv.reserve(prompt, len(prompt), "", [])
        assert holding is not None
        most = (len(prompt) - 1) // size
        common = 0
        for earlier in prompts[:number]:
            blocks = 0
            while blocks < most and earlier[: (blocks + 1) * size] == prompt[: (blocks + 1) * size]:
                blocks += 1
            common = max(common, min(blocks, len(earlier) // size))
        assert holding.published == common
        kv.publish(holding, prompt, len(prompt))
        holdings.append(holding)
        kv.check(holdings)
