"""Starts that fail: one line with what to change, code 2, at once; and starts where some folder cannot be written."""

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.file import line_of
from tests.files.hostile import edit
from tests.story.hostile_models import HOSTILE
from tests.story.models import copy
from tests.story_server.servers import RESTARTS, SMALL, assert_error_shape, running


def refused(tmp_path: Path, model: Path, *flags: str) -> tuple[int, str]:
    """The exit code and what was said on standard error; nothing may be left behind."""
    command = [sys.executable, "-m", "shoal", "serve", str(model), "--port", "0", *SMALL, *flags]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert not list(tmp_path.glob("shoal-*")), "its private folder stayed behind"
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("flag", ["--kv-memory", pytest.param("--host-kv-memory", marks=pytest.mark.slow)])
def test_more_memory_than_there_is(tmp_path: Path, tiny_model: Path, flag: str) -> None:
    code, said = refused(tmp_path, tiny_model, flag, "900TiB")
    assert code == 2
    (told,) = [line for line in said.splitlines() if line.startswith("shoal: ")]
    assert told.endswith(f"lower {flag}")


def test_a_folder_for_temporary_files_that_is_too_long_for_sockets(tmp_path: Path, tiny_model: Path) -> None:
    deep = tmp_path / ("x" * 113)
    deep.mkdir()
    code, said = refused(deep, tiny_model)
    assert code == 2
    (told,) = said.splitlines()
    assert told.startswith("shoal: ")
    assert "set TMPDIR to a shorter path" in told


def test_a_hang_timeout_that_would_kill_healthy_processes(tmp_path: Path, tiny_model: Path) -> None:
    code, said = refused(tmp_path, tiny_model, "--hang-timeout", "1")
    assert code == 2
    assert "--hang-timeout must be 0 (never) or at least 5 seconds, not 1" in said


def test_a_key_of_a_tier_that_there_is_not(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(line_of(ApiKey(name="alice", digest=digest_of("sk-alice-0123"), tier="premum")))
    code, said = refused(tmp_path, tiny_model, "--api-keys-file", str(file), "--order", "slo")
    assert code == 2
    assert "'alice': tier 'premum' is not known; known tiers: premium, standard, batch; change the key's tier" in said
    assert "sk-" not in said


@pytest.mark.parametrize(
    "name",
    [
        "panic of a regex",  # the fronts fail
        "fifo as weights",  # the engine fails
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("layers 1e9", "eos as text", "vocabulary as text")),
    ],
)
def test_hostile_model_files(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """The engine and the fronts read the same files: the first that fails speaks for all."""
    path = HOSTILE[name](copy(tiny_model, tmp_path / "m"))
    code, said = refused(tmp_path, path, "--api-workers", "2", "--log-level", "warning")
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith("shoal: ")


def test_a_tokenizer_that_panics_at_some_texts_fails_their_requests_only(tmp_path: Path, tiny_model: Path) -> None:
    path = copy(tiny_model, tmp_path / "m")
    split = {"type": "Split", "pattern": {"Regex": "(q+)+$"}, "behavior": "Isolated", "invert": False}
    edit(path / "tokenizer.json", {"pre_tokenizer": split})
    with running(tmp_path / "logs", path, *SMALL) as server:
        (pid,) = server.front_pids()
        for text in ("q" * 40 + "!", "q" * 40 + "!" * 5000):
            answer = server.complete(prompt=text, max_tokens=2)
            assert answer.status_code == 400
            assert "tokenizer failed on this text" in assert_error_shape(answer)["message"]
        assert server.complete(prompt="a", max_tokens=2).status_code == 200
        assert server.front_pids() == [pid]


def test_without_a_home_kernels_are_compiled_once_and_go_with_the_server(tmp_path: Path, tiny_model: Path) -> None:
    """A user of its own often has none."""
    real = shutil.which("cc")
    if real is None:
        pytest.skip("no compiler here")
    temporary, compiler, calls = tmp_path / "t", tmp_path / "cc", tmp_path / "calls"
    temporary.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$1" >> {calls}\nexec {real} "$@" -O0\n')
    compiler.chmod(0o755)
    env = {"HOME": "/dev/null", "XDG_CACHE_HOME": "", "TMPDIR": str(temporary), "CC": str(compiler)}
    with running(tmp_path / "logs", tiny_model, *SMALL, "--cpu-kernels", "portable", env=env) as server:
        (library,) = temporary.glob("shoal-*/kernels/*.so")
        assert library.parent.stat().st_mode & 0o077 == 0
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGKILL)
        server.wait_for("another engine", lambda: server.health() == 200 and server.metrics().get(RESTARTS, 0) > 0)
        assert server.complete(max_tokens=2).status_code == 200
        assert calls.read_text().splitlines().count("-O3") == 1
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_request_that_comes_before_the_first_engine_waits(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[httpx.Response] = []

    def ask() -> None:
        """As soon as the port is open, which is long before a model is loaded."""
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        while not answers:
            with contextlib.suppress(httpx.ConnectError):
                answers.append(httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    with running(tmp_path, tiny_model, *SMALL, "--port", str(port)):
        asking.join(120)
        assert [answer.status_code for answer in answers] == [200], answers[0].text


def test_a_server_without_a_key_file_ends_with_its_terminal(tmp_path: Path, tiny_model: Path) -> None:
    """As SIGTERM ends it: nothing is left behind."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shoal", "serve", str(tiny_model), "--port", "0", "--json", *SMALL]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    errors = tmp_path / "errors.txt"
    with errors.open("w") as log:
        server = subprocess.Popen(
            command, env=env, stdin=theirs, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    os.close(theirs)
    try:
        assert server.stdout is not None
        assert server.stdout.readline(), "it did not get ready"
        server.send_signal(signal.SIGHUP)
        assert server.wait(timeout=60) == 0, errors.read_text()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        os.close(ours)
    assert not list(tmp_path.glob("shoal-*"))
