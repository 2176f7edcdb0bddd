"""The black box: the requests of the passes in flight, in a file that outlives the engine's process.

The engine records the requests of every pass before the pass begins. When it dies of a fault, the next engine reads
which requests to suspect. The file lies in the private folder; what was written to it stays in the kernel's page cache
when the process is gone.

Beside it is a mark that the process died of a fault of its own, not of a kill from outside: the fronts read it when
they lose the engine, because they move all its jobs to another one at once, but the suspects. Knows only ids.
"""

import contextlib
import faulthandler
import json
import os
from collections.abc import Sequence
from pathlib import Path

NAME = "blackbox"
FAULT = "fault-{}"  # of start number n


class BlackBox:
    """The last two passes, newest first."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._last: Sequence[str] = ()
        self._before: Sequence[str] = ()
        self._tried = False

    def note(self, ids: Sequence[str], tried: bool) -> None:
        """Record a pass that is about to begin; `tried`: its requests are suspects. Cheap if the ids are the same."""
        if ids is self._last and tried == self._tried and (tried or ids is self._before):
            return
        before = () if tried else self._last  # suspects run one pass at a time
        self._last, self._before, self._tried = ids, before, tried
        text = json.dumps({"tried": tried, "ids": list(dict.fromkeys([*self._last, *self._before]))}).encode()
        os.pwrite(self._fd, text + b"\n" + b" " * 8, 0)
        os.ftruncate(self._fd, len(text) + 1)

    def close(self) -> None:
        os.close(self._fd)


def read(folder: Path) -> tuple[list[str], bool]:
    """(ids, whether they were suspects already) of a dead engine's last passes; no ids if the file cannot be read."""
    try:
        found = json.loads((folder / NAME).read_bytes())
        return [str(id) for id in found["ids"]], bool(found["tried"])
    except (OSError, ValueError, TypeError, KeyError):
        return [], False


def mark_faults(folder: Path, start: int) -> None:
    """Mark the death of this process if a signal that means a fault ends it."""
    for old in folder.glob(FAULT.format("*")):
        old.unlink(missing_ok=True)
    faulthandler.enable((folder / FAULT.format(start)).open("wb"))  # kept open by the handler


def mark_fault(folder: Path, start: int) -> None:
    """The process is about to die of an error, or to be killed because it hangs."""
    with contextlib.suppress(OSError):
        (folder / FAULT.format(start)).write_bytes(b"fault\n")


def suspected(folder: Path, start: int) -> frozenset[str]:
    """The requests in the last passes of an engine that has died; none if no fault killed it."""
    try:
        if not (folder / FAULT.format(start)).stat().st_size:
            return frozenset()
    except OSError:
        return frozenset()
    return frozenset(read(folder)[0])


class Suspected:
    """The requests in the last passes of an engine that died of a fault, by id.

    After the first death they are tried as one group. If the engine died again while it tried them, they are tried as
    two halves. A request that was tried alone when the engine died is guilty.
    """

    def __init__(self, ids: Sequence[str], tried: bool) -> None:
        half = len(ids) // 2 if tried else len(ids)
        self.guilty = ids[0] if tried and len(ids) == 1 else None
        self.first, self.second = frozenset(ids[:half]), frozenset(ids[half:])
