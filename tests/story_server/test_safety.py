"""What only whole processes can show: who listens where, who may enter, and what strangers on the engine's socket get.

The rest of the advisories is tried in tests/server/test_safety.py; caches and keys in test_keys.py.
"""

import os
import pickle
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.story_server.servers import SMALL, Server, family_of, running

KEY = "sk-of-the-safety-test"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def safe(home: Path, tiny_model: Path) -> Iterator[Server]:
    """A server with two fronts whose temporary files are all below `home`."""
    flags = ("--api-key", KEY, "--api-workers", "2")
    with running(home / "logs", tiny_model, *SMALL, *flags, env={"TMPDIR": str(home)}, key=KEY) as server:
        yield server


def folder_of(home: Path) -> Path:
    (found,) = home.glob("shoal-*")
    return found


# ---- open sockets ---------------------------------------------------------------------------------------------------


def sockets_of(pids: set[int]) -> set[str]:
    """Inode numbers of all sockets that these processes hold."""
    found = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue  # closed while we looked
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def rows(table: str) -> list[list[str]]:
    path = Path("/proc/net") / table
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def test_nothing_listens_but_the_http_port(safe: Server) -> None:
    mine = sockets_of(family_of(safe.process.pid))
    ports = {
        (table, int(row[1].rpartition(":")[2], 16))
        for table in ("tcp", "tcp6")
        for row in rows(table)
        if row[3] == "0A" and row[9] in mine
    }
    assert ports == {("tcp", int(safe.url.rpartition(":")[2]))}
    assert not [row for table in ("udp", "udp6", "raw", "raw6") for row in rows(table) if row[9] in mine]


def test_the_sockets_inside_lie_in_a_folder_that_nobody_else_can_enter(safe: Server, home: Path) -> None:
    folder = folder_of(home)
    about = folder.stat()
    assert stat.S_IMODE(about.st_mode) == 0o700
    assert about.st_uid == os.getuid()
    mine = sockets_of(family_of(safe.process.pid))
    listening = {row[7] for row in rows("unix") if row[6] in mine and row[3] == "00010000" and len(row) > 7}
    expected = {str(folder / name) for name in ("engine.ipc", "ledger", "front-0.front", "front-1.front")}
    assert listening == expected, "and no other, abstract ones least of all"


def test_no_file_of_the_server_has_a_key_in_it(safe: Server, home: Path) -> None:
    for path in home.rglob("*"):
        if path.is_file():
            assert KEY not in path.read_text(errors="replace"), path


def test_the_children_have_no_key_in_their_arguments(safe: Server) -> None:
    for pid in family_of(safe.process.pid) - {safe.process.pid}:
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


# ---- unsafe deserialisation -----------------------------------------------------------------------------------------


class Trap:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "caught"))


def test_pickles_on_the_engines_socket_are_dropped(safe: Server, home: Path, tmp_path: Path) -> None:
    (engine,) = safe.engine_pids()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{folder_of(home) / 'engine.ipc'}")
    trap = tmp_path / "trap"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        stranger.send(pickle.dumps(Trap(trap), protocol))
    for noise in (b"", b"\xff" * 1000, b"\x91" * 100_000, b"\xa5\xff\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        stranger.send(noise)
    safe.wait_for("the noise to be dropped", lambda: "could not be decoded" in safe.log(10**9))
    assert safe.complete(max_tokens=2, key=KEY).status_code == 200
    assert safe.engine_pids() == [engine], "the engine did not have to be started again"
    assert not trap.exists()
    stranger.close(linger=0)
    context.term()


# ---- long texts -----------------------------------------------------------------------------------------------------


def test_health_is_answered_while_long_texts_are_tokenized(tiny: Server) -> None:
    """Many times, however slow the machine is: if the event loop tokenized, it would answer before and after it."""
    text = "Once upon a time there was a little fish. " * 10_000
    count = 0
    for _ in range(10):  # this process may have had no CPU meanwhile
        statuses: list[int] = []
        asking = [
            threading.Thread(
                target=lambda told=statuses: told.append(tiny.post("/tokenize", {"prompt": text}).status_code)
            )
            for _ in range(2)
        ]
        assert tiny.health() == 200
        for one in asking:
            one.start()
        count = 0
        while any(one.is_alive() for one in asking):
            assert tiny.health() == 200
            count += 1
        assert statuses == [200, 200]
        if count > 9:
            break
    assert count > 9


# ---- signals --------------------------------------------------------------------------------------------------------


def test_a_hangup_without_a_key_file_changes_nothing(safe: Server, home: Path) -> None:
    safe.process.send_signal(signal.SIGHUP)
    safe.wait_for("a word about it", lambda: "no key file to reload" in safe.log(10**9))
    assert safe.health() == 200
    assert folder_of(home).exists()
