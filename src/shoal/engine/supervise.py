"""The supervisor: starts engines and fronts as processes, watches them, and restarts those that died.

Owns processes and signals. It is a process of its own, so that a fault in a front or in an engine cannot reach it.
Each child reads its config as JSON from standard input and writes "ready" to a pipe, then heartbeats: a child that
stops writing them hangs. Time in which the supervisor itself did not run (a suspended machine) does not count as a
child's silence. On request it restarts all engines, one after the other. Knows nothing of what children do.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shoal.core.clock import Clock, WallClock
from shoal.engine.spare import NoSpare, launch
from shoal.errors import EngineError

log = logging.getLogger(__name__)

# signals that mean a fault of the process itself
FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
BEAT_S = 1.0
USERS_MISTAKE = 2  # exit code of a child whose config cannot be served; a restart would not help
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
MOVE_S = 1.0  # for which an engine is not started again, while the others compute what its streams had
MOST_FAILED_STARTS = 5  # in a row, without having been ready once
LOOK_S = 1.0  # longest sleep while a child is watched for heartbeats
PAUSE_S = 1.0  # a sleep that is longer than it should be by this was a pause of this process
KILL_AFTER_S = 5.0  # a child that has not ended so long after SIGTERM is killed


@dataclass
class Child:
    """One process, across all its restarts."""

    name: str
    module: str
    config: Callable[[int], Mapping[str, Any]]  # of start number n, from 0; raises EngineError if it cannot be started
    fds: Sequence[int] = ()  # file descriptors it inherits
    process: "subprocess.Popen[bytes] | None" = None
    ready: bool = False
    starts: int = 0
    failures: int = 0  # starts in a row that never became ready
    start_at_s: float = 0.0
    pipe: int = -1
    was_ready: bool = False
    up: bool = False  # ready, and connected to the processes it needs
    silence_s: float = 0.0  # it hangs if its pipe is silent for longer; 0: not checked
    heard_s: float = 0.0  # when it last wrote to its pipe
    hung: bool = False  # it was killed because it hung
    after_fault: bool = False  # it died of a fault of its own, not of a kill from outside
    given_up: bool = False
    restarts_its_own: bool = False  # it has engines of its own, and restarts them one by one when asked
    leaving: bool = False  # it was asked to end, and will be started again
    on_hang: Callable[[int], None] = lambda start: None  # told before it is killed because it hangs
    on_given_up: Callable[[], None] = lambda: None  # told when it will not be started again

    @property
    def watched(self) -> bool:
        """Whether it must write heartbeats now."""
        return self.process is not None and self.ready and self.silence_s > 0


class Supervisor:
    """Keeps its children running until a signal stops it."""

    def __init__(
        self,
        engines: Sequence[Child],
        fronts: Sequence[Child],
        drain_timeout_s: float,
        on_ready: Callable[[], None],
        on_hangup: Callable[[], None] | None = None,
        on_given_up: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        spare: NoSpare | None = None,
    ) -> None:
        self.engines = list(engines)
        self.fronts = list(fronts)
        self.drain_timeout_s = drain_timeout_s
        self.clock = clock or WallClock()
        self._on_ready = on_ready
        self._on_hangup = on_hangup  # called for SIGHUP; None: SIGHUP stops it as SIGTERM does
        self._on_given_up = on_given_up  # lets the fronts know that no engine will come back
        self._spare = spare or NoSpare()
        self._hung_up = False
        self._restart_asked = False
        self._to_restart: deque[Child] = deque()  # engines, by a rolling restart
        self._restarting: Child | None = None  # … and the one whose turn it is
        self._kill_at_s = 0.0  # if that has not ended by then
        self._was_ready = False
        self._stop_signals = 0
        self._looked_s = self.clock.now_s()  # when the children were last looked after
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()

    @property
    def children(self) -> list[Child]:
        return [*self.engines, *self.fronts]

    def run(self) -> int:
        """Start all children and run until a signal comes; returns the exit code."""
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup_signal if self._on_hangup else self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_restart_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to wake up the selector
        try:
            while not self._stop_signals:
                self._answer_hangup()
                self._answer_restart()
                code = self._tend_all()
                if code is not None:
                    self._stop_all(drain=False)
                    return code
                self._sleep(self._longest_sleep_s())
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
        self._stop_signals += 1

    # ---- restarting the engines one by one ------------------------------------------------------------------------

    def _on_restart_signal(self, number: int, frame: FrameType | None) -> None:
        self._restart_asked = True

    def _answer_restart(self) -> None:
        if self._restart_asked:
            self._restart_asked = False
            self._to_restart = deque(child for child in self.engines if not child.given_up)
            log.info("restarting %d engines, one after the other", len(self._to_restart))
        self._go_on_restarting(self.clock.now_s())

    def _go_on_restarting(self, now_s: float) -> None:
        """Ask the next engine to end when the one before it is up again, so that all but one are there at any time."""
        child = self._restarting
        if child is not None and not self._was_restarted(child, now_s):
            return
        self._restarting = None
        if not self._to_restart or not all(one.ready or one.given_up for one in self.engines):
            return
        child = self._restarting = self._to_restart.popleft()
        if child.process is None:
            return  # given up meanwhile
        if child.restarts_its_own:
            child.process.send_signal(signal.SIGUSR1)
            self._restarting = None
            return
        child.leaving = True
        child.process.send_signal(signal.SIGUSR1)
        self._kill_at_s = now_s + self.drain_timeout_s + KILL_AFTER_S

    def _was_restarted(self, child: Child, now_s: float) -> bool:
        if child.given_up:
            self._to_restart.clear()
            log.error("%s could not be started again; the other engines are not restarted", child.name)
            return True
        if child.leaving and child.process is not None and now_s >= self._kill_at_s:
            log.warning("%s has not ended in time and is killed", child.name)
            child.process.kill()
            self._kill_at_s = now_s + KILL_AFTER_S
        if child.leaving or not child.ready:
            return False
        log.info("%s was restarted; %d to go", child.name, len(self._to_restart))
        return True

    # ---- keeping children running ---------------------------------------------------------------------------------

    def _tend_all(self) -> int | None:
        """Start the children that do not run. Returns an exit code where the server must end."""
        now_s = self._look()
        for child in self.children:
            code = self._tend(child, now_s)
            if code is not None:
                return code
        if not self._was_ready and all(child.up for child in self.children):
            self._was_ready = True
            self._on_ready()
        self._spare.tend(self._was_ready and all(child.ready or child.given_up for child in self.engines), now_s)
        return None

    def _look(self) -> float:
        """The time at which children are judged. If this process was paused before it, they probably were, too, and get
        a full period for their next heartbeat."""
        now_s = self.clock.now_s()
        if now_s - self._looked_s > LOOK_S + PAUSE_S:
            for child in self.children:
                child.heard_s = now_s
        self._looked_s = now_s
        return now_s

    def _tend(self, child: Child, now_s: float) -> int | None:
        """Start the child if it does not run. Returns an exit code where the server must end."""
        code = None if child.process is None else child.process.poll()
        if code is not None:
            self._ended(child, code)
            if code == USERS_MISTAKE and not child.was_ready:
                return USERS_MISTAKE  # the child has printed the reason
            if child.failures >= MOST_FAILED_STARTS and not (self._was_ready and self._give_up(child)):
                log.error("%s failed to start %d times in a row; giving up", child.name, child.failures)
                return 1
        self._check_pulse(child, now_s)
        if child.process is None and not child.given_up and now_s >= child.start_at_s:
            try:
                self._start(child)
            except EngineError as error:
                log.error("%s cannot be started: %s", child.name, error)
                child.given_up = True
                return 1
        return None

    def _give_up(self, child: Child) -> bool:
        """Stop restarting this child. False if no front is left to answer requests with the error."""
        child.given_up = True
        if all(front.given_up for front in self.fronts):
            return False
        is_engine, no_engine = child in self.engines, all(engine.given_up for engine in self.engines)
        if is_engine:
            try:
                child.on_given_up()
                if no_engine:
                    self._on_given_up()
            except OSError as error:  # the fronts would wait for it forever
                log.error("cannot let the fronts know that no engine will come back: %s", error)
                return False
        rest = "the other engines compute" if is_engine else "the other fronts answer"
        effect = "requests are answered with 503" if is_engine and no_engine else rest
        log.error(
            "%s failed to start %d times in a row and is not started again; %s until this server is restarted",
            child.name,
            child.failures,
            effect,
        )
        return True

    def _check_pulse(self, child: Child, now_s: float) -> None:
        """Kill the child if it hangs; it is restarted as after any death."""
        if child.process is None or not child.watched:
            return
        self._hear_pipe(child)  # what it wrote while this process did not read
        silent_s = now_s - child.heard_s
        if silent_s > child.silence_s:
            log.error("%s has given no sign of life for %.0f s and is killed", child.name, silent_s)
            child.hung = True
            child.on_hang(child.starts - 1)
            child.process.kill()
            child.process.wait()
            self._ended(child, child.process.returncode)

    def _start(self, child: Child) -> None:
        given = child.config(child.starts)
        launched = self._spare.take(child.module) or launch(child.module, child.fds)
        config = {**given, "ready_fd": launched.its_pipe, "after_fault": child.after_fault}
        child.process = launched.process
        child.pipe, child.ready, child.up, child.hung = launched.pipe, False, False, False
        child.starts += 1
        self._selector.register(child.pipe, selectors.EVENT_READ, child)
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.process.stdin as pipe:
            pipe.write(json.dumps(config).encode())

    def _ended(self, child: Child, code: int) -> None:
        """The child has ended: log it, and set the time of its restart."""
        self._hear_pipe(child)
        if child.pipe >= 0:
            self._close_pipe(child)
        child.failures = 0 if child.ready else child.failures + 1
        # a failed start computed no pass, so it leaves after_fault as it was; a kill from outside is no fault
        if child.ready:
            child.after_fault = child.hung or code > 0 or -code in FAULTS
        left, child.leaving = child.leaving, False
        asked = left and code == 0
        others = [one for one in self.engines if one is not child]
        moves = len(others) < len(self.engines) and not asked and any(one.ready for one in others)
        pause_s = MOVE_S if moves else 0.0
        if child.failures:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**child.failures)
        child.process, child.ready = None, False
        child.start_at_s = self.clock.now_s() + pause_s
        if asked:
            log.info("%s has ended, as asked, and is started again", child.name)
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code != USERS_MISTAKE:
            log.error("%s %s; restarting it in %.1f s", child.name, how, pause_s)

    def _longest_sleep_s(self) -> float:
        now_s = self.clock.now_s()
        starts = [c.start_at_s - now_s for c in self.children if c.process is None and not c.given_up]
        watched = any(child.watched for child in self.children) or self._restarting is not None
        return max(0.0, min([*starts, self._spare.due_s - now_s, LOOK_S if watched else 60.0]))

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
            data = os.read(child.pipe, 4096)
        except BlockingIOError:
            return
        if data:
            child.heard_s = self.clock.now_s()
            child.ready = child.was_ready = True
            child.up = child.up or b"up" in data
        else:
            self._close_pipe(child)

    def _close_pipe(self, child: Child) -> None:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        child.pipe = -1

    # ---- stopping -------------------------------------------------------------------------------------------------

    def _stop_all(self, drain: bool) -> None:
        """Fronts first: they let running requests finish, and need the engines for that."""
        self._spare.end()
        patience_s = self.drain_timeout_s + KILL_AFTER_S if drain else KILL_AFTER_S
        self._end(self.fronts, patience_s, watch_engines=drain)
        self._end(self.engines, KILL_AFTER_S)

    def _end(self, children: Sequence[Child], patience_s: float, watch_engines: bool = False) -> None:
        signals = self._stop_signals
        until_s = self.clock.now_s() + patience_s
        for child in children:
            if child.process is not None:
                child.process.terminate()
        while any(child.process is not None and child.process.poll() is None for child in children):
            if self.clock.now_s() >= until_s or self._stop_signals > signals:  # a second signal: at once
                for child in children:
                    if child.process is not None:
                        child.process.kill()
            elif watch_engines:  # draining fronts still need them
                now_s = self._look()
                for engine in self.engines:
                    self._tend(engine, now_s)
            self._sleep(min(0.2, max(0.0, until_s - self.clock.now_s())) or 0.05)


def die_with_parent() -> None:
    """Have the kernel kill this process when the supervisor dies for any reason. Linux only; a no-op elsewhere."""
    parent = os.getppid()
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise EngineError("the supervisor is gone already")


def name_process(name: str) -> None:
    """What `ps` and `top` call this process, in at most 15 characters. Linux only; a no-op elsewhere."""
    _prctl(15, name.encode())  # PR_SET_NAME


def _prctl(what: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(what, value)


class Heartbeat:
    """Shows the supervisor that this process's loop runs. Call it in each iteration; it writes once per BEAT_S."""

    def __init__(self, fd: int, clock: Clock) -> None:
        self._fd = fd
        self._clock = clock
        self._next_s = 0.0
        os.set_blocking(fd, False)  # a full pipe of a supervisor that does not read must not stop this process

    def __call__(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._next_s:
            self._next_s = now_s + BEAT_S
            with contextlib.suppress(OSError):
                os.write(self._fd, b".")


def say_ready(fd: int, up: bool = True) -> None:
    """Report to the supervisor that this process is ready; `up`: and connected to the processes it needs."""
    with contextlib.suppress(OSError):
        os.write(fd, b"up\n" if up else b"ready\n")
