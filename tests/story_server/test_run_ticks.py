"""The clock of the hostile tests counts work, in Python and in C, and nothing else."""

import time

import pytest

from tests.story_server.run_ticks import NoTicks, ticks


def test_work_counts_and_sleep_does_not() -> None:
    counted = ticks()
    if isinstance(counted, NoTicks):
        pytest.skip("this kernel does not let us sample a thread")
    counted.ran_s()
    time.sleep(0.2)
    assert counted.ran_s() < 0.1
    began_s, ran_s = time.thread_time(), 0.0
    while ran_s < 0.2:
        sorted(range(100_000, 0, -1))
        ran_s += counted.ran_s()
        assert time.thread_time() - began_s < 60, f"only {ran_s:g} s were counted"
