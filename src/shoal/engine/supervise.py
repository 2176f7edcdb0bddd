"""The supervisor: starts the engine and the fronts as processes, watches them, and starts again what died.

Owns processes, signals and the private folder; apart from the fronts, so that none of their trouble is its own. Each
child reads its config as JSON from standard input and says "ready" on a pipe. Knows nothing of what they do.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shoal.core.clock import Clock, WallClock
from shoal.errors import EngineError

log = logging.getLogger(__name__)

# signals by which a process dies of its own fault
FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
BEAT_S = 1.0
USERS_MISTAKE = 2  # exit code of a child that was asked for the impossible; trying again would not help
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
MOST_FAILED_STARTS = 5  # in a row, without having been ready once
KILL_AFTER_S = 5.0  # a child that was told to stop and has not


@dataclass
class Child:
    """One process, in all its lives."""

    name: str
    module: str
    config: Callable[[int], Mapping[str, Any]]  # of the life with this number; an EngineError: there can be none
    fds: Sequence[int] = ()  # files it inherits
    process: "subprocess.Popen[bytes] | None" = None
    ready: bool = False
    lives: int = 0
    failures: int = 0  # starts in a row that were never ready
    start_at_s: float = 0.0
    pipe: int = -1
    was_ready: bool = False
    up: bool = False  # ready, and connected to those it needs
    silence_s: float = 0.0  # it says something at least so often, or it hangs; 0: it need not
    heard_s: float = 0.0
    hung: bool = False  # it was killed for that
    after_fault: bool = False  # it died by itself, not by somebody's hand
    given_up: bool = False


class Supervisor:
    """Keeps its children alive until it is told to stop."""

    def __init__(
        self,
        engine: Child,
        fronts: Sequence[Child],
        drain_timeout_s: float,
        on_ready: Callable[[], None],
        on_hangup: Callable[[], None] | None = None,
        on_given_up: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.engine = engine
        self.fronts = list(fronts)
        self.drain_timeout_s = drain_timeout_s
        self.clock = clock or WallClock()
        self._on_ready = on_ready
        self._on_hangup = on_hangup  # what SIGHUP asks for; None: the same as SIGTERM
        self._on_given_up = on_given_up  # so that those who wait for the engine hear that it will not come
        self._hung_up = False
        self._told_ready = False
        self._asked_to_stop = 0
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()

    @property
    def children(self) -> list[Child]:
        return [self.engine, *self.fronts]

    def run(self) -> int:
        """Start everybody, stay until a signal ends it; the exit code."""
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup_signal if self._on_hangup else self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to wake up
        try:
            while not self._asked_to_stop:
                self._answer_hangup()
                code = self._look_after()
                if code is not None:
                    self._stop_all(drain=False)
                    return code
                self._sleep(self._next_start_s())
            self._stop_all(drain=True)
            return 0
        except BaseException:
            self._stop_all(drain=False)
            raise
        finally:
            signal.set_wakeup_fd(-1)
            self._selector.close()

    def _on_hangup_signal(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _answer_hangup(self) -> None:
        if self._hung_up and self._on_hangup is not None:
            self._hung_up = False
            self._on_hangup()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop += 1

    # ---- alive ----------------------------------------------------------------------------------------------------

    def _look_after(self) -> int | None:
        """Start who should run and does not. An exit code if that makes no sense any more."""
        for child in self.children:
            code = self._tend(child)
            if code is not None:
                return code
        if not self._told_ready and all(child.up for child in self.children):
            self._told_ready = True
            self._on_ready()
        return None

    def _tend(self, child: Child) -> int | None:
        """Start it if it should run and does not. An exit code if it makes no sense to go on at all."""
        code = None if child.process is None else child.process.poll()
        if code is not None:
            self._buried(child, code)
            if code == USERS_MISTAKE and not child.was_ready:
                return USERS_MISTAKE  # it has said what is wrong
            if child.failures >= MOST_FAILED_STARTS and not (self._told_ready and self._give_up(child)):
                log.error("%s failed to start %d times in a row; giving up", child.name, child.failures)
                return 1
        self._check_pulse(child)
        if child.process is None and not child.given_up and self.clock.now_s() >= child.start_at_s:
            try:
                self._start(child)
            except EngineError as error:
                log.error("%s cannot be started: %s", child.name, error)
                child.given_up = True
                return 1
        return None

    def _give_up(self, child: Child) -> bool:
        """It is not tried again. False if then nobody is left who could say so."""
        child.given_up = True
        if all(front.given_up for front in self.fronts):
            return False
        if child is self.engine:
            try:
                self._on_given_up()
            except OSError as error:  # else they would wait for it for ever
                log.error("the fronts cannot be told that no engine will come: %s", error)
                return False
        so = "requests are answered with 503" if child is self.engine else "the other fronts answer"
        log.error(
            "%s failed to start %d times in a row and is not tried again; %s until this server is restarted",
            child.name,
            child.failures,
            so,
        )
        return True

    def _check_pulse(self, child: Child) -> None:
        """Kill it if it hangs; what follows is as after any death."""
        if child.process is None or not child.ready or not child.silence_s:
            return
        silent_s = self.clock.now_s() - child.heard_s
        if silent_s > child.silence_s:
            log.error("%s has given no sign of life for %.0f s and is killed", child.name, silent_s)
            child.hung = True
            child.process.kill()
            child.process.wait()
            self._buried(child, child.process.returncode)

    def _start(self, child: Child) -> None:
        about = child.config(child.lives)
        read, write = os.pipe()
        config = {**about, "ready_fd": write, "after_fault": child.after_fault}
        child.process = subprocess.Popen(
            [sys.executable, "-m", child.module],
            stdin=subprocess.PIPE,
            pass_fds=[write, *child.fds],
            start_new_session=True,  # Ctrl-C is for the supervisor alone
        )
        os.close(write)
        child.pipe, child.ready, child.up, child.hung = read, False, False, False
        child.lives += 1
        self._selector.register(read, selectors.EVENT_READ, child)
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.process.stdin as pipe:
            pipe.write(json.dumps(config).encode())

    def _buried(self, child: Child, code: int) -> None:
        """It died: say so, and when it will be started again."""
        self._hear_pipe(child)
        if child.pipe >= 0:
            self._close_pipe(child)
        child.failures = 0 if child.ready else child.failures + 1
        # a start that failed says nothing about who was in the last pass; nor does a kill from outside
        if child.ready:
            child.after_fault = child.hung or code > 0 or -code in FAULTS
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**child.failures) if child.failures else 0.0
        child.process, child.ready = None, False
        child.start_at_s = self.clock.now_s() + pause_s
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code != USERS_MISTAKE:
            log.error("%s %s; it is started again in %.1f s", child.name, how, pause_s)

    def _next_start_s(self) -> float:
        now_s = self.clock.now_s()
        starts = [c.start_at_s - now_s for c in self.children if c.process is None and not c.given_up]
        pulses = [c.heard_s + c.silence_s - now_s for c in self.children if c.process is not None and c.silence_s]
        return max(0.0, min([*starts, *(at_s + 0.05 for at_s in pulses), 60.0]))

    def _sleep(self, most_s: float) -> None:
        """Until something happens."""
        for key, _ in self._selector.select(most_s):
            if key.data is None:
                os.read(self._wake_r, 4096)
            else:
                self._hear_pipe(key.data)

    def _hear_pipe(self, child: Child) -> None:
        if child.pipe < 0:
            return
        os.set_blocking(child.pipe, False)
        try:
            said = os.read(child.pipe, 4096)
        except BlockingIOError:
            return
        if said:
            child.heard_s = self.clock.now_s()
            child.ready = child.was_ready = True
            child.up = child.up or b"up" in said
        else:
            self._close_pipe(child)

    def _close_pipe(self, child: Child) -> None:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        child.pipe = -1

    # ---- the end --------------------------------------------------------------------------------------------------

    def _stop_all(self, drain: bool) -> None:
        """Fronts first: they let what runs finish, for which they need the engine."""
        patience_s = self.drain_timeout_s + KILL_AFTER_S if drain else KILL_AFTER_S
        self._end(self.fronts, patience_s, watch_engine=drain)
        self._end([self.engine], KILL_AFTER_S)

    def _end(self, children: Sequence[Child], patience_s: float, watch_engine: bool = False) -> None:
        asked = self._asked_to_stop
        until_s = self.clock.now_s() + patience_s
        for child in children:
            if child.process is not None:
                child.process.terminate()
        while any(child.process is not None and child.process.poll() is None for child in children):
            if self.clock.now_s() >= until_s or self._asked_to_stop > asked:  # asked twice: now
                for child in children:
                    if child.process is not None:
                        child.process.kill()
            elif watch_engine:
                self._tend(self.engine)  # what drains still needs it
            self._sleep(min(0.2, max(0.0, until_s - self.clock.now_s())) or 0.05)


def die_with_parent() -> None:
    """Ask the kernel to end this process when the supervisor dies, however it dies. Linux only; a no-op elsewhere."""
    if sys.platform != "linux":
        return
    import ctypes

    PR_SET_PDEATHSIG = 1
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise EngineError("the supervisor is gone already")


class Heartbeat:
    """Tells the supervisor now and then that this process's loop turns. Call it as often as it does."""

    def __init__(self, fd: int, clock: Clock) -> None:
        self._fd = fd
        self._clock = clock
        self._next_s = 0.0

    def __call__(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._next_s:
            self._next_s = now_s + BEAT_S
            with contextlib.suppress(OSError):
                os.write(self._fd, b".")


def say_ready(fd: int, up: bool = True) -> None:
    """Tell the supervisor that this process serves; `up`: and that those it needs are there."""
    with contextlib.suppress(OSError):
        os.write(fd, b"up\n" if up else b"ready\n")
