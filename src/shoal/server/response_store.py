"""The store of /v1/responses: what was asked and answered, in one SQLite file that all fronts of a server share.

Owns the file, its limits (bytes and age) and whose responses are whose: every query names its tenant. All work is done
in one thread of its own, since a write of another front may have to be waited for. Knows no HTTP, no items and no
engine: a response is two texts of JSON here.

    tenants ──bytes──► how much each holds: the one that holds most loses its oldest response when the file is full
    responses ──previous──► responses ──previous──► …      a conversation, from its end
    responses ◄──id── events                               of one that is made in the background and streamed
"""

import asyncio
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from shoal.errors import BadConfig, Rejected

log = logging.getLogger(__name__)
T = TypeVar("T")

BUSY_S = 5.0  # how long a write of another front is waited for
WAL_BYTES = 4 * 2**20  # of the write-ahead log, after each checkpoint
ROW_BYTES = 200  # counted for a response beside its texts
SHARE = 4  # no response takes more than one part in so many of the store
MOST_TURNS = 4096  # of one conversation
MOST_PARTS = 16  # of a response's events that are read at a time
PENDING_BYTES = 64 * 2**20  # inputs of running requests that one front keeps until their responses are stored
SWEEP_S = 60.0  # how often old responses are looked for, at most
SCHEMA = """
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, created_s REAL NOT NULL, used_s REAL NOT NULL,
    bytes INTEGER NOT NULL, asked BLOB NOT NULL, answered BLOB NOT NULL,
    ended INTEGER NOT NULL, beat_s REAL NOT NULL, cancel INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, part BLOB NOT NULL, PRIMARY KEY (id, first)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON responses (created_s);
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used_s);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO tenants VALUES (new.tenant, new.bytes)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON responses BEGIN
    UPDATE tenants SET bytes = bytes + new.bytes - old.bytes WHERE tenant = old.tenant;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE tenants SET bytes = bytes - old.bytes WHERE tenant = old.tenant;
    DELETE FROM tenants WHERE tenant = old.tenant AND bytes <= 0;
    DELETE FROM events WHERE id = old.id;
END;
"""


class StoreFailed(Rejected):
    """The store cannot be used now: the disk is full, or the file is locked or damaged."""

    def __init__(self) -> None:
        super().__init__("the store of responses cannot be used now; retry later", retry_after_s=5.0)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. `asked`: its input items, `answered`: the response itself, both as JSON."""

    id: str
    previous: str | None  # the response it follows
    asked: bytes
    answered: bytes
    ended: bool = True  # False: it is being made in the background
    silent_s: float = 0.0  # … and for how long its front has not said so


class PendingMemory:
    """Counts the inputs of running requests. Used from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """False: there is no room, and nothing has changed."""
        with self._lock:
            if self.used + size > self.limit:
                return False
            self.used += size
            return True

    def release(self, size: int) -> None:
        with self._lock:
            self.used -= size


class PendingInput:
    """The input of a request that runs, as JSON; counted until it is dropped."""

    __slots__ = ("_memory", "data")

    def __init__(self, data: bytes, memory: PendingMemory) -> None:
        self.data, self._memory = data, memory

    def __del__(self) -> None:
        self._memory.release(len(self.data))


