"""A spare process: it has loaded its program and waits for a config, so that the next engine starts sooner.

Most of the time of a restart is loading the program: seconds of CPU time for torch alone, taken from the streams that
have just moved to other engines. Owns that one process. Does not know configs, nor what the program does.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

CALM_S = 1.0  # all engines have been ready for so long before a spare process is started
RETRY_S = 60.0  # after one that ended by itself

log = logging.getLogger("shoal.engine.supervise")


@dataclass(frozen=True)
class Launched:
    """A process that waits for its config on standard input."""

    process: "subprocess.Popen[bytes]"
    pipe: int  # where it can be heard
    its_pipe: int  # the number of the other end, in that process


def launch(module: str, fds: Sequence[int] = (), arguments: Sequence[str] = ()) -> Launched:
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            pass_fds=[write, *fds],
            # Ctrl-C reaches the supervisor only. Not a session of its own: Linux shares CPUs among sessions first
            # (autogroups), where priorities of threads mean little and an engine was left without a CPU for seconds.
            process_group=0,
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return Launched(process, read, write)


class NoSpare:
    """Every process is started when it is needed."""

    due_s = float("inf")

    def tend(self, calm: bool, now_s: float) -> None:
        pass

    def take(self, module: str) -> Launched | None:
        return None

    def end(self) -> None:
        pass


class Spare(NoSpare):
    """Keeps one spare process of a program."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.launched: Launched | None = None
        self._not_before_s = 0.0

    @property
    def due_s(self) -> float:  # type: ignore[override]
        """When it must be tended next."""
        return self._not_before_s if self.launched is None else float("inf")

    def tend(self, calm: bool, now_s: float) -> None:
        """Start the spare process, unless engines are being started: they need the machine more."""
        if self.launched is not None and self.launched.process.poll() is not None:
            log.warning("the spare engine process ended with code %d", self.launched.process.returncode)
            self._forget()
            self._not_before_s = now_s + RETRY_S
        if not calm:
            self._not_before_s = max(self._not_before_s, now_s + CALM_S)
        elif self.launched is None and now_s >= self._not_before_s:
            try:
                self.launched = launch(self.module, arguments=["spare"])
            except OSError as error:  # no memory, or too many processes
                log.warning("cannot start a spare engine process: %s", error)
                self._not_before_s = now_s + RETRY_S

    def take(self, module: str) -> Launched | None:
        """The spare process if it runs this program. None: start another one."""
        found = self.launched
        if found is None or module != self.module or found.process.poll() is not None:
            return None
        self.launched = None
        return found

    def end(self) -> None:
        if self.launched is not None:
            self.launched.process.kill()
            self._forget()

    def _forget(self) -> None:
        assert self.launched is not None
        self.launched.process.wait()
        if self.launched.process.stdin is not None:
            self.launched.process.stdin.close()
        os.close(self.launched.pipe)
        self.launched = None
