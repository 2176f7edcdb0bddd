"""The recorder: what happened in a run, as records of requests and passes.

Owns the records while the run goes on. Is told of arrivals and passes by the driver, live (replay.py) or simulated, and
knows requests by their number in the trace. All times are counted from `begun_s`. A tape keeps the run for the live
page.
"""

from collections.abc import Iterable

from shoal.bench.live_tape import NoTape
from shoal.bench.record import PassRecord, RequestRecord
from shoal.core.events import PassEvents
from shoal.sched.scheduler import Scheduler
from shoal.workload.traces import TraceRequest


class RunRecorder:
    """Keeps every request and every pass. `trace`: requests that are recorded even if they never arrive."""

    def __init__(self, trace: Iterable[TraceRequest] = (), tape: NoTape | None = None) -> None:
        self.requests = [RequestRecord(one.at_s, one.prompt, one.output) for one in trace]
        self.passes: list[PassRecord] = []
        self.busy_s = 0.0
        self.begun_s = 0.0
        self.tape = tape or NoTape()

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None:
        if number == len(self.requests):
            self.requests.append(RequestRecord(0.0, one.prompt, one.output))
        self.requests[number].arrived_s = at_s - self.begun_s
        self.tape.arrived(str(number), at_s)

    def refused(self, number: int, kind: str) -> None:
        self.requests[number].reason = kind

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        """A pass was committed, just now."""
        self.tape.take(events, scheduler)
        planned_s = events.planned_s - self.begun_s
        for id in events.scheduled_ids:
            record = self.requests[int(id)]
            if record.started_s is None:
                record.started_s = planned_s
        if events.scheduled_ids:
            self.busy_s += events.busy_s
            self.passes.append(self._pass(events, scheduler, planned_s))

    def live(self) -> list[str]:
        """The run's lines for the live page, once it has ended."""
        return self.tape.lines(self.begun_s)

    def delivered(self, events: PassEvents, at_s: float) -> None:
        """What the pass reports about requests has reached their clients."""
        now_s = at_s - self.begun_s
        for id in events.owners:
            self.requests[int(id)].token_s.append(now_s)
        for end in events.finished:
            record = self.requests[int(end.id)]
            record.ended_s, record.reason = now_s, end.reason.value
            record.preemptions, record.cached_tokens = end.preemptions, end.cached_tokens

    def _pass(self, events: PassEvents, scheduler: Scheduler, planned_s: float) -> PassRecord:
        size = scheduler.kv.block_size
        rows = zip(events.scheduled_ids, events.scheduled_starts, events.scheduled_counts, strict=True)
        held = events.blocks_held * size
        return PassRecord(
            planned_s=planned_s,
            committed_s=events.committed_s - self.begun_s,
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
            kv_reads=events.kv_reads,
            pairs=events.pairs,
            lines=events.lines,
            vain=events.vain_tokens,
            late=tuple(int(id) for id in events.late_ids),
        )
