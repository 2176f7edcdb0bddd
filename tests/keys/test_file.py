"""The key file: what it may hold, what is refused and with which words, and how keys reach the other processes."""

import hashlib
import io
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.serve import PrivateFolder, load_keys, reload_keys
from shoal.config.engine import EngineConfig
from shoal.config.serve import ServeConfig
from shoal.core.tiers import Tiers
from shoal.errors import BadConfig, EngineError
from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.file import MOST_KEYS, PUBLISHED, KeyBook, hashed, joined, line_of, new_key, publish, read_key_file
from shoal.keys.limits import KeyLimits, TenantLimits

HASH = hashlib.sha256(b"sk-alice-key").hexdigest()
Capture = pytest.CaptureFixture[str]


def read(folder: Path, text: str) -> list[ApiKey]:
    (folder / "keys.yaml").write_text(text)
    return read_key_file(folder / "keys.yaml")


def test_a_key_has_a_name_a_hash_and_what_it_may_do(tmp_path: Path) -> None:
    text = f"""
- name: alice
  sha256: {HASH}
  tier: gold
  max_concurrent: 8
  tokens_per_minute: 100000
  may_set_priority: true
- {{name: ops, sha256: {"ab" * 32}, admin: true, max_concurrent: 0}}
"""
    assert read(tmp_path, text) == [
        ApiKey(
            name="alice",
            digest=digest_of("sk-alice-key"),
            tier="gold",
            max_concurrent=8,
            tokens_per_minute=100_000,
            may_set_priority=True,
        ),
        ApiKey(name="ops", digest=bytes.fromhex("ab" * 32), admin=True, max_concurrent=0),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a list of keys"),
        ("[]", "at least one;"),
        ("alice: sk-secret-key", "must be a list of keys"),
        ("- [sk-secret-key", r"is not YAML \(line"),
        ("- sk-secret-key", "key 1 must be an entry with a name and a sha256"),
        ("- {name: a, key: sk-secret-key}", "shoal key NAME --stdin"),
        ("- {name: a, sha256: sk-secret-key}", "64 hexadecimal digits.*shoal key NAME --stdin"),
        (f"- {{name: a, sha256: {'zz' * 32}}}", "64 hexadecimal digits"),
        (f"- {{name: a, sha256: {hashlib.sha256().hexdigest()}}}", "empty string"),
        ("- {name: a}", "sha256 must be"),
        (f"- {{sha256: {HASH}}}", "needs a name"),
        (f"- {{name: a b, sha256: {HASH}}}", "needs a name"),
        (f"- {{name: 5, sha256: {HASH}}}", "needs a name"),
        (f"- {{name: a, sha256: {HASH}, teir: x}}", "did you mean 'tier'"),
        (f"- {{name: a, sha256: {HASH}, tier: [x]}}", "tier must be a name"),
        (f"- {{name: a, sha256: {HASH}, admin: 1}}", "admin must be true or false"),
        (f"- {{name: a, sha256: {HASH}, may_set_priority: 5}}", "may_set_priority must be true or false"),
        (f"- {{name: a, sha256: {HASH}, max_concurrent: -1}}", "max_concurrent must be a whole number"),
        (f"- {{name: a, sha256: {HASH}, tokens_per_minute: true}}", "tokens_per_minute must be a whole number"),
        (f"- {{name: a, sha256: {HASH}, tokens_per_minute: lots}}", "tokens_per_minute must be a whole number"),
        ("- !!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason_and_without_the_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadConfig, match=says) as caught:
        read(tmp_path, text)
    assert "keys.yaml" in str(caught.value)
    assert "sk-secret-key" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot read the key file"):
        read_key_file(tmp_path / "nowhere.yaml")


def test_two_keys_that_are_the_same_are_refused() -> None:
    with pytest.raises(BadConfig, match="named 'a'"):
        joined(hashed([("a", "sk-12345678")]), hashed([("a", "sk-87654321")]))
    with pytest.raises(BadConfig, match="'b' and 'a' are the same"):
        joined(hashed([("a", "sk-12345678")]), hashed([("b", "sk-12345678")]))
    with pytest.raises(BadConfig, match="the limit is"):
        joined([ApiKey(name=str(n), digest=n.to_bytes(32)) for n in range(MOST_KEYS + 1)])


# ---- shoal key ------------------------------------------------------------------------------------------------------


def test_the_printed_line_and_key_belong_together(tmp_path: Path, capsys: Capture) -> None:
    flags = ["--tier", "gold", "--max-concurrent", "3", "--tokens-per-minute", "500", "--admin", "--may-set-priority"]
    assert main(["key", "alice", *flags]) == 0
    printed = capsys.readouterr()
    key = printed.err.split()[-1]
    assert len(key) > 40
    assert key not in printed.out
    limits = {"max_concurrent": 3, "tokens_per_minute": 500}
    want = ApiKey(name="alice", digest=digest_of(key), tier="gold", **limits, admin=True, may_set_priority=True)
    assert read(tmp_path, printed.out) == [want]


def test_an_existing_key_is_hashed_and_not_shown(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-alice-key\n"))
    assert main(["key", "alice", "--stdin"]) == 0
    printed = capsys.readouterr()
    assert "sk-alice-key" not in printed.out + printed.err
    assert read(tmp_path, printed.out) == hashed([("alice", "sk-alice-key")])


def test_a_machine_gets_both_at_once(capsys: Capture) -> None:
    assert main(["key", "alice", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["line"] == line_of(hashed([("alice", printed["key"])])[0])


@pytest.mark.parametrize(
    "flags",
    [["a b"], [""], ["a", "--tier", "a b"], ["a", "--max-concurrent", "-1"], ["a", "--tokens-per-minute", "-1"]],
)
def test_a_bad_key_command_is_refused(flags: list[str], capsys: Capture) -> None:
    assert main(["key", *flags]) == 2
    assert "must" in capsys.readouterr().err


def test_a_short_key_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["key", "alice", "--stdin"]) == 2
    assert "at least 8" in capsys.readouterr().err


def test_keys_are_never_the_same() -> None:
    assert len({new_key() for _ in range(100)}) == 100


# ---- from process to process ----------------------------------------------------------------------------------------


def test_what_is_published_is_read_and_read_again(tmp_path: Path) -> None:
    keys = [*hashed([("a", "sk-12345678")]), ApiKey(name="b", digest=bytes(32), tier="t", max_concurrent=0, admin=True)]
    publish(keys, tmp_path)
    book = KeyBook(tmp_path)
    assert list(book()) == keys
    assert book() is book(), "read once"
    publish(keys[1:], tmp_path)
    assert list(book()) == keys[1:]
    (tmp_path / PUBLISHED).unlink()
    assert list(book()) == keys[1:], "the folder of a server that ends"


def test_lost_keys_are_never_taken_for_no_keys(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="has no keys"):
        KeyBook(tmp_path)


def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivateFolder:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    return PrivateFolder()


def test_a_good_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.yaml"
    serve = ServeConfig(api_key=("flag=sk-of-a-flag",), api_keys_file=str(file))
    file.write_text(line_of(hashed([("a", "sk-12345678")])[0]))
    folder = private_folder(tmp_path, monkeypatch)
    folder.publish(load_keys(serve, Tiers()))
    book = KeyBook(folder.path)
    assert [key.name for key in book()] == ["flag", "a"]
    file.write_text("- {name: b}")
    reload_keys(serve, Tiers(), folder)
    assert "keys are unchanged" in caplog.text
    assert "sha256 must be" in caplog.text
    assert [key.name for key in book()] == ["flag", "a"]
    file.write_text(line_of(hashed([("b", "sk-12345678")])[0]))
    reload_keys(serve, Tiers(), folder)
    assert [key.name for key in book()] == ["flag", "b"]
    assert "sk-" not in (folder.path / PUBLISHED).read_text()
    shutil.rmtree(folder.path)
    reload_keys(serve, Tiers(), folder)
    assert caplog.text.count("keys are unchanged") == 2
    folder.mend()
    assert [key.name for key in book()] == ["flag", "b"]


def test_a_tier_that_the_server_does_not_have_is_refused_at_the_start_and_on_hangup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.yaml"
    serve = ServeConfig(api_keys_file=str(file))
    alice = ApiKey(name="alice", digest=digest_of("sk-alice-key"), tier="premium")
    file.write_text(line_of(alice))
    with pytest.raises(BadConfig, match=r"'alice': tier 'premium' is not known; known tiers: none: start .* --tiers"):
        load_keys(serve, EngineConfig().read_tiers())
    with pytest.raises(BadConfig, match="known tiers: gold; change the key's tier"):
        load_keys(serve, EngineConfig(tiers="gold: {}").read_tiers())
    folder = private_folder(tmp_path, monkeypatch)
    tiers = EngineConfig(order="slo").read_tiers()  # has the default ones
    folder.publish(load_keys(serve, tiers))
    book = KeyBook(folder.path)
    assert book() == (alice,)
    file.write_text(line_of(replace(alice, tier="gold")))
    reload_keys(serve, tiers, folder)
    assert "the API keys are unchanged: API key 'alice': tier 'gold' is not known" in caplog.text
    assert book() == (alice,)


def test_a_private_folder_that_was_removed_is_made_again_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = private_folder(tmp_path, monkeypatch)
    folder.publish(hashed([("a", "sk-12345678")]))
    folder.mend()
    assert not caplog.text
    shutil.rmtree(folder.path)
    folder.mend()
    assert "was removed and is recreated" in caplog.text
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [key.name for key in KeyBook(folder.path)()] == ["a"]
    folder.path.chmod(0o755)
    with pytest.raises(EngineError, match="only this user can enter"):
        folder.mend()
    shutil.rmtree(folder.path)
    folder.path.symlink_to(tmp_path)
    with pytest.raises(EngineError, match="only this user can enter"):
        folder.mend()
    folder.path.unlink()
    shutil.rmtree(folder.path.parent)
    with pytest.raises(EngineError, match="cannot be recreated: No such file"):
        folder.mend()


def test_a_key_has_its_own_limits_or_the_servers() -> None:
    keys: list[Any] = [
        (
            ApiKey(name="own", digest=b"", max_concurrent=2, tokens_per_minute=0),
            ApiKey(name="plain", digest=b""),
        )
    ]
    limits = KeyLimits(lambda: keys[-1], TenantLimits(5, 600))
    assert limits("own") == TenantLimits(2, None)
    assert limits("plain") == limits("gone") == TenantLimits(5, 600)
    keys.append((ApiKey(name="own", digest=b"", max_concurrent=7),))
    assert limits("own") == TenantLimits(7, 600)
