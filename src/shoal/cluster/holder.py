"""The holder of one engine's process, on the node where the engine runs.

It starts the engine's program with a config, listening on this node's address, and tells what became of it: it decides
nothing itself. It is the parent of the process, so the process ends with it (Linux), whatever ends it. Knows no ray:
an actor is a holder in a process of Ray's (nodes.py).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.clock import Clock, WallClock
from shoal.engine import blackbox
from shoal.engine.listen import LISTENING, Reach
from shoal.engine.refusal import refusal_of
from shoal.engine.supervise import FAULTS

PAUSE_S = 2.0  # longer between two looks: this process, or the fleet, was paused, and the engine may have been, too
ENGINE = "shoal.processes.engine"


@dataclass(frozen=True)
class HolderStatus:
    """What became of the engine that was started last."""

    state: str = "idle"  # none was started yet · starting · up · ended
    epoch: int = -1
    address: str = ""  # how to reach it, while it is up
    server_key: str = ""
    code: int = 0  # its exit code; below 0: killed by that signal
    was_up: bool = False
    fault: bool = False  # it ended by a fault of its own
    refusal: str = ""  # why its config cannot be served


class EngineHolder:
    """Holds one process. All calls come from one thread, which must live as long as the process."""

    def __init__(
        self, host: str, hang_timeout_s: float = 0.0, module: str = ENGINE, clock: Clock | None = None
    ) -> None:
        """`host`: this node's address. `hang_timeout_s`: an engine that is silent for longer is killed; 0: never."""
        self._host = f"[{host}]" if ":" in host else host
        self._hang_timeout_s = hang_timeout_s
        self._module = module
        self._clock = clock or WallClock()
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._epoch = -1
        self._ready = self._hung = False
        self._heard_s = self._looked_s = 0.0

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the engine; one that runs is killed first. The config is that of the engine's program, less what only
        this node knows."""
        self.kill()
        (self._folder / LISTENING).unlink(missing_ok=True)
        read, write = os.pipe()
        own = {"folder": str(self._folder), "listen": f"tcp://{self._host}:*", "ready_fd": write}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            pass_fds=[write],
            process_group=0,
        )
        os.close(write)
        os.set_blocking(read, False)
        self._pipe, self._ready, self._hung, self._epoch = read, False, False, config["epoch"]
        self._heard_s = self._looked_s = self._clock.now_s()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps({**config, **own}).encode())

    def status(self) -> HolderStatus:
        if self._process is None:
            return HolderStatus()
        self._hear()
        self._check_pulse()
        code = self._process.poll()
        if code is not None:
            fault = self._ready and (self._hung or code > 0 or -code in FAULTS)
            return HolderStatus(
                "ended", self._epoch, code=code, was_up=self._ready, fault=fault, refusal=refusal_of(self._folder)
            )
        if not self._ready:
            return HolderStatus("starting", self._epoch)
        reach = Reach.read(self._folder)
        return HolderStatus("up", self._epoch, reach.address, reach.server_key, was_up=True)

    def drain(self) -> None:
        """Have the engine end when the fronts have moved its jobs, or at its timeout."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
            self._process, self._pipe = None, -1

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(self._pipe, 65536):
                self._ready = True
                self._heard_s = self._clock.now_s()

    def _check_pulse(self) -> None:
        """Kill an engine that hangs."""
        now_s = self._clock.now_s()
        if now_s - self._looked_s > PAUSE_S:
            self._heard_s = now_s
        self._looked_s = now_s
        silent_s = now_s - self._heard_s
        assert self._process is not None
        if self._hang_timeout_s and self._ready and silent_s > self._hang_timeout_s and self._process.poll() is None:
            self._hung = True
            blackbox.mark_fault(self._folder, self._epoch)
            self._process.kill()
            self._process.wait()
