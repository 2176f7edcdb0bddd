"""Several engines on one virtual clock, each with its own scheduler and simulated device, behind the real router.

The engines report through the same Reporter as in a server. A message takes no time; a pass takes what sim.py says.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.core.request import Request
from shoal.engine.reporter import REPORT_S, Reporter
from shoal.routing.router import Router
from shoal.routing.work import BlockNames, Work
from shoal.sched.scheduler import Scheduler
from tests.sim import Costs, Sim

FRONT = b"front"


class SimulatedEngine(Sim):
    """One engine of a fleet: told the time, and asked when it has something to do."""

    def __init__(self, scheduler: Scheduler, costs: Costs, check: bool) -> None:
        super().__init__(scheduler, costs, check)
        self.reporter = Reporter(scheduler)
        self.reporter.watch(FRONT)
        self.submissions = 0
        self.report_at_s: float | None = 0.0

    def next_s(self) -> float | None:
        """When its pass is done, or its next report is due."""
        known = [self._passes[0][0]] if self._passes else []
        if self.report_at_s is not None:
            known.append(self.report_at_s)
        return min(known, default=None)

    def give(self, request: Request, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)
        self.submissions += 1
        self.reporter.note_submission()
        self.submit(request, now_s)
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Start a pass if none is under way and there is one to compute."""
        self.now_s = max(self.now_s, now_s)
        if not self._passes:
            plan = self.scheduler.plan(self.now_s)
            if plan is not None:
                self._begin(plan)
        if self.report_at_s is None and self.reporter.pending:
            self.report_at_s = self.now_s + REPORT_S

    def advance(self, now_s: float) -> None:
        """Do what is due."""
        if self._passes and self._passes[0][0] <= now_s:
            self._finish()
            self.reporter.note(self.records[-1])
            self.report_at_s = self.now_s if self.report_at_s is None else self.report_at_s


@dataclass(frozen=True)
class Figures:
    """What came of one run."""

    computed: int  # prompt tokens
    ttft_p50_s: float
    ttft_p99_s: float
    seconds: float
    requests: tuple[int, ...]  # by engine
    work: tuple[int, ...]  # tokens computed, by engine

    @property
    def most_loaded(self) -> float:
        """The work of the busiest engine, as a multiple of the mean."""
        return max(self.work) * len(self.work) / sum(self.work)


class Fleet:
    """So many engines, and a router in front of them."""

    def __init__(
        self, count: int, policy: str, make: Callable[[], Scheduler], costs: Costs | None = None, check: bool = False
    ) -> None:
        self.engines = [SimulatedEngine(make(), costs or Costs(), check) for _ in range(count)]
        self.router = Router(policy)
        self.check = check
        for number, engine in enumerate(self.engines):
            self.router.joined(number, engine.scheduler.kv.block_size)
        self._jobs: dict[str, int] = {}  # request id → job number
        self._began: set[str] = set()
        self.now_s = 0.0

    def run(self, arrivals: Iterable[tuple[float, Request]]) -> "Fleet":
        coming = [(at_s, number, request) for number, (at_s, request) in enumerate(arrivals)]
        heapq.heapify(coming)
        while coming or any(not engine.scheduler.idle for engine in self.engines):
            times = [engine.next_s() for engine in self.engines]
            known = [at_s for at_s in (*times, coming[0][0] if coming else None) if at_s is not None]
            self.now_s = max(self.now_s, min(known))
            while coming and coming[0][0] <= self.now_s:
                _, number, request = heapq.heappop(coming)
                self._arrive(number, request)
            for number, engine in enumerate(self.engines):
                self._advance(number, engine)
        return self

    def _arrive(self, number: int, request: Request) -> None:
        names = BlockNames(request.tokens, request.salt, self.router.block_size())
        work = Work(len(request.tokens), request.params.max_tokens, 1, names)
        engine = self.router.place(number, work)
        assert engine is not None
        self._jobs[request.id] = number
        self.engines[engine].give(request, self.now_s)

    def _advance(self, number: int, engine: SimulatedEngine) -> None:
        before = len(engine.records)
        engine.advance(self.now_s)
        for events in engine.records[before:]:
            for id in events.owners:
                if id not in self._began:
                    self._began.add(id)
                    self.router.began(self._jobs[id])
            for end in events.finished:
                self.router.ended(self._jobs.pop(end.id))
        if engine.report_at_s is not None and engine.report_at_s <= self.now_s:
            engine.report_at_s = None
            reports = engine.reporter.reports({FRONT: engine.submissions}, self.now_s)
            for report in reports.values():
                self.router.report(number, report)
        engine.begin(self.now_s)
        if self.check:
            self.router.check()

    def figures(self) -> Figures:
        waits = sorted(seen.ttft_s for engine in self.engines for seen in engine.seen.values())
        outputs = [sum(len(one.owners) for one in engine.records) for engine in self.engines]
        work = tuple(engine.computed for engine in self.engines)
        return Figures(
            sum(work) - sum(outputs) + len(waits),  # the first token of each comes with its prompt
            waits[len(waits) // 2],
            waits[int(0.99 * len(waits))],
            max(engine.now_s for engine in self.engines),
            tuple(len(engine.seen) for engine in self.engines),
            work,
        )
