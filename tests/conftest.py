"""Set before torch is loaded: tests compute with one thread each, unless they test threads and say so.

Two test processes with two spinning threads each take twice as long on two cores, and many times as long on a machine
whose cores are taken away now and then.

Also owns what holds for all tests: how much the plain run takes (see effort.py), and that the garbage collector does
not go through everything that collection has made: first again and again while it is made, then during every test.
"""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import HealthCheck, settings  # not before the lines above

    from tests import effort

    effort.plain = "not slow" in config.option.markexpr
    settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("calm")  # no test depends on how fast the machine is


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
