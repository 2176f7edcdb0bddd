"""The black box: who was in the passes under way, written where a dead engine cannot take it along.

The engine notes the requests of every pass before it begins. When it dies of a fault, the next one reads whom to
suspect. A small file in the private folder: what was written stays in the kernel's memory when the process is gone.
Knows ids.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

NAME = "blackbox"


class BlackBox:
    """The last two passes, newest first."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._last: Sequence[str] = ()
        self._before: Sequence[str] = ()
        self._tried = False

    def note(self, ids: Sequence[str], tried: bool) -> None:
        """A pass with these is about to begin; `tried`: they are suspects already. Cheap while they stay the same."""
        if ids is self._last and tried == self._tried and (tried or ids is self._before):
            return
        self._last, self._before, self._tried = ids, () if tried else self._last, tried  # suspects come one at a time
        text = json.dumps({"tried": tried, "ids": list(dict.fromkeys([*self._last, *self._before]))}).encode()
        os.pwrite(self._fd, text + b"\n" + b" " * 8, 0)
        os.ftruncate(self._fd, len(text) + 1)

    def close(self) -> None:
        os.close(self._fd)


def read(folder: Path) -> tuple[list[str], bool]:
    """(ids, whether they were suspects already) of the last passes of an engine that is gone; nobody if unreadable."""
    try:
        found = json.loads((folder / NAME).read_bytes())
        return [str(id) for id in found["ids"]], bool(found["tried"])
    except (OSError, ValueError, TypeError, KeyError):
        return [], False
