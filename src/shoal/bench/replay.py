"""Replay: send a trace through an engine in real time and record every request and pass.

Open loop: requests arrive at the trace's times, however slow the engine is. Closed loop: a fixed number of users, each
with one request at a time. A request's output has the trace's length, which the scheduler does not know: it sees
max_tokens, as in a server.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from shoal.bench.live_tape import NoTape
from shoal.bench.record import RunRecord
from shoal.bench.recorder import RunRecorder
from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.plan import SCRIPTED_END
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.workload.traces import TraceRequest


@dataclass
class Replay:
    """One run in progress."""

    loop: EngineLoop
    trace: Sequence[TraceRequest]
    prompts: Sequence[list[int]]
    max_tokens: int
    users: int = 0  # 0: open loop
    tape: NoTape = field(default_factory=NoTape)

    def __post_init__(self) -> None:
        self.recorder = RunRecorder(self.trace, self.tape)
        self._coming = deque(range(len(self.trace)))
        self._open = 0
        self._begun_s = 0.0

    def run(self, bar: "tqdm[Any] | None" = None) -> tuple[float, float]:
        """(seconds, busy seconds) of the whole run."""
        self._begun_s = self.recorder.begun_s = self.loop.clock.now_s()
        while self._coming or not self.loop.idle:
            self._arrive()
            if self.loop.idle:
                self.loop.clock.wait_until(self._begun_s + self.trace[self._coming[0]].at_s)
                continue
            until_s = self._begun_s + self.trace[self._coming[0]].at_s if self._coming and not self.users else None
            ended = self._note(self.loop.step(until_s))
            if bar is not None:
                bar.update(ended)
        return self.loop.clock.now_s() - self._begun_s, self.recorder.busy_s

    def _arrive(self) -> None:
        """Submit every request whose arrival time has passed."""
        now_s = self.loop.clock.now_s() - self._begun_s
        while self._coming:
            number = self._coming[0]
            if (self.users and self._open >= self.users) or (not self.users and self.trace[number].at_s > now_s):
                break
            self._coming.popleft()
            at_s = now_s if self.users else self.trace[number].at_s
            self.recorder.arrived(number, self.trace[number], self._begun_s + at_s)
            self._open += 1
            self.loop.scheduler.submit(self._request(number), self._begun_s + at_s)
        # in a closed loop, a request arrives only after another has ended
        self.loop.scheduler.more_coming = bool(self._coming) and not self.users

    def _request(self, number: int) -> Request:
        one = self.trace[number]
        params = SamplingParams(temperature=0.0, max_tokens=max(self.max_tokens, one.output), ignore_eos=True)
        return Request(
            str(number),
            self.prompts[number],
            params,
            stop_ids=frozenset({SCRIPTED_END}),
            ends_after=one.output,
            tenant=one.tenant,
            salt=one.tenant,
        )

    def _note(self, events: PassEvents) -> int:
        """Record one pass; returns how many requests ended in it."""
        self.recorder.passed(events, self.loop.scheduler)
        self.recorder.delivered(events, events.committed_s)
        self._open -= len(events.finished)
        return len(events.finished)


def replay(
    loop: EngineLoop,
    trace: Sequence[TraceRequest],
    prompts: Sequence[list[int]],
    *,
    preset: str,
    label: str,
    rate: float,
    max_tokens: int,
    users: int = 0,
    bar: "tqdm[Any] | None" = None,
    tape: NoTape | None = None,
) -> RunRecord:
    """The whole run as a record. `tape`: follows the engine already."""
    run = Replay(loop, trace, prompts, max_tokens, users, tape or NoTape())
    seconds, busy_s = run.run(bar)
    slots, found = loop.scheduler.limits.max_num_seqs, (run.recorder.requests, run.recorder.passes)
    return RunRecord(preset, label, rate, {}, slots, *found, seconds, busy_s, live=run.recorder.live())
