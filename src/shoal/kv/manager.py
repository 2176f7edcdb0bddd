"""KV manager: reserve, grow, publish and release the blocks of a request; and their way to host memory and back, or to
another engine.

Knows tokens, digests and block ids. Does not know policies, rows, torch or time.

Blocks travel by their names. `spill` copies full blocks to the host tier under the names they have in the prefix cache;
`reserve` looks for a prefix on the device first and goes on in the host tier, whose blocks are then fetched. Copies run
beside the passes: a block on its way out stays held until its copy is done, and a holding whose blocks are on their way
in is not used before that (`fetch`).

Between engines they travel by name, too. One engine's host tier is its outbox (`export`), which the other reads; what
arrives there (`arrive`) becomes part of its prefix cache, where the request that it came for finds it.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from shoal.core.plan import BlockCopy
from shoal.kv.arrivals import ArrivedBlocks
from shoal.kv.host import HostTier
from shoal.kv.pool import BlockPool
from shoal.kv.prefix import PrefixIndex, first_digest, next_digest

COLD_BLOCKS = 32  # cached blocks that are copied to the host in one pass, at most


class Holding:
    """The blocks of one request, in the order of its positions."""

    __slots__ = ("blocks", "capacity", "dead", "fetch", "names", "published", "salt")

    def __init__(self, blocks: list[int], capacity: int, names: list[bytes], published: int, salt: str | None) -> None:
        self.blocks = blocks
        self.capacity = capacity  # positions that fit
        self.names = names  # digests of the first full blocks, as far as known
        self.published = published  # how many of the first blocks others can hit
        self.salt = salt  # None: never publishes
        self.fetch: int | None = None  # the copy that brings some of its blocks from the host
        self.dead = False  # released while that copy was under way


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy under way."""

    names: tuple[bytes, ...]
    blocks: tuple[int, ...]  # on the device
    holding: Holding | None  # the one that waits for it; None: on its way out, or in from another engine
    peer: str = ""  # the address of that engine's outbox

    @property
    def out(self) -> bool:
        return self.holding is None and not self.peer


