"""The process of a rank above 0: `python -m shoal.processes.rank`, config in as JSON on standard input, never a pickle.

Loads its part of the model, then answers rank 0 over a socket that it inherits, plan after plan. It ends when that
socket does. Three threads: one computes, one reads the socket, one beats.
"""

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config.engine import EngineConfig
from shoal.errors import ShoalError
from shoal.obs.logs import set_up_logs
from shoal.runner import rank_wire

log = logging.getLogger("shoal.processes.rank")
BEAT_S = 1.0


class Line:
    """The socket to rank 0."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._frames: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def next(self) -> tuple[bytes, bytes]:
        """Wait for the next frame."""
        return self._frames.get()

    def tell(self, values: Mapping[str, Any]) -> None:
        with self._sending:
            rank_wire.tell(self._socket, values)

    def _read(self) -> None:
        while (frame := rank_wire.receive(self._socket)) is not None:
            self._frames.put(frame)
        os._exit(0)  # rank 0 has ended, or wants this process to end; a pass may wait for it forever

    def _beat(self) -> None:
        while True:
            try:
                with self._sending:
                    rank_wire.send(self._socket, rank_wire.BEAT)
            except OSError:
                os._exit(0)
            time.sleep(BEAT_S)


def run(config: Mapping[str, Any], line: Line) -> None:
    """Load the weights, then answer until the socket ends."""
    from shoal.build_follower import RankBuild  # loads torch

    engine = EngineConfig(**config["config"])
    try:
        built = RankBuild(config["rank"], config["size"], Path(config["folder"]), engine)
        line.tell({"ready": True})
        while True:
            kind, data = line.next()
            if kind == rank_wire.PASS:
                built.run(data)
            else:
                line.tell(built.answer(**json.loads(data)))
    except ShoalError as error:  # only questions are refused; rank 0 raises this and ends
        line.tell({"error": type(error).__name__, "message": str(error)})
        line.next()


def main() -> int:
    config = json.load(sys.stdin)
    if config["dies_with_parent"]:
        from shoal.engine.supervise import die_with_parent

        die_with_parent()
    set_up_logs(config["log_level"], config["log_format"])
    line = Line(config["socket_fd"])
    try:
        run(config, line)
    except Exception as error:
        log.exception("rank %d failed", config["rank"])
        line.tell({"failed": f"{type(error).__name__}: {error}"})
    return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
