"""Block pool: which KV blocks are free, held or cached.

Knows block ids and reference counts. Does not know requests, tokens or torch. Every operation is O(1) per block.

           grab (clean first, then the oldest cached one, whose content is forgotten)
     ┌──────────────────────────────────────────────┐
     │                                              ▼
   clean ◄──────── last reference dropped ──────── held (references ≥ 1)
     ▲                                              │ ▲
     │ forgotten                    … and published │ │ hold (a prefix hit)
     └────────────────────────── cached, in LRU order ┘
"""

from array import array
from collections import OrderedDict
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
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._forget = forget  # called with cached blocks whose contents are about to be overwritten

    @property
    def free(self) -> int:
        """Blocks that grab() could hand out now."""
        return len(self._clean) + len(self._cached)

    @property
    def cached(self) -> int:
        """Free blocks whose content may still be hit."""
        return len(self._cached)

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
            old = [self._cached.popitem(last=False)[0] for _ in range(count - fresh)]
            for block in old:
                self.published[block] = False
            self._forget(*old)
            taken += old
        for block in taken:
            references[block] = 1
        return taken

    def hold(self, block: int) -> None:
        """One more reference to a block that is held or cached."""
        if self.references[block] == 0:
            del self._cached[block]
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
                    cached[block] = None
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
            del self._cached[block]
            self._clean.append(block)

    def check(self) -> None:
        """Every block is free, cached or held."""
        clean, cached = set(self._clean), set(self._cached)
        assert len(clean) == len(self._clean), "a block is in the clean list twice"
        assert not clean & cached, "a block is both clean and cached"
        for block, count in enumerate(self.references):
            listed = block in clean or block in cached
            assert (count == 0) == listed, f"block {block} has {count} references but is in the wrong list"
            if count == 0:
                assert self.published[block] == (block in cached), f"free block {block} is in the wrong list"
