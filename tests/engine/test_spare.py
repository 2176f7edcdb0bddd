"""The spare process: when it is started, taken and given up. Real processes of a small program."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engine.spare import CALM_S, RETRY_S, NoSpare, Spare

PROGRAM = """
import os, sys
said = sys.stdin.read()
os.write(int(said.split()[0]), f"{sys.argv[1:]} {said}".encode())
"""


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    (tmp_path / "patient.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = Spare("patient")
    yield one
    one.end()


def test_it_is_started_when_all_engines_have_been_ready_for_a_while(spare: Spare) -> None:
    spare.tend(False, 10.0)
    assert spare.due_s == 10.0 + CALM_S
    spare.tend(True, 10.0 + CALM_S / 2)
    assert spare.launched is None
    spare.tend(True, 10.0 + CALM_S)
    assert spare.launched is not None
    assert spare.due_s == float("inf")
    first = spare.launched
    spare.tend(True, 100.0)
    assert spare.launched is first, "one is enough"
    spare.tend(False, 101.0)
    assert spare.launched is first, "it is kept while engines are started"


def test_it_is_taken_once_and_reads_its_config_then(spare: Spare) -> None:
    assert spare.take("patient") is None
    spare.tend(True, 0.0)
    assert spare.take("another") is None
    taken = spare.take("patient")
    assert taken is not None
    assert spare.take("patient") is None
    assert taken.process.stdin is not None
    with taken.process.stdin as pipe:
        pipe.write(f"{taken.its_pipe} hello".encode())
    assert os.read(taken.pipe, 100) == f"['spare'] {taken.its_pipe} hello".encode()
    assert taken.process.wait() == 0
    os.close(taken.pipe)


def test_one_that_ended_is_not_taken_and_replaced_after_a_while(spare: Spare) -> None:
    spare.tend(True, 0.0)
    assert spare.launched is not None
    spare.launched.process.kill()
    spare.launched.process.wait()
    assert spare.take("patient") is None
    spare.tend(True, 5.0)
    assert spare.launched is None
    assert spare.due_s == 5.0 + RETRY_S
    spare.tend(True, 5.0 + RETRY_S)
    assert spare.launched is not None


def test_a_machine_that_cannot_start_it_is_asked_again_later(spare: Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    open_before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    spare.tend(True, 0.0)
    assert spare.launched is None
    assert spare.due_s == RETRY_S
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == open_before


def test_its_end_leaves_no_process_and_no_pipe(spare: Spare) -> None:
    open_before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    spare.tend(True, 0.0)
    assert spare.launched is not None
    process = spare.launched.process
    spare.end()
    assert process.returncode is not None
    assert spare.launched is None
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == open_before
    spare.end()


def test_without_one_nothing_is_ever_due() -> None:
    none = NoSpare()
    none.tend(True, 0.0)
    assert none.take("patient") is None
    assert none.due_s == float("inf")
    none.end()