class KVManager:
    """Blocks for requests, shared by prefix where tokens and salt are equal.

    With `keep` off nothing outlives its holders, yet the n samples of one prompt still share its blocks while
    one of them runs (the caller gives them a salt of their own).
    """

    def __init__(
        self, total_blocks: int, block_size: int, keep: bool = True, host_blocks: int = 0, spill_cold: bool = True
    ) -> None:
        """`spill_cold`: copy cached blocks that no request holds to host memory, if there is some."""
        self.block_size = block_size
        self.keep = keep
        self.index = PrefixIndex(total_blocks)
        self.pool = BlockPool(total_blocks, forget=self.index.forget)
        self.host = HostTier(host_blocks) if host_blocks else None
        self.arrivals = ArrivedBlocks()
        self.transfers: dict[int, Transfer] = {}
        self.leaving = 0  # blocks that only copies hold: free soon
        self._spills_cold = spill_cold
        self._orders: list[BlockCopy] = []
        self._copies = 0
        self._cold: deque[int] = deque(maxlen=total_blocks)  # blocks that became cached, oldest first

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many positions."""
        return -(-tokens // self.block_size)

    def reserve(
        self,
        tokens: Sequence[int],
        capacity: int,
        salt: str | None,
        names: list[bytes],
        spare: int = 0,
        look: bool = True,
    ) -> Holding | None:
        """Blocks for `capacity` positions, the first ones from the cache where it has them (with `look`).

        None if fewer than `spare` blocks would stay free, and then nothing has moved. A hit never covers all tokens:
        one is left to compute. `names` are the digests of these tokens' full blocks; they are extended in place, so a
        request that tries again, or comes back after a preemption, does not hash its tokens twice.
        """
        hits = self._hits(tokens, salt, names) if look and salt is not None else []
        fresh = max(0, self.blocks_for(capacity) - len(hits))
        while self.pool.free - self._revived(hits) - fresh < spare:
            if not self._let_newest_arrival_go():
                return None
        for block in hits:  # hold first, or the grab below might take them away
            self.pool.hold(block)
        taken = self.pool.grab(fresh)
        assert taken is not None, "the pool has fewer free blocks than it counted"
        blocks = hits + taken
        holding = Holding(blocks, len(blocks) * self.block_size, names, len(hits), salt)
        if self.host is not None and look and salt is not None:
            self._fetch(self.host, holding, tokens, salt)
        return holding

    def count_hits(self, tokens: Sequence[int], salt: str, names: list[bytes], first: int = 0) -> int:
        """How many blocks of these tokens are cached one after the other, from block `first` on; see reserve()."""
        last = (len(tokens) - 1) // self.block_size
        for number in range(len(names), min(first, last)):
            self._name(names, number, tokens, salt)
        for number in range(first, last):
            self._name(names, number, tokens, salt)
            if self.index.find(names[number]) is None:
                return number - first
        return max(0, last - first)

    def _hits(self, tokens: Sequence[int], salt: str, names: list[bytes]) -> list[int]:
        hits: list[int] = []
        for number in range((len(tokens) - 1) // self.block_size):
            self._name(names, number, tokens, salt)
            block = self.index.find(names[number])
            if block is None:
                break
            hits.append(block)
        return hits

    def _revived(self, hits: Sequence[int]) -> int:
        """How many of them are free to be overwritten."""
        return sum(1 for block in hits if self.pool.references[block] == 0)

    def _name(self, names: list[bytes], number: int, tokens: Sequence[int], salt: str) -> None:
        """Make sure that names[number] is there; those before it are."""
        if number == len(names):
            before = names[-1] if names else first_digest(salt)
            names.append(next_digest(before, tokens[number * self.block_size : (number + 1) * self.block_size]))

    def grow(self, holding: Holding, capacity: int) -> bool:
        """Hold blocks for `capacity` positions in all; False if there are not enough, and then nothing has moved."""
        if capacity <= holding.capacity:
            return True
        missing = self.blocks_for(capacity) - len(holding.blocks)
        while (taken := self.pool.grab(missing)) is None:
            if not self._let_newest_arrival_go():
                return False
        holding.blocks += taken
        holding.capacity = len(holding.blocks) * self.block_size
        return True

    def publish(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        """Let others hit the full blocks among the first `computed` positions, whose tokens must be committed."""
        size = self.block_size
        if holding.salt is None or computed // size <= holding.published:
            return
        names, first, last = holding.names, holding.published, computed // size
        for number in range(len(names), last):
            self._name(names, number, tokens, holding.salt)
        if last - first > 1:
            self.pool.publish(*self.index.add_all(names[first:last], holding.blocks[first:last]))
        elif self.index.add(names[first], holding.blocks[first]):  # most often one block has been filled
            self.pool.publish(holding.blocks[first])
        holding.published = last

    def release(self, holding: Holding) -> None:
        """Give all blocks back; the end of the sequence is reused before its beginning."""
        if holding.fetch is not None:
            holding.dead = True  # a copy still writes to them
            return
        self._let_go(holding.blocks)
        holding.blocks = []
        holding.capacity = 0

    def _let_go(self, blocks: Sequence[int]) -> None:
        self.pool.drop(reversed(blocks))
        if not self.keep:
            for block in blocks:
                if self.pool.references[block] == 0 and self.index.named_block(block):
                    self.index.forget(block)
                    self.pool.unpublish(block)
        elif self.host is not None and self._spills_cold:
            self._cold += [block for block in reversed(blocks) if not self.pool.references[block]]

    def discard(self, holding: Holding) -> None:
        """Give all blocks back, and unpublish those that only this holding had: their content is not to be trusted."""
        blocks = list(holding.blocks)
        self.release(holding)
        for block in blocks:
            if self.pool.references[block] == 0 and self.index.named_block(block):
                self.index.forget(block)
                self.pool.unpublish(block)

    def forget_all(self) -> int:
        """Empty the cache of blocks that no request holds, on the device and the host; returns how many there were."""
        count = 0 if self.host is None else self.host.forget_idle()
        for block in list(self.index.named()):
            if self.pool.references[block] == 0:
                self.index.forget(block)
                self.pool.unpublish(block)
                count += 1
        return count

    # ---- to host memory and back ----------------------------------------------------------------------------------

    def spill(self, holding: Holding, tokens: Sequence[int], computed: int) -> list[bytes]:
        """Begin to copy the full blocks among the first `computed` positions to the host, as far as they fit.

        Returns the names of those that will be there, each pinned once; unpin() them when they are no longer needed.
        """
        if self.host is None or holding.salt is None:
            return []
        self.publish(holding, tokens, computed)
        names = []
        moving: list[tuple[bytes, int, int]] = []
        for name, block in zip(holding.names, holding.blocks[: computed // self.block_size], strict=False):
            if not self.host.has(name):
                target = self.host.take(name)
                if target is None:
                    break
                moving.append((name, block, target))
            self.host.pin(name)
            names.append(name)
        self._send_out(moving)
        return names

    def unpin(self, names: Iterable[bytes]) -> None:
        """These are no longer needed."""
        if self.host is not None:
            for name in names:
                self.host.unpin(name)

    def spill_cold(self) -> None:
        """Begin to copy some cached blocks that no request holds, so that they can still be hit when overwritten."""
        host, pool = self.host, self.pool
        if host is None or not self._cold:
            return
        moving: list[tuple[bytes, int, int]] = []
        while self._cold and len(moving) < COLD_BLOCKS:
            block = self._cold.popleft()
            name = self.index.name_of(block)
            if name is None or pool.references[block] or host.has(name):
                continue
            target = host.take(name)
            if target is None:
                break
            moving.append((name, block, target))
        self._send_out(moving)

    def _send_out(self, moving: Sequence[tuple[bytes, int, int]]) -> None:
        if not moving:
            return
        for _, block, _ in moving:
            self.pool.hold(block)
        names, blocks, targets = zip(*moving, strict=True)
        self._order(Transfer(names, blocks, None), blocks, targets, "out")
        self.leaving += len(blocks)

    def _fetch(self, host: HostTier, holding: Holding, tokens: Sequence[int], salt: str) -> None:
        """Begin to bring the blocks that follow the hits from the host."""
        names: list[bytes] = []
        sources: list[int] = []
        for number in range(holding.published, (len(tokens) - 1) // self.block_size):
            self._name(holding.names, number, tokens, salt)
            source = host.find(holding.names[number])
            if source is None:
                break
            names.append(holding.names[number])
            sources.append(source)
        if not names:
            return
        for name in names:
            host.pin(name)
        targets = tuple(holding.blocks[holding.published : holding.published + len(names)])
        holding.fetch = self._order(Transfer(tuple(names), targets, holding), tuple(sources), targets, "in")

    def _order(self, transfer: Transfer, sources: tuple[int, ...], targets: tuple[int, ...], direction: str) -> int:
        number = self._copies
        self._copies += 1
        self.transfers[number] = transfer
        self._orders.append(BlockCopy(number, sources, targets, direction, transfer.names, transfer.peer))
        return number

    # ---- between engines ------------------------------------------------------------------------------------------

    def export(self, names: Iterable[bytes]) -> list[int]:
        """Begin to copy these blocks to the host tier, for another engine. Returns the host blocks of the first of
        them, each pinned once: as many as are cached here and fit there."""
        assert self.host is not None, "blocks are exported, and there is no host memory for them"
        slots: list[int] = []
        moving: list[tuple[bytes, int, int]] = []
        for name in names:
            slot = self.host.place_of(name)
            if slot is None:
                block = None if self.host.has(name) else self.index.find(name)
                slot = None if block is None else self.host.take(name)
                if block is None or slot is None:
                    break
                moving.append((name, block, slot))
            self.host.pin(name)
            slots.append(slot)
        self._send_out(moving)
        return slots

    def arrive(self, receiver: Hashable, names: Sequence[bytes], slots: Sequence[int], peer: str, spare: int) -> None:
        """Begin to copy blocks with these names from another engine's outbox, except those that are here, and keep all
        of them for the receiver until dismiss(). Leaves `spare` blocks free: what does not fit is not copied."""
        self.arrivals.expect(receiver)
        for name in names:
            block = self.index.find(name)
            if block is not None:
                self.pool.hold(block)
                self.arrivals.keep(receiver, block)
        missing = [
            (name, slot)
            for name, slot in zip(names, slots, strict=True)
            if self.index.find(name) is None and not self.arrivals.has_under_way(name)
        ][: max(0, self.pool.free - spare)]
        if not missing:
            return
        targets = tuple(self.pool.grab(len(missing)) or ())
        wanted, sources = zip(*missing, strict=True)
        copy = self._order(Transfer(wanted, targets, None, peer), sources, targets, "in")
        self.arrivals.begin(copy, receiver, wanted)

    def dismiss(self, receiver: Hashable) -> None:
        """Its blocks need not be kept any more."""
        self._let_go(self.arrivals.leave(receiver))

    def _let_newest_arrival_go(self) -> bool:
        """Blocks are short: those that wait for a request may be overwritten. False if there are none."""
        blocks = self.arrivals.newest()
        if blocks is None:
            return False
        self._let_go(blocks)
        return True

    def _arrived(self, number: int, transfer: Transfer, failed: bool) -> None:
        receiver = self.arrivals.came(number, transfer.names)
        for name, block in zip(transfer.names, transfer.blocks, strict=True):
            if not failed and self.index.add(name, block):
                self.pool.publish(block)
                if self.arrivals.keep(receiver, block):
                    continue
            self._let_go([block])

    def take_orders(self) -> tuple[BlockCopy, ...]:
        """Copies that no plan has carried yet; the next one must."""
        orders, self._orders = tuple(self._orders), []
        return orders

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def copied(self, number: int, failed: bool = False) -> int:
        """A copy is done, or has failed: then its content is nowhere but where it came from. Returns its blocks."""
        transfer = self.transfers.pop(number)
        if transfer.peer:
            self._arrived(number, transfer, failed)
            return len(transfer.blocks)
        assert self.host is not None
        if transfer.holding is None:
            for name in transfer.names:
                if failed:
                    self.host.spoil(name)
                else:
                    self.host.written(name)
            self.leaving -= len(transfer.blocks)
            self._let_go(transfer.blocks)
            return len(transfer.blocks)
        holding = transfer.holding
        holding.fetch = None
        for name in transfer.names:
            if failed:
                self.host.spoil(name)
            self.host.unpin(name)
        if not failed:
            for name, block in zip(transfer.names, transfer.blocks, strict=True):
                if self.index.add(name, block):
                    self.pool.publish(block)
            holding.published += len(transfer.names)
        if holding.dead:
            self.release(holding)
        return len(transfer.blocks)

    def check(self, holdings: Iterable[Holding]) -> None:
        """No block lost, none owned twice by mistake, exactly the published blocks have names."""
        self.pool.check()
        published = {block for block, known in enumerate(self.pool.published) if known}
        assert published == set(self.index.named()), "the index and the pool disagree on what can be hit"
        held: Counter[int] = Counter()
        dead = [one.holding for one in self.transfers.values() if one.holding is not None and one.holding.dead]
        for holding in [*holdings, *dead]:
            assert len(set(holding.blocks)) == len(holding.blocks), "one request holds a block twice"
            assert holding.capacity == len(holding.blocks) * self.block_size, "a holding's capacity drifted"
            held.update(holding.blocks)
        for block in held:
            sharers = held[block]
            assert sharers == 1 or self.index.named_block(block), f"block {block} is shared but was never published"
        leaving = [block for one in self.transfers.values() if one.out for block in one.blocks]
        assert len(leaving) == self.leaving, "blocks on their way out are counted wrongly"
        held.update(leaving)
        held.update(block for one in self.transfers.values() if one.peer for block in one.blocks)
        held.update(self.arrivals.kept)
        self.arrivals.check({number for number, one in self.transfers.items() if one.peer})
        counted = {block: count for block, count in enumerate(self.pool.references) if count}
        assert held == Counter(counted), "reference counts drifted"
        if self.host is not None:
            self.host.check()