class ResponseStore(Protocol):
    """Where responses are kept."""

    keeps: bool  # False: nothing is ever stored

    def hold(self, data: bytes) -> PendingInput | None:
        """Keep the input of a request until its response is stored; None: there is no room for it."""

    async def put(self, tenant: str, one: StoredResponse) -> bool:
        """Store a response; False: it is too large. Raises StoreFailed."""

    async def get(self, tenant: str, id: str) -> StoredResponse | None: ...

    async def finish(self, tenant: str, id: str, answered: bytes) -> bool:
        """A response that was made in the background has ended. False: it has ended before, or was removed."""

    async def beat(self, ids: Sequence[str]) -> list[str]:
        """These are still being made; returns those that are to be cancelled."""

    async def ask_to_cancel(self, tenant: str, id: str) -> None:
        """Have the front that makes a response cancel it."""

    async def add_events(self, tenant: str, id: str, first: int, count: int, part: bytes) -> None:
        """So many events of a response that is being made, from number `first` on, as one part."""

    async def events(self, tenant: str, id: str, after: int) -> list[tuple[int, bytes]]:
        """(number of its first event, part), for the parts with events above number `after`, in order."""

    async def conversation(self, tenant: str, id: str, most_bytes: int) -> "Conversation":
        """A response and all those it follows, the first one first."""

    async def delete(self, tenant: str, id: str) -> bool:
        """False: there is none."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """Responses that follow each other. `missing`: the id of one that is not stored; `cut`: earlier ones are left out,
    since all together have too many bytes."""

    turns: Sequence[StoredResponse]
    missing: str | None = None
    cut: bool = False


class NoStore:
    """Keeps nothing."""

    keeps = False

    def hold(self, data: bytes) -> PendingInput | None:
        return None

    async def put(self, tenant: str, one: StoredResponse) -> bool:
        return False

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        return None

    async def finish(self, tenant: str, id: str, answered: bytes) -> bool:
        return False

    async def beat(self, ids: Sequence[str]) -> list[str]:
        return []

    async def ask_to_cancel(self, tenant: str, id: str) -> None:
        """There is nothing to cancel."""

    async def add_events(self, tenant: str, id: str, first: int, count: int, part: bytes) -> None:
        """There is no response that they belong to."""

    async def events(self, tenant: str, id: str, after: int) -> list[tuple[int, bytes]]:
        return []

    async def conversation(self, tenant: str, id: str, most_bytes: int) -> Conversation:
        return Conversation((), missing=id)

    async def delete(self, tenant: str, id: str) -> bool:
        return False

    async def close(self) -> None:
        """There is nothing to close."""


class SqliteStore:
    """The store in a file. Used on one event loop; several processes may use the same file."""

    keeps = True

    def __init__(self, path: Path, most_bytes: int, most_age_s: float, clock: Callable[[], float] = time.time) -> None:
        """Raises BadConfig for a file that cannot be used. `clock`: seconds since 1970, for what outlives a process."""
        self.path, self.most_bytes, self.most_age_s = path, most_bytes, most_age_s
        self._clock = clock
        self._memory = PendingMemory(PENDING_BYTES)
        self._thread = ThreadPoolExecutor(1, "front-store")
        self._file: sqlite3.Connection | None = None
        self._inode = 0
        self._swept_s = 0.0
        try:
            self._thread.submit(self._open).result()
        except (sqlite3.Error, OSError) as error:
            raise BadConfig(
                f"the store of responses {path} cannot be used: {error}; name another file with --response-store, or "
                "store none with --response-store-size 0"
            ) from error

    def hold(self, data: bytes) -> PendingInput | None:
        return PendingInput(data, self._memory) if self._memory.take(len(data)) else None

    async def put(self, tenant: str, one: StoredResponse) -> bool:
        size = len(one.asked) + len(one.answered) + ROW_BYTES
        if size > self.most_bytes // SHARE:
            return False
        await self._do(lambda file: self._put(file, tenant, one, size))
        return True

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        return await self._do(lambda file: self._get(file, tenant, id))

    async def finish(self, tenant: str, id: str, answered: bytes) -> bool:
        return await self._do(lambda file: self._finish(file, tenant, id, answered))

    async def beat(self, ids: Sequence[str]) -> list[str]:
        return await self._do(lambda file: self._beat(file, ids))

    async def ask_to_cancel(self, tenant: str, id: str) -> None:
        await self._do(lambda file: self._ask_to_cancel(file, tenant, id))

    async def add_events(self, tenant: str, id: str, first: int, count: int, part: bytes) -> None:
        await self._do(lambda file: self._add_events(file, tenant, id, first, count, part))

    async def events(self, tenant: str, id: str, after: int) -> list[tuple[int, bytes]]:
        return await self._do(lambda file: self._events(file, tenant, id, after))

    async def conversation(self, tenant: str, id: str, most_bytes: int) -> Conversation:
        return await self._do(lambda file: self._conversation(file, tenant, id, most_bytes))

    async def delete(self, tenant: str, id: str) -> bool:
        return await self._do(lambda file: self._delete(file, tenant, id))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # ---- in the thread ----------------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._try, work)

    def _try(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._current())
        except (sqlite3.Error, OSError) as error:
            self._close()
            log.warning("the store of responses %s cannot be used: %s", self.path, error)
            raise StoreFailed from error

    def _current(self) -> sqlite3.Connection:
        """The open file; opened again where it was replaced, for instance by a cleaner of temporary files."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                if self.path.stat().st_ino == self._inode:
                    return self._file
            self._close()
        return self._open()

    def _open(self) -> sqlite3.Connection:
        make_private(self.path)
        file = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            file.execute("PRAGMA secure_delete = ON")  # what was deleted is overwritten
            file.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            file.executescript(SCHEMA)
        except sqlite3.Error:
            file.close()
            raise
        self._file, self._inode = file, self.path.stat().st_ino
        return file

    def _close(self) -> None:
        if self._file is not None:
            with suppress(sqlite3.Error):
                self._file.close()
            self._file = None

    def _put(self, file: sqlite3.Connection, tenant: str, one: StoredResponse, size: int) -> None:
        now_s = self._clock()
        with Transaction(file):
            file.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (one.id, tenant, one.previous, now_s, now_s, size, one.asked, one.answered, one.ended, now_s),
            )
            self._sweep(file, now_s)
            self._make_room(file)

    def _sweep(self, file: sqlite3.Connection, now_s: float) -> None:
        """Remove what is too old. A response is not shown after its time, whether it was removed or not."""
        if not 0 <= now_s - self._swept_s < SWEEP_S:
            self._swept_s = now_s
            file.execute("DELETE FROM responses WHERE created_s < ?", (now_s - self.most_age_s,))

    def _make_room(self, file: sqlite3.Connection) -> None:
        """Remove the responses that were used least recently, of the tenant that holds most."""
        while (file.execute("SELECT sum(bytes) FROM tenants").fetchone()[0] or 0) > self.most_bytes:
            (tenant,) = file.execute("SELECT tenant FROM tenants ORDER BY bytes DESC LIMIT 1").fetchone()
            file.execute(
                "DELETE FROM responses WHERE id IN "
                "(SELECT id FROM responses WHERE tenant = ? ORDER BY used_s, created_s LIMIT 1)",
                (tenant,),
            )

    def _get(self, file: sqlite3.Connection, tenant: str, id: str) -> StoredResponse | None:
        row = file.execute(
            "SELECT id, previous, asked, answered, ended, beat_s FROM responses "
            "WHERE id = ? AND tenant = ? AND created_s >= ?",
            (id, tenant, self._clock() - self.most_age_s),
        ).fetchone()
        if row is None:
            return None
        id, previous, asked, answered, ended, beat_s = row
        return StoredResponse(id, previous, asked, answered, bool(ended), 0.0 if ended else self._clock() - beat_s)

    def _finish(self, file: sqlite3.Connection, tenant: str, id: str, answered: bytes) -> bool:
        with Transaction(file):
            done = file.execute(
                "UPDATE responses SET bytes = bytes - length(answered) + ?, answered = ?, ended = 1 "
                "WHERE id = ? AND tenant = ? AND ended = 0",
                (len(answered), answered, id, tenant),
            )
            self._make_room(file)
            return done.rowcount > 0

    def _beat(self, file: sqlite3.Connection, ids: Sequence[str]) -> list[str]:
        now_s, wanted = self._clock(), list[str]()
        with Transaction(file):
            for id in ids:
                file.execute("UPDATE responses SET beat_s = ? WHERE id = ?", (now_s, id))
                wanted += [row[0] for row in file.execute("SELECT id FROM responses WHERE id = ? AND cancel", (id,))]
        return wanted

    @staticmethod
    def _ask_to_cancel(file: sqlite3.Connection, tenant: str, id: str) -> None:
        with Transaction(file):
            file.execute("UPDATE responses SET cancel = 1 WHERE id = ? AND tenant = ? AND ended = 0", (id, tenant))

    def _add_events(self, file: sqlite3.Connection, tenant: str, id: str, first: int, count: int, part: bytes) -> None:
        with Transaction(file):
            found = file.execute(
                "UPDATE responses SET bytes = bytes + ? WHERE id = ? AND tenant = ?", (len(part), id, tenant)
            )
            if found.rowcount:
                file.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (id, first, count, part))
                self._make_room(file)

    @staticmethod
    def _events(file: sqlite3.Connection, tenant: str, id: str, after: int) -> list[tuple[int, bytes]]:
        return file.execute(
            "SELECT first, part FROM events JOIN responses USING (id) "
            "WHERE id = ? AND tenant = ? AND first + count > ? + 1 ORDER BY first LIMIT ?",
            (id, tenant, after, MOST_PARTS),
        ).fetchall()

    def _conversation(self, file: sqlite3.Connection, tenant: str, id: str, most_bytes: int) -> Conversation:
        turns: list[StoredResponse] = []
        size, wanted = 0, str(id)
        while True:
            one = self._get(file, tenant, wanted)
            if one is None:
                return Conversation((), missing=wanted)
            size += len(one.asked) + len(one.answered)
            if size > most_bytes or len(turns) >= MOST_TURNS:
                return Conversation(turns[::-1], cut=True)
            turns.append(one)
            if one.previous is None:
                break
            wanted = one.previous
        with Transaction(file):  # a conversation that goes on is not the first to be removed
            now_s = self._clock()
            file.executemany("UPDATE responses SET used_s = ? WHERE id = ?", [(now_s, turn.id) for turn in turns])
        return Conversation(turns[::-1])

    def _delete(self, file: sqlite3.Connection, tenant: str, id: str) -> bool:
        found = self._get(file, tenant, id) is not None
        with Transaction(file):
            file.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (id, tenant))
        return found


class Transaction:
    """All or nothing, with the write lock from the beginning: a lock taken later could fail at once."""

    def __init__(self, file: sqlite3.Connection) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.execute("COMMIT" if kind is None else "ROLLBACK")


def make_private(path: Path) -> None:
    """Create the file, or take one that exists, so that only this user can read it. SQLite gives its own files beside
    it the same rights. One that exists is not opened here: closing it would release SQLite's locks on it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a file") from None
        if found.st_mode & 0o077:
            path.chmod(0o600)
