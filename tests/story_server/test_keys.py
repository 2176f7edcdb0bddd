"""API keys from a file: limits of their own, read again on SIGHUP, and caches that no other key can see into."""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.file import line_of
from tests.story_server.servers import SMALL, Server, assert_error_shape, long_stream, running, tokens_in

ALICE, BOB, OPS, CAROL = "sk-alice-0123", "sk-bob-0123", "sk-ops-0123", "sk-carol-0123"
FILE = [
    ApiKey(name="alice", digest=digest_of(ALICE), max_concurrent=1, tokens_per_minute=0),
    ApiKey(name="bob", digest=digest_of(BOB), max_concurrent=3),
    ApiKey(name="ops", digest=digest_of(OPS), admin=True),
]


def write(file: Path, *keys: ApiKey) -> None:
    file.write_text("\n".join(line_of(key) for key in keys))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, *FILE)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's temporary files are."""
    return tmp_path_factory.mktemp("k")


@pytest.fixture(scope="module")
def keyed(file: Path, home: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Keys in a file, and limits for those that have none of their own."""
    flags = ("--api-keys-file", str(file), "--key-max-concurrent", "2", "--check", "--api-workers", "2")
    logs = tmp_path_factory.mktemp("keyed-by-file")
    with running(logs, tiny_model, *SMALL, *flags, env={"TMPDIR": str(home)}, key=OPS) as server:
        yield server


def get(server: Server, path: str, key: str | None = None) -> Any:
    return server.http.get(f"{server.url}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})


def test_every_key_of_the_file_is_let_in_and_no_other(keyed: Server) -> None:
    for key in (ALICE, BOB, OPS):
        assert get(keyed, "/v1/models", key).status_code == 200
    for other in (None, CAROL, digest_of(ALICE).hex()):
        answer = get(keyed, "/v1/models", other)
        assert answer.status_code == 401
        assert_error_shape(answer)


def test_everything_but_health_needs_a_key(keyed: Server) -> None:
    assert get(keyed, "/health").status_code == 200
    for path in ("/", "/docs", "/openapi.json", "/version", "/metrics", "/v1/models", "/debug/requests", "/nothing"):
        assert get(keyed, path).status_code == 401, path
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert keyed.post(path, {}).status_code == 401, path


@pytest.mark.parametrize(("key", "most"), [(ALICE, 1), (BOB, 3), (OPS, 2)])
def test_a_key_has_its_own_limit_or_the_servers(keyed: Server, key: str, most: int) -> None:
    assert keyed.complete(n=most, max_tokens=1, key=key).status_code == 200
    refused = keyed.complete(n=most + 1, max_tokens=1, key=key)
    assert refused.status_code == 400
    assert f"{most} requests at once" in assert_error_shape(refused)["message"]


# ---- caches ---------------------------------------------------------------------------------------------------------


def cached(server: Server, key: str, prompt: list[int], **more: Any) -> int:
    answer = server.complete(prompt=prompt, max_tokens=1, key=key, **more)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_foreign_prefix_gives_no_hit(keyed: Server) -> None:
    secret = [7, 11, 13, 17] * 40
    assert cached(keyed, ALICE, secret) == 0
    assert cached(keyed, ALICE, secret) >= 144, "her own prefix is found, by whichever front"
    for guess in ({}, {"cache_salt": "alice"}, {"cache_salt": "alice\n"}, {"cache_salt": "\0"}):
        assert cached(keyed, BOB, secret, **guess) == 0, guess
    assert cached(keyed, ALICE, secret) >= 144


def test_the_caches_stay_apart_and_whole_when_a_front_is_started_again(keyed: Server) -> None:
    secret = [3, 5, 9, 8] * 40
    assert cached(keyed, ALICE, secret) == 0
    for pid in keyed.front_pids():
        os.kill(pid, signal.SIGKILL)
    keyed.wait_for("/health to say 200 again", lambda: keyed.health() == 200)
    assert cached(keyed, BOB, secret) == 0
    assert cached(keyed, ALICE, secret) >= 144, "the secret outlives the fronts"
    keyed.wait_for("both fronts, as they were started again, and no other", lambda: both_again(keyed))


def both_again(server: Server) -> bool:
    told = get(server, "/debug/requests", OPS)
    names = told.json()["engine"]["fronts"] if told.status_code == 200 else []
    return len(names) == 2 and not any(name.endswith(".0") for name in names)


# ---- seeing it ------------------------------------------------------------------------------------------------------


def test_an_admin_sees_who_runs_and_who_waits(keyed: Server) -> None:
    assert get(keyed, "/debug/requests", ALICE).status_code == 403
    with long_stream(keyed, 4000, key=BOB) as events:
        told = get(keyed, "/debug/requests", OPS).json()
        (one,) = [request for request in told["requests"] if request["tenant"] == "bob"]
        assert (one["state"], one["why"], one["max_tokens"]) == ("running", "output", 4000)
        assert one["blocks"] > 0
        assert told["engine"]["running"] == 1
        assert len(told["engine"]["fronts"]) == 2
        first = next(events)
        assert one["id"].startswith(first["id"].removeprefix("cmpl-")), "the answer's id finds it here"
    keyed.wait_until_idle()
    assert get(keyed, "/debug/requests", OPS).json()["requests"] == []


# ---- the file, read again -------------------------------------------------------------------------------------------


def hang_up(server: Server, until: str) -> None:
    seen = server.log(10**9).count(until)
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(f"'{until}' in the log", lambda: server.log(10**9).count(until) > seen)


def test_the_file_is_read_again_on_sighup(keyed: Server, file: Path) -> None:
    with long_stream(keyed, 2000, key=BOB) as events:
        write(file, *FILE[:1], *FILE[2:], ApiKey(name="carol", digest=digest_of(CAROL), max_concurrent=1))
        hang_up(keyed, "was reloaded")
        assert get(keyed, "/v1/models", BOB).status_code == 401
        assert get(keyed, "/v1/models", CAROL).status_code == 200
        assert keyed.complete(n=2, max_tokens=1, key=CAROL).status_code == 400, "her limit has reached the ledger"
        for _ in range(20):
            assert next(events)["choices"], "who was let in may finish"
    file.write_text("- {name: carol, key: sk-carol-0123}")
    hang_up(keyed, "keys are unchanged")
    assert "shoal key NAME --stdin" in keyed.log(10**9)
    assert get(keyed, "/v1/models", CAROL).status_code == 200, "a bad file changes nothing"
    write(file, *FILE)
    hang_up(keyed, "was reloaded")
    assert get(keyed, "/v1/models", BOB).status_code == 200
    keyed.wait_until_idle()


def test_new_limits_count_at_once_also_for_a_key_that_has_requests_running(keyed: Server, file: Path) -> None:
    with long_stream(keyed, key=BOB):
        write(file, FILE[0], replace(FILE[1], tokens_per_minute=30), FILE[2])
        hang_up(keyed, "was reloaded")
        refused = keyed.complete(max_tokens=1, key=BOB)
        assert refused.status_code == 429
        assert "30 tokens per minute" in assert_error_shape(refused)["message"]
        write(file, FILE[0], replace(FILE[1], max_concurrent=1, tokens_per_minute=0), FILE[2])
        hang_up(keyed, "was reloaded")
        refused = keyed.complete(max_tokens=1, key=BOB)
        assert refused.status_code == 429
        assert "may have 1 at once" in assert_error_shape(refused)["message"], "no longer the rate"
        write(file, *FILE)
        hang_up(keyed, "was reloaded")
        assert keyed.complete(max_tokens=1, key=BOB).status_code == 200
    keyed.wait_until_idle()


def test_a_private_folder_that_is_removed_comes_back_with_the_next_engine(keyed: Server, home: Path) -> None:
    (folder,) = home.glob("shoal-*")
    with long_stream(keyed, 1500, key=BOB) as events:
        shutil.rmtree(folder)
        (pid,) = keyed.engine_pids()
        os.kill(pid, signal.SIGKILL)
        assert len(tokens_in(events)) == 1500, "it went on with the next engine"
    recreated = f"the folder {folder} was removed and is recreated"
    keyed.wait_for("the folder's return", lambda: recreated in keyed.log(10**9))
    keyed.wait_for("the next engine", lambda: keyed.health() == 200)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert keyed.complete(max_tokens=1, key=BOB).status_code == 200
    assert keyed.complete(max_tokens=1, key=CAROL).status_code == 401
    assert keyed.complete(n=2, max_tokens=1, key=ALICE).status_code == 400, "her limits are known again"
    keyed.wait_until_idle()


def test_no_key_stands_in_the_log(keyed: Server) -> None:
    assert not any(key in keyed.log(10**9) for key in (ALICE, BOB, OPS))
