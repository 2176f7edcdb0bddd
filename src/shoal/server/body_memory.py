"""The memory of request bodies: a limit over all of them in one front.

Owns the count of bytes that have arrived and whose requests are not prepared yet. Small bodies are counted apart, so
that large ones, however slowly they arrive, never keep small ones out. Knows no sockets and no HTTP.
"""

SMALL = 64 * 2**10  # bytes of a small body
SHARE = 8  # one part in so many of the limit is kept for small bodies


class BodyMemory:
    """Counts bytes of bodies.

    >>> memory = BodyMemory(8 * 2**20)
    >>> memory.resize(0, 7 * 2**20), memory.resize(0, 100_000), memory.resize(0, 1000)
    (True, False, True)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._most = {True: max(SMALL, limit // SHARE), False: limit - limit // SHARE}
        self._used = {True: 0, False: 0}  # by whether the body is small

    @property
    def used(self) -> int:
        return sum(self._used.values())

    def resize(self, old: int, new: int) -> bool:
        """A body of `old` bytes has `new` now. False: there is no memory for that, and nothing has changed."""
        small = new <= SMALL
        if new > old and self._used[small] + new - (old if small == (old <= SMALL) else 0) > self._most[small]:
            return False
        self._used[old <= SMALL] -= old
        self._used[small] += new
        return True
