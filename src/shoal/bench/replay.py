"""Replay: send a trace through an engine in real time and record every request and pass.

Open loop: requests arrive at the trace's times, however slow the engine is. Closed loop: a fixed number of users, each
with one request at a time. A request's output has the trace's length, which the scheduler does not know: it sees
max_tokens, as in a server.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from shoal.bench.record import PassRecord, RequestRecord, RunRecord
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

    def __post_init__(self) -> None:
        self.records = [RequestRecord(one.at_s, one.prompt, one.output) for one in self.trace]
        self.passes: list[PassRecord] = []
        self.busy_s = 0.0
        self._coming = deque(range(len(self.trace)))
        self._open = 0
        self._begun_s = 0.0

    def run(self, bar: "tqdm[Any] | None" = None) -> tuple[float, float]:
        """(seconds, busy seconds) of the whole run."""
        self._begun_s = self.loop.clock.now_s()
        while self._coming or not self.loop.idle:
            self._arrive()
            if self.loop.idle:
                self.loop.clock.wait_until(self._begun_s + self.trace[self._coming[0]].at_s)
                continue
            until_s = self._begun_s + self.trace[self._coming[0]].at_s if self._coming and not self.users else None
            ended = self._note(self.loop.step(until_s))
            if bar is not None:
                bar.update(ended)
        return self.loop.clock.now_s() - self._begun_s, self.busy_s

    def _arrive(self) -> None:
        """Submit every request whose arrival time has passed."""
        now_s = self.loop.clock.now_s() - self._begun_s
        while self._coming:
            number = self._coming[0]
            if (self.users and self._open >= self.users) or (not self.users and self.trace[number].at_s > now_s):
                break
            self._coming.popleft()
            at_s = now_s if self.users else self.trace[number].at_s
            self.records[number].arrived_s = at_s
            self._open += 1
            self.loop.scheduler.submit(self._request(number), self._begun_s + at_s)
        # in a closed loop, a request arrives only after another has ended
        self.loop.scheduler.more_coming = bool(self._coming) and not self.users

    def _request(self, number: int) -> Request:
        one = self.trace[number]
        params = SamplingParams(temperature=0.0, max_tokens=max(self.max_tokens, one.output), ignore_eos=True)
        return Request(
            str(number), self.prompts[number], params, stop_ids=frozenset({SCRIPTED_END}), ends_after=one.output
        )

    def _note(self, events: PassEvents) -> int:
        """Record one pass; returns how many requests ended in it."""
        planned_s, now_s = events.planned_s - self._begun_s, events.committed_s - self._begun_s
        for id in events.scheduled_ids:
            record = self.records[int(id)]
            if record.started_s is None:
                record.started_s = planned_s
        for id in events.owners:
            self.records[int(id)].token_s.append(now_s)
        for end in events.finished:
            record = self.records[int(end.id)]
            record.ended_s, record.reason = now_s, end.reason.value
            record.preemptions, record.cached_tokens = end.preemptions, end.cached_tokens
            self._open -= 1
        if events.scheduled_ids:
            self.busy_s += events.busy_s
            self.passes.append(self._pass(events, planned_s, now_s))
        return len(events.finished)

    def _pass(self, events: PassEvents, planned_s: float, now_s: float) -> PassRecord:
        scheduler = self.loop.scheduler
        size = scheduler.kv.block_size
        rows = zip(events.scheduled_ids, events.scheduled_starts, events.scheduled_counts, strict=True)
        held = events.blocks_held * size
        return PassRecord(
            planned_s=planned_s,
            committed_s=now_s,
            rows=tuple((int(id), start, count) for id, start, count in rows),
            useful=events.computed_tokens,
            padded=events.padded_tokens,
            recomputed=events.recomputed_tokens,
            dead_rows=events.dead_rows,
            budget=max(events.budget_tokens, events.computed_tokens + events.padded_tokens),
            waiting=events.waiting,
            running=len(events.scheduled_ids),
            kv_held=held,
            kv_used=min(held, sum(request.computed for request in scheduler.running)),
            kv_total=events.blocks_total * size,
        )


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
) -> RunRecord:
    """The whole run as a record."""
    run = Replay(loop, trace, prompts, max_tokens, users)
    seconds, busy_s = run.run(bar)
    slots = loop.scheduler.limits.max_num_seqs
    return RunRecord(preset, label, rate, {}, slots, run.records, run.passes, seconds, busy_s)
