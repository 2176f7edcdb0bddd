"""The host tier: KV blocks that left the device, kept in host memory under the names of the prefix cache.

    take ──► being written ──► ready ──► found again, or forgotten (the oldest that is not pinned) for others

Knows names (digests), host block ids and how many requests rely on them (pins). Does not know requests, device
blocks or how bytes travel. Every operation is O(1).
"""

from collections import OrderedDict


class Entry:
    """One block in host memory."""

    __slots__ = ("block", "pins", "ready", "spoiled")

    def __init__(self, block: int) -> None:
        self.block = block
        self.pins = 0
        self.ready = False
        self.spoiled = False


class HostTier:
    """Host blocks 0 … total-1 by name.

    >>> host = HostTier(1)
    >>> host.take(b"a"), host.take(b"b"), host.find(b"a")   # it is still being written
    (0, None, None)
    >>> host.written(b"a")
    >>> host.find(b"a"), host.take(b"b"), host.find(b"a")   # its block was needed
    (0, 0, None)
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # ready and not pinned, oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, name: bytes) -> bool:
        """It is here, or on its way."""
        return name in self._entries

    def find(self, name: bytes) -> int | None:
        """Its block, if it is all there; it counts as used just now."""
        entry = self._entries.get(name)
        if entry is None or not entry.ready:
            return None
        if name in self._idle:
            self._idle.move_to_end(name)
        return entry.block

    def place_of(self, name: bytes) -> int | None:
        """Its block, if it is there or on its way."""
        entry = self._entries.get(name)
        return None if entry is None or entry.spoiled else entry.block

    def used(self) -> list[int]:
        """Blocks that have a name, for a map of them."""
        return [entry.block for entry in self._entries.values()]

    def take(self, name: bytes) -> int | None:
        """A block to write this content to; None if all are pinned or being written."""
        assert name not in self._entries, "a block that is there is written again"
        if self._free:
            block = self._free.pop()
        elif self._idle:
            oldest, _ = self._idle.popitem(last=False)
            block = self._entries.pop(oldest).block
        else:
            return None
        self._entries[name] = Entry(block)
        return block

    def written(self, name: bytes) -> None:
        """Its content has arrived."""
        entry = self._entries[name]
        entry.ready = True
        self._rest(name, entry)

    def spoil(self, name: bytes) -> None:
        """Its content never arrived, or cannot be read: it is not found again, and is forgotten once unpinned."""
        entry = self._entries[name]
        entry.ready, entry.spoiled = False, True
        self._idle.pop(name, None)
        self._rest(name, entry)

    def pin(self, name: bytes) -> None:
        """A request relies on it."""
        self._entries[name].pins += 1
        self._idle.pop(name, None)

    def unpin(self, name: bytes) -> None:
        """A request no longer relies on it."""
        entry = self._entries[name]
        entry.pins -= 1
        assert entry.pins >= 0, "unpinned more often than pinned"
        self._rest(name, entry)

    def forget_idle(self) -> int:
        """Forget all that no request relies on; returns how many there were."""
        count = len(self._idle)
        while self._idle:
            name, _ = self._idle.popitem(last=False)
            self._free.append(self._entries.pop(name).block)
        return count

    def _rest(self, name: bytes, entry: Entry) -> None:
        if entry.pins:
            return
        if entry.ready:
            self._idle[name] = None
        elif entry.spoiled:
            del self._entries[name]
            self._free.append(entry.block)

    def pinned(self) -> dict[bytes, int]:
        """How often each block is pinned, for checks."""
        return {name: entry.pins for name, entry in self._entries.items() if entry.pins}

    def check(self) -> None:
        """Every host block is free or has one name; exactly the ready and unpinned may be forgotten."""
        blocks = self._free + [entry.block for entry in self._entries.values()]
        assert sorted(blocks) == list(range(self.total)), "a host block is lost or has two names"
        idle = {name for name, entry in self._entries.items() if entry.ready and not entry.pins}
        assert not any(entry.spoiled and not entry.pins for entry in self._entries.values()), "a spoiled block is kept"
        assert idle == set(self._idle), "what may be forgotten is counted wrongly"
