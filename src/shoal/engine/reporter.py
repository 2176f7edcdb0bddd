"""The reporter: what an engine tells fronts that choose among several engines.

Owns what each of them has been told: the names of the blocks that prompts can hit here (all of them once, then
changes), the work that is queued, and what was computed for each tenant. Reads the scheduler's tables. Knows no
sockets and no other engines.
"""

from collections import deque
from collections.abc import Mapping

from shoal.core.events import PassEvents
from shoal.core.report import EngineReport, join_names
from shoal.core.request import Reason, Request
from shoal.kv.prefix import NetChanges
from shoal.sched.scheduler import Scheduler

REPORT_S = 0.02  # shortest time between two reports
LOAD_S = 0.2  # longest time without one while requests run
LOOK_S = 1e-4  # per request, between two looks at all of them, each of which takes a microsecond or two
SERVICE_S = 0.5  # between two reports of the tenants' service
UNKNOWN_OUTPUT = 64  # tokens of an answer, until some have been seen
SEEN = 256  # answers that are remembered


class Reporter:
    """Reports about one scheduler. Costs nothing until the first front watches."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.watchers: dict[bytes, bool] = {}  # front → whether it has had a snapshot
        self._changes = NetChanges()
        self._outputs: deque[int] = deque(maxlen=SEEN)
        self._cached: dict[Request, int] = {}  # waiting request → blocks of it that are cached
        self._news = False  # requests came or ended since the last report
        self._reported_s = self._served_s = 0.0
        self._queued, self._counted = 0, dict[bytes, int]()  # work, and the submissions that it includes
        self._measured_s = float("-inf")
        self._untold = False  # tenants were served since the last report of that
        self._services = 0  # how many reports had one
        self._without_service = True  # the last one was empty, or there was none

    def watch(self, front: bytes) -> None:
        """This front wants reports, and has had none."""
        if not self.watchers:
            self.scheduler.kv.index.journal = self._changes
            self.scheduler.policies.order.take_service()  # counts from now on
        self.watchers[front] = False
        self._news = True

    def forget(self, front: bytes) -> None:
        self.watchers.pop(front, None)

    def missed(self, front: bytes) -> None:
        """A report could not be sent to this front: it needs a snapshot."""
        if front in self.watchers:
            self.watchers[front] = False

    def note_submission(self) -> None:
        self._news = True

    def note(self, events: PassEvents) -> None:
        self._untold = self._untold or bool(events.scheduled_ids and self.scheduler.policies.order.counts)
        for end in events.finished:
            self._news = True
            if end.reason in (Reason.STOP, Reason.LENGTH):
                self._outputs.append(end.outputs)

    @property
    def pending(self) -> bool:
        """Whether there will be something to report soon."""
        return bool(self.watchers) and (self._news or self._untold or bool(self._changes))

    def reports(self, submissions: Mapping[bytes, int], now_s: float) -> dict[bytes, EngineReport]:
        """What each watching front is to be told now; `submissions`: how many came from each since its Hello."""
        late = self.scheduler.running and now_s - self._reported_s >= LOAD_S
        service_is_due = self._untold and now_s - self._served_s >= SERVICE_S
        due = self._news or self._changes or late or service_is_due or not all(self.watchers.values())
        if not self.watchers or not due or now_s - self._reported_s < REPORT_S:
            return {}
        self._reported_s, self._news = now_s, False
        added, evicted = map(join_names, self._changes.take())
        everything: bytes | None = None
        service = self._service(now_s)
        self._measure(submissions, now_s)
        tables = self.scheduler.tables
        wait_s = tables.admission.pace.wait_s(len(tables.waiting), now_s) if len(tables.waiting) else 0.0
        found = {}
        for front, has_snapshot in self.watchers.items():
            if not has_snapshot and everything is None:
                everything = join_names(self.scheduler.kv.index.names()) if self.scheduler.kv.keep else b""
            found[front] = EngineReport(
                self._queued,
                self.expected_output(),
                wait_s,
                self._counted.get(front, 0),
                not has_snapshot,
                added if has_snapshot else everything or b"",
                evicted if has_snapshot else b"",
                service,
                self._services,
            )
            self.watchers[front] = True
        return found

    # ---- load -----------------------------------------------------------------------------------------------------

    def _measure(self, submissions: Mapping[bytes, int], now_s: float) -> None:
        """Add up the queued work, unless it was done so recently that doing it again would hold up the passes."""
        if now_s - self._measured_s >= LOOK_S * len(self.scheduler.requests):
            self._measured_s = now_s
            self._queued, self._counted = self.queued_tokens(), dict(submissions)

    def expected_output(self) -> int:
        """Tokens of an answer: the mean of those seen lately."""
        return round(sum(self._outputs) / len(self._outputs)) if self._outputs else UNKNOWN_OUTPUT

    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet, and outputs that are expected, of all requests."""
        expected = self.expected_output()
        total = 0
        for request in self.scheduler.running:
            total += max(0, len(request.tokens) - request.computed) + outputs_left(request, expected)
        size = self.scheduler.kv.block_size
        cached: dict[Request, int] = {}
        for request in self.scheduler.waiting:
            cached[request] = hit = self._hit(request)
            total += max(1, len(request.tokens) - hit * size) + outputs_left(request, expected)
        self._cached = cached
        return total

    def _hit(self, request: Request) -> int:
        """How many of its first blocks are cached. Goes on where the last look ended: what was evicted since is found
        when the request starts."""
        kv = self.scheduler.kv
        if not kv.keep:
            return 0
        hit = self._cached.get(request, 0)
        return hit + kv.count_hits(request.tokens, request.salt, request.names, first=hit)

    # ---- tenants --------------------------------------------------------------------------------------------------

    def _service(self, now_s: float) -> dict[str, float] | None:
        if now_s - self._served_s < SERVICE_S:
            return None
        self._served_s, self._untold = now_s, False
        service = self.scheduler.policies.order.take_service()
        if not service and self._without_service:
            return None
        self._without_service = not service
        self._services += 1
        return service


def outputs_left(request: Request, expected: int) -> int:
    """How many tokens it will probably still generate; one that is longer than most goes on for a while."""
    left = request.max_tokens - request.outputs
    return max(0, min(left, max(expected - request.outputs, expected // 4)))
