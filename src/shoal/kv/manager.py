"""KV manager: reserve, grow, publish and release the blocks of a request.

Knows tokens, digests and block ids. Does not know policies, rows, torch or time.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.kv.pool import BlockPool
from shoal.kv.prefix import PrefixIndex, first_digest, next_digest


class Holding:
    """The blocks of one running request, in the order of its positions."""

    __slots__ = ("blocks", "capacity", "names", "published", "salt")

    def __init__(self, blocks: list[int], capacity: int, names: list[bytes], published: int, salt: str | None) -> None:
        self.blocks = blocks
        self.capacity = capacity  # positions that fit
        self.names = names  # digests of the first full blocks, as far as known
        self.published = published  # how many of the first blocks others can hit
        self.salt = salt  # None: never publishes


class KVManager:
    """Blocks for requests, shared by prefix where tokens and salt are equal.

    With `keep` off nothing outlives its holders, yet the n samples of one prompt still share its blocks while
    one of them runs (the caller gives them a salt of their own).
    """

    def __init__(self, total_blocks: int, block_size: int, keep: bool = True) -> None:
        self.block_size = block_size
        self.keep = keep
        self.index = PrefixIndex()
        self.pool = BlockPool(total_blocks, forget=self.index.forget)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many positions."""
        return -(-tokens // self.block_size)

    def reserve(
        self,
        tokens: Sequence[int],
        room: int,
        salt: str | None,
        names: list[bytes],
        spare: int = 0,
        look: bool = True,
    ) -> Holding | None:
        """Blocks for `room` positions, the first ones from the cache where it has them (unless told not to look).

        None if fewer than `spare` blocks would stay free, and then nothing has moved. A hit never covers all tokens:
        one is left to compute. `names` are the digests of these tokens' full blocks; they are extended in place, so a
        request that tries again, or comes back after a preemption, does not hash its tokens twice.
        """
        hits = self._hits(tokens, salt, names) if look and salt is not None else []
        revived = sum(1 for block in hits if self.pool.references[block] == 0)
        fresh = max(0, self.blocks_for(room) - len(hits))
        if self.pool.free - revived - fresh < spare:
            return None
        for block in hits:  # hold first, or the grab below might take them away
            self.pool.hold(block)
        taken = self.pool.grab(fresh)
        assert taken is not None, "the pool has fewer free blocks than it counted"
        blocks = hits + taken
        return Holding(blocks, len(blocks) * self.block_size, names, len(hits), salt)

    def _hits(self, tokens: Sequence[int], salt: str, names: list[bytes]) -> list[int]:
        hits: list[int] = []
        for number in range((len(tokens) - 1) // self.block_size):
            self._name(names, number, tokens, salt)
            block = self.index.find(names[number])
            if block is None:
                break
            hits.append(block)
        return hits

    def _name(self, names: list[bytes], number: int, tokens: Sequence[int], salt: str) -> None:
        """Make sure that names[number] is there; those before it are."""
        if number == len(names):
            before = names[-1] if names else first_digest(salt)
            names.append(next_digest(before, tokens[number * self.block_size : (number + 1) * self.block_size]))

    def grow(self, holding: Holding, room: int) -> bool:
        """Make room for `room` positions in all; False if there are no blocks, and then nothing has moved."""
        if room <= holding.capacity:
            return True
        taken = self.pool.grab(self.blocks_for(room) - len(holding.blocks))
        if taken is None:
            return False
        holding.blocks += taken
        holding.capacity = len(holding.blocks) * self.block_size
        return True

    def publish(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        """Let others hit the full blocks among the first `computed` positions, whose tokens must be committed."""
        size = self.block_size
        if holding.salt is None or computed // size <= holding.published:
            return
        for number in range(holding.published, computed // size):
            self._name(holding.names, number, tokens, holding.salt)
            block = holding.blocks[number]
            if self.index.add(holding.names[number], block):
                self.pool.publish(block)
        holding.published = computed // size

    def release(self, holding: Holding) -> None:
        """Give all blocks back; the end of the sequence is reused before its beginning."""
        self.pool.drop(reversed(holding.blocks))
        if not self.keep:
            for block in holding.blocks:
                if self.pool.references[block] == 0 and self.index.named_block(block):
                    self.index.forget(block)
                    self.pool.unpublish(block)
        holding.blocks = []
        holding.capacity = 0

    def discard(self, holding: Holding) -> None:
        """Give all blocks back and let nobody hit what only this holding had: its content is not to be trusted."""
        blocks = list(holding.blocks)
        self.release(holding)
        for block in blocks:
            if self.pool.references[block] == 0 and self.index.named_block(block):
                self.index.forget(block)
                self.pool.unpublish(block)

    def forget_all(self) -> int:
        """Empty the cache of blocks nobody holds; returns how many there were."""
        count = 0
        for block in list(self.index.named()):
            if self.pool.references[block] == 0:
                self.index.forget(block)
                self.pool.unpublish(block)
                count += 1
        return count

    def check(self, holdings: Iterable[Holding]) -> None:
        """No block lost, none owned twice by mistake, exactly the published blocks have names."""
        self.pool.check()
        published = {block for block, known in enumerate(self.pool.published) if known}
        assert published == set(self.index.named()), "the index and the pool disagree on what can be hit"
        held: Counter[int] = Counter()
        for holding in holdings:
            assert len(set(holding.blocks)) == len(holding.blocks), "one request holds a block twice"
            assert holding.capacity == len(holding.blocks) * self.block_size, "a holding's capacity drifted"
            held.update(holding.blocks)
        counted = {block: count for block, count in enumerate(self.pool.references) if count}
        assert held == Counter(counted), "reference counts drifted"
        for block in held:
            sharers = held[block]
            assert sharers == 1 or self.index.named_block(block), f"block {block} is shared but was never published"
