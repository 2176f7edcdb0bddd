"""Whom the supervisor takes for hanging, on a virtual clock: processes that are only numbers, with real pipes."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.core.clock import VirtualClock
from shoal.engine.supervise import LOOK_S, PAUSE_S, Child, Heartbeat, Supervisor

SILENCE_S = 10.0


class PretendProcess:
    """A process that does nothing until it is killed."""

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def wait(self) -> int | None:
        return self.returncode


class Ward:
    """An engine and a front, both ready, and their supervisor."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1e6)
        engine, front = (Child(name, "", lambda life: {}, silence_s=SILENCE_S) for name in ("engine", "front"))
        self.supervisor = Supervisor([engine], [front], 1.0, lambda: None, clock=self.clock)
        self.started: list[str] = []
        self.supervisor._start = self.start  # type: ignore[method-assign]
        self.pipes = {child.name: self.begin(child) for child in (engine, front)}

    def begin(self, child: Child) -> int:
        read, write = os.pipe()
        child.process, child.ready, child.pipe, child.heard_s = PretendProcess(), True, read, self.clock.now_s()  # type: ignore[assignment]
        self.supervisor._selector.register(read, 1, child)
        return write

    def start(self, child: Child) -> None:
        """It loads for ever."""
        self.started.append(child.name)
        child.process = PretendProcess()  # type: ignore[assignment]

    def beat(self, *names: str) -> None:
        for name in names:
            os.write(self.pipes[name], b".")

    def pass_time(self, seconds: float, *alive: str) -> None:
        """These write their heartbeats meanwhile, and the supervisor looks after all, as often as it does."""
        until_s = self.clock.now_s() + seconds
        while self.clock.now_s() < until_s:
            self.clock.advance(min(LOOK_S, until_s - self.clock.now_s()))
            self.beat(*alive)
            self.look()

    def look(self) -> None:
        assert self.supervisor._tend_all() is None


@pytest.fixture
def ward() -> Iterator[Ward]:
    made = Ward()
    yield made
    for child in made.supervisor.children:
        if child.pipe >= 0:
            made.supervisor._close_pipe(child)
    for fd in (*made.pipes.values(), made.supervisor._wake_r, made.supervisor._wake_w):
        os.close(fd)
    made.supervisor._selector.close()


@pytest.mark.parametrize(("hangs", "lives"), [("front", "engine"), ("engine", "front")])
def test_a_child_that_falls_silent_is_killed_and_started_again(ward: Ward, hangs: str, lives: str) -> None:
    ward.pass_time(SILENCE_S, lives)
    assert ward.started == []
    ward.pass_time(2 * LOOK_S, lives)
    assert ward.started == [hangs]
    (child,) = [child for child in ward.supervisor.children if child.name == hangs]
    assert child.after_fault


def test_who_is_not_watched_may_be_silent(ward: Ward) -> None:
    for child in ward.supervisor.children:
        child.silence_s = 0.0
    ward.pass_time(1000 * SILENCE_S)
    assert ward.started == []


def test_a_heartbeat_in_the_pipe_is_read_before_the_judgement(ward: Ward) -> None:
    """The supervisor was busy, and did not listen."""
    for _ in range(round(SILENCE_S / LOOK_S)):
        ward.clock.advance(LOOK_S)
        ward.supervisor._look()
    ward.clock.advance(LOOK_S)
    ward.beat("engine", "front")
    ward.look()
    assert ward.started == []


@pytest.mark.parametrize("pause_s", [SILENCE_S + 1, 1e5])
def test_a_pause_of_all_processes_is_no_hang(ward: Ward, pause_s: float) -> None:
    ward.pass_time(20.0, "engine", "front")
    ward.clock.advance(pause_s)
    ward.look()
    assert ward.started == []
    ward.pass_time(20.0, "engine", "front")
    assert ward.started == []


def test_children_that_go_on_later_than_the_supervisor_have_their_full_period(ward: Ward) -> None:
    ward.pass_time(SILENCE_S - 1)  # both have been silent for long already
    ward.clock.advance(LOOK_S + PAUSE_S + 0.1)
    ward.look()
    ward.pass_time(SILENCE_S)
    assert ward.started == []
    ward.beat("engine")
    ward.pass_time(2 * LOOK_S)
    assert ward.started == ["front"], "but no more than that"


def test_a_pause_while_the_children_are_looked_after_is_no_hang(ward: Ward) -> None:
    hear = ward.supervisor._hear_pipe

    def paused(child: Child) -> None:
        ward.clock.advance(1e5)
        hear(child)

    ward.supervisor._hear_pipe = paused  # type: ignore[method-assign]
    ward.look()
    ward.supervisor._hear_pipe = hear  # type: ignore[method-assign]
    ward.look()
    assert ward.started == []


def test_a_pause_while_the_fronts_drain_is_no_hang_of_the_engine(ward: Ward) -> None:
    front = ward.supervisor.fronts[0].process
    looks: list[float] = []

    def sleep(most_s: float) -> None:
        looks.append(most_s)
        ward.clock.advance(1e3 if len(looks) == 2 else most_s)
        if len(looks) == 4:
            front.returncode = 0  # type: ignore[union-attr]

    ward.supervisor._sleep = sleep  # type: ignore[method-assign]
    front.terminate = lambda: None  # type: ignore[union-attr, method-assign]
    ward.supervisor._end(ward.supervisor.fronts, 1e9, watch_engines=True)
    assert len(looks) == 4
    assert ward.started == []


def test_the_supervisor_sleeps_while_a_child_starts(ward: Ward) -> None:
    """A model may load for minutes."""
    assert ward.supervisor._longest_sleep_s() == LOOK_S
    for child in ward.supervisor.children:
        child.ready, child.heard_s = False, 0.0
    assert ward.supervisor._longest_sleep_s() > LOOK_S


def test_heartbeats_that_are_not_read_stop_no_process() -> None:
    clock: Any = VirtualClock()
    read, write = os.pipe()
    beat = Heartbeat(write, clock)
    for _ in range(100_000):  # more than a pipe holds
        clock.advance(2.0)
        beat()
    os.close(read)
    os.close(write)
