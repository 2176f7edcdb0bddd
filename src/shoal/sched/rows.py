"""Rows: where running requests stand in the runner's tables.

A row is handed out again only after the last pass that names it has been committed: until then the runner may still
be reading it. Each life of any row has a generation of its own, so that a late result cannot be taken for the new
owner's, nor for the same request's next life elsewhere.
Knows rows and pass numbers, no requests.
"""

from collections import deque


class RowTable:
    """Hands out rows 0 … count-1.

    >>> rows = RowTable(1)
    >>> rows.take()
    (0, 0)
    >>> rows.give_back(0, last_step=7)
    >>> rows.take() is None          # pass 7 still reads it
    True
    >>> rows.committed(7)
    >>> rows.take()
    (0, 1)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._leaving: deque[tuple[int, int]] = deque()  # (last pass that names it, row)
        self._lives = 0
        self._committed = -1

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int] | None:
        """A row and the generation of its new life; None if there is none."""
        if not self._free:
            return None
        self._lives += 1
        return self._free.pop(), self._lives - 1

    def give_back(self, row: int, last_step: int) -> None:
        """The row's owner is gone; pass `last_step` was the last to name it."""
        if last_step <= self._committed:
            self._free.append(row)
        else:
            self._leaving.append((last_step, row))

    def committed(self, step: int) -> None:
        """Pass `step` has come back: what left before it is free now."""
        self._committed = step
        for _ in range(len(self._leaving)):
            last_step, row = self._leaving.popleft()
            self.give_back(row, last_step)

    def check(self, used: list[int]) -> None:
        """Every row is free, leaving or used, and only one of these."""
        everywhere = self._free + [row for _, row in self._leaving] + used
        assert sorted(everywhere) == list(range(self.count)), f"rows drifted: {sorted(everywhere)}"
