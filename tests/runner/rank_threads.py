"""Ranks as threads of this process: real parts of the model, real plans over the wire, real gloo between them.

A start takes milliseconds, where processes take seconds to load torch. Processes are tested in test_ranks.py and in
tests/story_server/test_parallel.py.
"""

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import build_ranks, errors
from shoal.build_follower import RankBuild
from shoal.config.engine import EngineConfig
from shoal.runner import rank_wire
from shoal.runner.ranks import Ranks


class ThreadRank:
    """One rank; what it raises is kept."""

    def __init__(self, number: int, config: Mapping[str, Any]) -> None:
        self.frames: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.number, self.config = number, config
        self.built: RankBuild | None = None
        self.failure: BaseException | None = None
        self.plans: list[bytes] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            config = EngineConfig(**json.loads(json.dumps(self.config["config"])))
            folder = Path(self.config["folder"])
            self.built = built = RankBuild(self.number, self.config["size"], folder, config)
            self.answers.put({})
            while True:
                kind, data = self.frames.get()
                if kind == rank_wire.PASS:
                    self.plans.append(data)
                    built.run(data)
                elif data:
                    self.answers.put(built.answer(**json.loads(data)))
                else:
                    return
        except errors.ShoalError as error:
            self.answers.put({"error": type(error).__name__, "message": str(error)})
        except BaseException as error:
            self.failure = error


class ThreadRanks(Ranks):
    """As Ranks, in threads."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], environs: Sequence[Mapping[str, str]]) -> None:
        self.size, self.lost = len(configs) + 1, None
        self.threads = [ThreadRank(number, config) for number, config in enumerate(configs, 1)]
        self._calls: list[Callable[[], None]] = []
        made.append(self)

    def at_end(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def answers(self) -> list[dict[str, Any]]:
        found = [rank.answers.get(timeout=60) for rank in self.threads]
        for rank, answer in zip(self.threads, found, strict=True):
            if "error" in answer:
                raise getattr(errors, answer["error"])(f"rank {rank.number}: {answer['message']}")
        return found

    def _send(self, kind: bytes, data: bytes) -> None:
        for rank in self.threads:
            rank.frames.put((kind, data))

    def loss(self, cause: Exception | None) -> errors.EngineLost:
        failures = [rank.failure for rank in self.threads if rank.failure is not None]
        return errors.EngineLost(f"rank 0: {cause!r}; the others: {failures}")

    def close(self) -> None:
        self._send(rank_wire.ASK, b"")
        for rank in self.threads:
            rank.thread.join(30)
            assert not rank.thread.is_alive(), "a rank waits for the others"
        for call in self._calls:
            call()
        self._calls.clear()


made: list[ThreadRanks] = []  # by the tests that use it


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines built in this test have threads for ranks; all compute with one thread each."""
    monkeypatch.setattr(build_ranks, "Ranks", ThreadRanks)
    made.clear()
    torch.set_num_threads(1)
