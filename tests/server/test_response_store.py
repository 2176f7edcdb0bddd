"""The store of responses: bounded, private, each tenant apart, shared by processes, and never in the way."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shoal.errors import BadConfig
from shoal.server.response_store import Conversation, SqliteStore, StoredResponse, StoreFailed

MEGA = 2**20
T = TypeVar("T")


class Time:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store(tmp_path: Path, time: Time) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "r.sqlite", MEGA, 100.0, time)
    yield made
    do(made.close())


def do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def one(id: str, size: int = 10, previous: str | None = None) -> StoredResponse:
    return StoredResponse(id, previous, b"a" * size, b"b" * size)


def ids(found: Conversation) -> list[str]:
    return [turn.id for turn in found.turns]


def content_bytes(path: Path) -> int:
    with sqlite3.connect(path) as file:
        found = file.execute("SELECT sum(length(asked) + length(answered)) FROM responses").fetchone()[0] or 0
        counted = file.execute("SELECT sum(bytes) FROM tenants").fetchone()[0] or 0
        rows = file.execute("SELECT count(*) FROM responses").fetchone()[0]
    file.close()
    assert counted == found + 200 * rows, "the count has drifted"
    return int(counted)


def test_what_is_stored_is_found_by_its_tenant_alone(store: SqliteStore) -> None:
    assert do(store.put("alice", one("r1"))) is True
    assert do(store.get("alice", "r1")) == one("r1")
    assert do(store.get("bob", "r1")) is None
    assert do(store.conversation("bob", "r1", MEGA)).missing == "r1"
    assert do(store.delete("bob", "r1")) is False
    assert do(store.delete("alice", "r1")) is True
    assert do(store.get("alice", "r1")) is None


def test_a_conversation_is_followed_to_its_beginning(store: SqliteStore) -> None:
    for number in range(3):
        do(store.put("a", one(f"r{number}", 100, f"r{number - 1}" if number else None)))
    assert ids(do(store.conversation("a", "r2", MEGA))) == ["r0", "r1", "r2"]
    cut = do(store.conversation("a", "r2", 450))
    assert (ids(cut), cut.cut) == (["r1", "r2"], True)
    do(store.delete("a", "r1"))
    assert do(store.conversation("a", "r2", MEGA)).missing == "r1"


def test_what_is_too_old_is_gone(store: SqliteStore, time: Time, tmp_path: Path) -> None:
    do(store.put("a", one("r1")))
    time.now_s += 99
    assert do(store.get("a", "r1")) is not None
    time.now_s += 2
    assert do(store.get("a", "r1")) is None
    assert do(store.delete("a", "r1")) is False
    time.now_s += 100
    do(store.put("a", one("r2")))
    assert content_bytes(store.path) == 220, "it was removed from the file, too"


def test_the_store_never_holds_more_than_its_limit(store: SqliteStore, time: Time) -> None:
    for number in range(100):
        time.now_s += 0.01
        assert do(store.put("a", one(f"r{number}", 50_000)))
        assert content_bytes(store.path) <= MEGA
    assert do(store.get("a", "r99")) is not None
    assert do(store.get("a", "r0")) is None
    assert store.path.stat().st_size < 2 * MEGA, "what was deleted makes room"
    assert do(store.put("a", one("huge", MEGA))) is False


def test_the_tenant_that_holds_most_makes_room(store: SqliteStore, time: Time) -> None:
    do(store.put("small", one("mine", 1000)))
    for number in range(50):
        time.now_s += 0.01
        do(store.put("large", one(f"r{number}", 50_000)))
    assert do(store.get("small", "mine")) is not None


def test_a_conversation_that_goes_on_is_kept_longer(store: SqliteStore, time: Time) -> None:
    do(store.put("a", one("first", 1000)))
    for number in range(30):
        time.now_s += 0.01
        do(store.put("a", one(f"r{number}", 50_000)))
        do(store.conversation("a", "first", MEGA))
    assert do(store.get("a", "first")) is not None


def test_what_is_made_in_the_background_ends_once(store: SqliteStore, time: Time) -> None:
    do(store.put("a", StoredResponse("r1", None, b"asked", b"begun", ended=False)))
    time.now_s += 5
    found = do(store.get("a", "r1"))
    assert found is not None
    assert (found.ended, found.silent_s) == (False, 5.0)
    assert do(store.beat(["r1", "none"])) == []
    do(store.ask_to_cancel("b", "r1"))
    assert do(store.beat(["r1"])) == [], "by its own tenant alone"
    do(store.ask_to_cancel("a", "r1"))
    assert do(store.beat(["r1"])) == ["r1"]
    assert do(store.finish("b", "r1", b"no")) is False
    assert do(store.finish("a", "r1", b"a long answer")) is True
    assert do(store.finish("a", "r1", b"another")) is False
    assert do(store.get("a", "r1")) == StoredResponse("r1", None, b"asked", b"a long answer")
    content_bytes(store.path)


def test_only_this_user_can_read_it(store: SqliteStore, tmp_path: Path) -> None:
    do(store.put("a", one("r1")))
    files = list(tmp_path.glob("r.sqlite*"))
    assert len(files) > 1, "the log beside it, too"
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    open_file = tmp_path / "open.sqlite"
    open_file.touch(mode=0o644)
    do(SqliteStore(open_file, MEGA, 1.0).close())
    assert open_file.stat().st_mode & 0o777 == 0o600


def test_what_was_deleted_is_overwritten(store: SqliteStore) -> None:
    do(store.put("a", StoredResponse("r1", None, b"the secret question", b"the secret answer")))
    do(store.delete("a", "r1"))
    do(store.put("a", one("r2")))
    with sqlite3.connect(store.path) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.close()
    assert b"secret" not in store.path.read_bytes()


def test_it_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    code = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from shoal.server.response_store import SqliteStore, StoredResponse\n"
        "store = SqliteStore(Path(sys.argv[1]), 2**20, 1000.0)\n"
        "asyncio.run(store.put('a', StoredResponse('r1', None, b'x', b'y'))); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    store = SqliteStore(path, MEGA, 1000.0)
    assert do(store.get("a", "r1")) == StoredResponse("r1", None, b"x", b"y")
    do(store.close())


def test_two_fronts_share_it(store: SqliteStore, time: Time) -> None:
    other = SqliteStore(store.path, MEGA, 100.0, time)

    async def work() -> None:
        both = (store, other)
        await asyncio.gather(*(both[n % 2].put("a", one(f"r{n}")) for n in range(40)))
        found = await asyncio.gather(*(both[(n + 1) % 2].get("a", f"r{n}") for n in range(40)))
        assert all(found)

    do(work())
    do(other.close())


def test_a_lock_of_another_process_does_not_stop_the_event_loop(store: SqliteStore) -> None:
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")

    async def work() -> None:
        writing = asyncio.create_task(store.put("a", one("r1")))
        for _ in range(20):
            await asyncio.sleep(0.005)  # the loop goes on
        assert not writing.done()
        other.execute("COMMIT")
        assert await writing

    do(work())
    other.close()


def test_its_thread_is_the_only_one_that_opens_it(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = SqliteStore._current

    def noted(self: SqliteStore) -> sqlite3.Connection:
        seen.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(SqliteStore, "_current", noted)
    do(store.put("a", one("r1")))
    do(store.conversation("a", "r1", MEGA))
    assert {name.rsplit("_", 1)[0] for name in seen} == {"front-store"}


def test_a_file_that_is_removed_is_made_again(store: SqliteStore, tmp_path: Path) -> None:
    do(store.put("a", one("r1")))
    for file in tmp_path.glob("r.sqlite*"):
        file.unlink()
    assert do(store.put("a", one("r2"))) is True
    assert store.path.exists()
    assert do(store.get("a", "r1")) is None


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("this is not a database, but a text that is longer than a header " * 20)
    for path in (text, tmp_path, tmp_path / "no" / "r.sqlite"):
        with pytest.raises(BadConfig, match="--response-store"):
            SqliteStore(path, MEGA, 1.0)
    link = tmp_path / "link"
    os.symlink(text, link)
    with pytest.raises(BadConfig, match="not a file"):
        SqliteStore(link, MEGA, 1.0)


def test_a_damaged_file_is_an_error_of_the_request(store: SqliteStore) -> None:
    do(store.put("a", one("r1")))
    for file in store.path.parent.glob("r.sqlite*"):
        file.unlink()
    store.path.write_bytes(b"x" * 5000)
    with pytest.raises(StoreFailed):
        do(store.get("a", "r1"))


def test_inputs_of_running_requests_have_a_limit(store: SqliteStore) -> None:
    held = [store.hold(b"x" * 4 * MEGA) for _ in range(30)]
    assert held[0] is not None
    assert held[-1] is None
    assert 0 < store._memory.used <= 64 * MEGA
    held.clear()
    assert store._memory.used == 0
