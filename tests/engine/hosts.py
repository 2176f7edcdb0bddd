"""An engine's host on a thread with the fake device, a client that is connected to it, and what tests do with both."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shoal.core.events import PassEvents
from shoal.core.job import Ending, EngineInfo, Job, Refusal, Sink
from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs
from shoal.engine.client import ZmqClient
from shoal.engine.host import Host, InboxClock
from shoal.engine.listen import PrivateListening
from shoal.engine.loop import EngineLoop
from tests.fakes import VOCAB, FakeExecutor, make_scheduler, oracle


class PassCount:
    """An observer: how many records it was shown."""

    def __init__(self) -> None:
        self.records = 0
        self.tokens = 0

    def take(self, events: PassEvents) -> None:
        self.records += 1
        self.tokens += len(events.tokens)


class SlowExecutor(FakeExecutor):
    """Waits before each result, so that a test can act in the middle of a run."""

    gate: threading.Semaphore | None = None

    def result(self) -> Any:
        if self.gate is not None:
            self.gate.acquire(timeout=40)
        return super().result()


class EngineThread:
    """A host on a thread: what the engine's process does, without the process."""

    def __init__(
        self,
        folder: Path,
        epoch: int = 0,
        gate: threading.Semaphore | None = None,
        role: str = "",
        device: type[SlowExecutor] = SlowExecutor,
        **options: Any,
    ) -> None:
        scheduler = make_scheduler(**options)
        executor = device(scheduler.kv.pool.total, scheduler.kv.block_size, options.get("host_blocks", 0))
        executor.gate = gate
        self.gate = gate
        self.listening = PrivateListening(folder)
        self.socket = self.listening.socket
        size, outbox = scheduler.kv.block_size, str(folder) if role == "prefill" else ""
        info = EngineInfo(epoch, 200, VOCAB, 256, "float32", "fake", size, role, outbox)
        self.loop = EngineLoop(scheduler, executor, InboxClock(self.socket), check=True)
        self.observers = [PassCount(), PassCount()]
        self.host = Host(self.loop, self.socket, info, self.observers, {"metrics": lambda: b"passes 1\n"})
        self.listening.bind()
        self.thread = threading.Thread(target=self.host.run, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """As abrupt as a thread can end: no message is sent."""
        self.host.stop()
        if self.gate is not None:
            self.gate.release(8)
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.listening.close()


class Notes(Sink):
    """Keeps all events."""

    def __init__(self, samples: int = 1) -> None:
        self.tokens: dict[int, list[int]] = {sample: [] for sample in range(samples)}
        self.logprobs: list[Logprobs] = []
        self.of_prompt: list[Logprobs] = []
        self.endings: dict[int, Ending] = {}
        self.refusal: Refusal | None = None
        self.was_accepted = 0
        self.flushes = 0
        self.done = asyncio.Event()
        self.grew = asyncio.Event()

    def refused(self, refusal: Refusal) -> None:
        self.refusal = refusal

    def accepted(self) -> None:
        self.was_accepted += 1

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        self.of_prompt += values

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        assert self.was_accepted
        self.tokens[sample].append(token)
        if logprobs:
            self.logprobs.append(logprobs)
        self.grew.set()

    def ended(self, sample: int, ending: Ending) -> None:
        assert sample not in self.endings
        self.endings[sample] = ending

    def flush(self) -> None:
        self.flushes += 1
        if self.refusal or len(self.endings) == len(self.tokens):
            self.done.set()


def make_job(id: str = "a", prompt: list[int] | None = None, **params: Any) -> Job:
    chosen = SamplingParams(**{"max_tokens": 12, **params})
    return Job(id=id, prompt=prompt or [1, 2, 3, 4, 5], params=chosen, seed=7, stop_ids=frozenset({3}))


def expected(job: Job, sample: int = 0) -> list[int]:
    assert job.params.max_tokens is not None
    return oracle(job.prompt, job.params.max_tokens, job.stop_ids, job.seed, sample, job.params.min_tokens)


async def until(holds: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + 50
    while not holds():
        assert time.monotonic() < end_s, f"never: {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(folder: Path, name: str = "front", **options: Any) -> AsyncIterator[ZmqClient]:
    client = ZmqClient(folder, name, **options)
    client.start()
    try:
        await until(lambda: client.info, "the engine answers")
        yield client
    finally:
        await client.close()


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story, 200))
