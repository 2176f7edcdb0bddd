"""The processes of ranks 1 and up, as rank 0 sees them: started, asked, watched and ended.

    rank 0 ── socket pair ──► rank n      plans and questions; answers and a beat every second
       └──── watcher thread: a rank whose socket ends has died; one whose beats stay out hangs

A rank that is lost takes the others with it, so that no operation among ranks waits for it. Ranks end when the socket
does, and where Linux allows it with the thread that started them: rank 0 leaves no process behind, however it ends.
Owns processes, sockets and who is lost; `on_lost` is told. Knows nothing of what ranks compute.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal import errors
from shoal.errors import EngineLost, ShoalError
from shoal.runner import rank_wire

log = logging.getLogger(__name__)
PROGRAM = "shoal.processes.rank"
SILENCE_S = 60.0  # a rank beats once a second
LOOK_S = 0.5
END_S = 5.0  # a rank that has not ended so long after its socket is killed
NOTICE_S = 5.0  # in which a rank's death is noticed after an operation with it failed
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Rank:
    """One process."""

    number: int
    process: "subprocess.Popen[bytes]"
    socket: socket.socket
    heard_s: float
    answers: "queue.SimpleQueue[dict[str, Any] | None]" = field(default_factory=queue.SimpleQueue)  # None: it has ended
    failure: str = ""  # what it said before it ended


class NoRanks:
    """All of the model is in this process."""

    size = 1
    on_lost: Callable[[EngineLost], None] = staticmethod(lambda error: None)

    def ask(self, what: str, **more: Any) -> list[dict[str, Any]]:
        """There is no rank to answer."""
        return []

    @contextmanager
    def doing(self, what: str, **more: Any) -> Iterator[None]:
        """There is no rank that does it, too."""
        yield

    def close(self) -> None:
        """Nothing to end."""


class Ranks:
    """Ranks 1 and up of one engine. Call from one thread; `on_lost` is called by another."""

    def __init__(
        self,
        configs: Sequence[Mapping[str, Any]],
        environs: Sequence[Mapping[str, str]],
        program: str = PROGRAM,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Start a process for each config, with the environment that it needs."""
        self.size = len(configs) + 1
        self.lost: EngineLost | None = None
        self.on_lost: Callable[[EngineLost], None] = lambda error: None
        self._silence_s = silence_s
        self._closing = False
        self._losing = threading.Lock()
        self._noticed = threading.Event()
        self._at_end: list[Callable[[], None]] = []
        self.ranks = [
            _start(number, program, config, environ)
            for number, (config, environ) in enumerate(zip(configs, environs, strict=True), 1)
        ]
        self._watcher = threading.Thread(target=self._watch, name="shoal-ranks", daemon=True)
        self._watcher.start()
        atexit.register(self.close)

    def at_end(self, call: Callable[[], None]) -> None:
        """Call this when the ranks have ended."""
        self._at_end.append(call)

    def ask(self, what: str, **more: Any) -> list[dict[str, Any]]:
        """Ask all ranks; waits for their answers. Raises what a rank refuses."""
        self.begin(what, **more)
        return self.answers()

    def begin(self, what: str, **more: Any) -> None:
        """Ask all ranks; answers() takes what they say."""
        self._send(rank_wire.ASK, json.dumps({"what": what, **more}).encode())

    @contextmanager
    def doing(self, what: str, **more: Any) -> Iterator[None]:
        """Have all ranks do something while rank 0 does it."""
        self.begin(what, **more)
        yield
        self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of each rank; it may take as long as it takes, while the ranks live."""
        found = []
        for rank in self.ranks:
            answer = rank.answers.get()
            if answer is None:
                rank.answers.put(None)
                raise self.loss(None)
            if "error" in answer:
                kind = getattr(errors, answer["error"], ShoalError)
                raise kind(f"rank {rank.number}: {answer['message']}")
            found.append(answer)
        return found

    def send_pass(self, data: bytes) -> None:
        """Hand a packed plan to all ranks."""
        self._send(rank_wire.PASS, data)

    def _send(self, kind: bytes, data: bytes) -> None:
        for rank in self.ranks:
            try:
                rank_wire.send(rank.socket, kind, data)
            except OSError as error:
                raise self.loss(error) from error

    def loss(self, cause: Exception | None) -> EngineLost:
        """Why this engine cannot go on after `cause`: a rank was lost, or rank 0 failed where others did not."""
        self._noticed.wait(NOTICE_S)
        if self.lost is None:
            self._lose(EngineLost(f"a pass failed on rank 0, and the other ranks are out of step: {cause}"))
        assert self.lost is not None
        return self.lost

    def close(self) -> None:
        """End all ranks; waits for them."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.socket.shutdown(socket.SHUT_WR)
        for rank in self.ranks:
            try:
                rank.process.wait(END_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for rank in self.ranks:
            rank.socket.close()
        for call in self._at_end:
            call()

    # ---- watching -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read what ranks send, until they have ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank)
            looked_s = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(LOOK_S):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        self._ended(key.data)
                now_s = time.monotonic()
                if now_s - looked_s > 2 * LOOK_S + 1:  # this process was paused, and so, probably, were they
                    for rank in self.ranks:
                        rank.heard_s = now_s
                looked_s = now_s
                self._check_beats(now_s)

    def _hear(self, rank: Rank) -> bool:
        """Take one frame; False: the rank has ended."""
        frame = rank_wire.receive(rank.socket)
        if frame is None:
            return False
        rank.heard_s = time.monotonic()
        if frame[0] == rank_wire.TELL:
            answer = json.loads(frame[1])
            rank.failure = answer.get("failed", "")
            if not rank.failure:
                rank.answers.put(answer)
        return True

    def _ended(self, rank: Rank) -> None:
        rank.answers.put(None)
        if self._closing or self.lost is not None:
            return
        try:
            code = rank.process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = 0  # it closed its socket and hangs
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        why = f": {rank.failure}" if rank.failure else ""
        fault = -code not in FROM_OUTSIDE
        self._lose(EngineLost(f"rank {rank.number} (process {rank.process.pid}) {how}{why}", fault))

    def _check_beats(self, now_s: float) -> None:
        for rank in self.ranks:
            if now_s - rank.heard_s > self._silence_s and rank.process.poll() is None and self.lost is None:
                silent = f"has given no sign of life for {now_s - rank.heard_s:.0f} s"
                self._lose(EngineLost(f"rank {rank.number} (process {rank.process.pid}) {silent}"))

    def _lose(self, error: EngineLost) -> None:
        """The first loss counts; all ranks are killed, so that nothing waits for them."""
        with self._losing:
            if self.lost is not None:
                return
            self.lost = error
        for rank in self.ranks:
            rank.process.kill()
        self._noticed.set()
        self.on_lost(error)


def _start(number: int, program: str, config: Mapping[str, Any], environ: Mapping[str, str]) -> Rank:
    ours, theirs = socket.socketpair()
    bound = threading.current_thread() is threading.main_thread()  # a thread that ends must not take its ranks along
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environ},
            process_group=0,  # Ctrl-C reaches rank 0 only; not a session of its own, see engine/spare.py
        )
        assert process.stdin is not None
        given = {**config, "rank": number, "socket_fd": theirs.fileno(), "dies_with_parent": bound}
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(given).encode())
    return Rank(number, process, ours, time.monotonic())
