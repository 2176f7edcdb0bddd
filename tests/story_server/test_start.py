"""Starts that fail: one line with what to change, code 2, at once; and starts where some folder cannot be written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.story_server.servers import SMALL


def refused(tmp_path: Path, model: Path, *flags: str) -> tuple[int, str]:
    """The exit code and what was said on standard error; nothing may be left behind."""
    command = [sys.executable, "-m", "shoal", "serve", str(model), "--port", "0", *SMALL, *flags]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert not list(tmp_path.glob("shoal-*")), "its private folder stayed behind"
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("flag", ["--kv-memory", "--host-kv-memory"])
def test_more_memory_than_there_is(tmp_path: Path, tiny_model: Path, flag: str) -> None:
    begun_s = time.monotonic()
    code, said = refused(tmp_path, tiny_model, flag, "900TiB")
    assert code == 2
    (told,) = [line for line in said.splitlines() if line.startswith("shoal: ")]
    assert told.endswith(f"lower {flag}")
    assert time.monotonic() - begun_s < 60
