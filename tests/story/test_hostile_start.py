"""`shoal generate` with hostile model files: one line on standard error, code 2, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from tests.story.hostile_models import HOSTILE
from tests.story.models import copy

HANG_S = 120  # what takes so long hangs


def check(code: int, said: str) -> None:
    assert code == 2, said
    (line,) = said.splitlines()
    assert line.startswith("shoal: ")
    assert len(line) < 2100
    assert line.isprintable()


@pytest.mark.timeout(HANG_S, method="thread")
@pytest.mark.parametrize("name", HOSTILE)
def test_the_command_says_one_line(model: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = HOSTILE[name](copy(model, tmp_path / "m"))
    code = main(["generate", "a", "--model", str(path), "--kv-memory", "64MiB", "--threads", "1"])
    shown = capfd.readouterr()
    check(code, shown.err)
    assert shown.out == ""


@pytest.mark.parametrize(
    "name",
    [
        "panic of a regex",
        "fifo as weights",
        pytest.param("layers 1e9", marks=pytest.mark.slow),
        pytest.param("split count as text", marks=pytest.mark.slow),
    ],
)
def test_the_process_says_one_line(model: Path, tmp_path: Path, name: str) -> None:
    path = HOSTILE[name](copy(model, tmp_path / "m"))
    command = [sys.executable, "-m", "shoal", "generate", "a", "--model", str(path), "--kv-memory", "64MiB"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S)
    check(done.returncode, done.stderr)
