"""Block pool: which KV blocks are free, held or cached.

Knows block ids and reference counts. Does not know requests, tokens or torch. Every operation is O(1) per block,
on average.

           grab (clean first, then the oldest cached one, whose content is forgotten)
     ┌──────────────────────────────────────────────┐
     │                                              ▼
   clean ◄──────── last reference dropped ──────── held (references ≥ 1)
     ▲                                              │ ▲
     │ forgotten                    … and published │ │ hold (a prefix hit)
     └────────────────────────── cached, in LRU order ┘
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out block ids 0 … total-1 and counts how many requests hold them.

    >>> pool = BlockPool(2)
    >>> pool.grab(2), pool.grab(1)
    ([0, 1], None)
    """

    def __init__(self, total: int, forget: Callable[..., None] = lambda *blocks: None) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self.references = array("i", bytes(total * array("i").itemsize))  # in buffers, for maps of all blocks
        self.published = bytearray(total)
        self._clean = list(range(total - 1, -1, -1))  # a stack; block 0 is on top
        # oldest first, in a queue: a block that is taken out of the middle keeps its place, which is void from then on
        self._cached: deque[int] = deque()
        self._taken_out = array("i", self.references)  # by block: how many of its places are void, the oldest ones
        self._void = 0  # of all blocks
        self._forget = forget  # called with cached blocks whose contents are about to be overwritten

    @property
    def free(self) -> int:
        """Blocks that grab() could hand out now."""
        return len(self._clean) + len(self._cached) - self._void

    @property
    def cached(self) -> int:
        """Free blocks whose content may still be hit."""
        return len(self._cached) - self._void

    @property
    def held(self) -> int:
        return self.total - self.free

    def grab(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each; None if there are not as many, and then nothing has moved."""
        if count > self.free:
            return None
        clean, references = self._clean, self.references
        fresh = min(count, len(clean))
        taken = clean[len(clean) - fresh :]
        taken.reverse()
        del clean[len(clean) - fresh :]
        if fresh < count:
            old = self._oldest(count - fresh)
            for block in old:
                self.published[block] = False
            self._forget(*old)
            taken += old
        for block in taken:
            references[block] = 1
        return taken

    def _oldest(self, count: int) -> list[int]:
        """Take so many blocks out of the cache, which has them."""
        cached, taken_out = self._cached, self._taken_out
        if not self._void:
            return [cached.popleft() for _ in range(count)]
        found: list[int] = []
        while len(found) < count:
            block = cached.popleft()
            if taken_out[block]:
                taken_out[block] -= 1
                self._void -= 1
            else:
                found.append(block)
        return found

    def _take_out(self, block: int) -> None:
        """This block is in the cache no more."""
        self._taken_out[block] += 1
        self._void += 1
        if self._void > self.total:
            self._cached, left = deque(self._oldest(self.cached)), self._cached
            for one in left:
                self._taken_out[one] = 0
            self._void = 0

    def hold(self, block: int) -> None:
        """One more reference to a block that is held or cached."""
        if self.references[block] == 0:
            self._take_out(block)
        self.references[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One reference less to each; published blocks stay cached, those named first are reused first."""
        references, published, cached, clean = self.references, self.published, self._cached, self._clean
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} was dropped more often than it was held"
            references[block] = left
            if not left:
                if published[block]:
                    cached.append(block)
                else:
                    clean.append(block)

    def publish(self, *blocks: int) -> None:
        """From now on these blocks' contents can be hit, also after their last references are dropped."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is published and not held"
            self.published[block] = True

    def unpublish(self, block: int) -> None:
        """Its content can no longer be hit."""
        self.published[block] = False
        if self.references[block] == 0:
            self._take_out(block)
            self._clean.append(block)

    def check(self) -> None:
        """Every block is free, cached or held."""
        void, valid = array("i", self._taken_out), list[int]()
        for block in self._cached:
            if void[block]:
                void[block] -= 1
            else:
                valid.append(block)
        assert sum(self._taken_out) == self._void, "places in the cache are counted wrongly"
        assert self._void <= self.total, "the queue grows without end"
        assert not any(void), "a block has more void places than places"
        clean, cached = set(self._clean), set(valid)
        assert len(clean) == len(self._clean), "a block is in the clean list twice"
        assert len(cached) == len(valid), "a block is in the cache twice"
        assert not clean & cached, "a block is both clean and cached"
        for block, count in enumerate(self.references):
            listed = block in clean or block in cached
            assert (count == 0) == listed, f"block {block} has {count} references but is in the wrong list"
            if count == 0:
                assert self.published[block] == (block in cached), f"free block {block} is in the wrong list"
