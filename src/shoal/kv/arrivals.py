"""Arrivals: blocks that another engine has computed, kept for the requests that they came for.

    under way (a copy writes it) ──► kept ──► let go: cached, like any block that no request holds

A receiver is whatever the blocks came for: a job that will be submitted here. Its blocks are kept until it has
started, so that they are not overwritten in between; when blocks run short, those of the newest receiver are let go
first, and it computes again what is lost by then. Knows names, block ids and copies by number; does not know requests
or transports.
"""

from collections.abc import Hashable, Iterable, Sequence


class ArrivedBlocks:
    """What is on its way here, and what has come and is kept.

    >>> arrivals = ArrivedBlocks()
    >>> arrivals.begin(1, "job", [b"a"])
    >>> arrivals.waits_for([b"a", b"b"])
    {1}
    >>> arrivals.came(1, [b"a"]), arrivals.keep("job", 7), arrivals.newest()
    ('job', True, [7])
    """

    def __init__(self) -> None:
        self._under_way: dict[bytes, int] = {}  # name → the copy that brings it
        self._receivers: dict[int, Hashable | None] = {}  # of each copy; None: it waits no more
        self._kept: dict[Hashable, list[int]] = {}  # blocks held for each receiver, oldest receiver first

    @property
    def kept(self) -> list[int]:
        """All blocks that are kept, once for each receiver that they are kept for."""
        return [block for blocks in self._kept.values() for block in blocks]

    def expect(self, receiver: Hashable) -> None:
        """From now on, what comes is kept for it."""
        self._kept.setdefault(receiver, [])

    def has_under_way(self, name: bytes) -> bool:
        return name in self._under_way

    def waits_for(self, names: Iterable[bytes]) -> set[int]:
        """The copies that bring some of these."""
        return {self._under_way[name] for name in names if name in self._under_way}

    def begin(self, copy: int, receiver: Hashable, names: Sequence[bytes]) -> None:
        """A copy of these is under way."""
        self.expect(receiver)
        self._receivers[copy] = receiver
        self._under_way.update(dict.fromkeys(names, copy))

    def came(self, copy: int, names: Iterable[bytes]) -> Hashable | None:
        """A copy of these has ended, well or not; returns the receiver that waits for it."""
        for name in names:
            del self._under_way[name]
        return self._receivers.pop(copy)

    def keep(self, receiver: Hashable | None, block: int) -> bool:
        """Keep a block, which the caller holds, for a receiver; False if that waits no more."""
        if receiver is None or receiver not in self._kept:
            return False
        self._kept[receiver].append(block)
        return True

    def newest(self) -> list[int] | None:
        """Give up the blocks of the newest receiver that has some; the caller lets go of them."""
        for receiver in reversed(self._kept):
            if self._kept[receiver]:
                blocks, self._kept[receiver] = self._kept[receiver], []
                return blocks
        return None

    def leave(self, receiver: Hashable) -> list[int]:
        """It has started, or will not: the caller lets go of the blocks."""
        self._receivers = {copy: None if one == receiver else one for copy, one in self._receivers.items()}
        return self._kept.pop(receiver, [])

    def check(self, copies: set[int]) -> None:
        """`copies`: those that are under way here from other engines."""
        assert set(self._receivers) == copies, "a copy is lost, or has no receiver"
        assert set(self._under_way.values()) == copies, "a block is waited for that no copy brings"
        assert all(one is None or one in self._kept for one in self._receivers.values()), "a copy for no receiver"
