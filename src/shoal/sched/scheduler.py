"""The scheduler: plan(now) and commit(result, now).

The public face of this room. Requests come in here (submit), are ended from outside here (finish, expire) and are
computed between plan() and commit(). Combines the axes (batching, prefill, budget, memory, order, lanes, preemption)
over one KV manager. Knows no torch and no clock; the simulator runs these same objects.

Several passes may be in flight: pass k+1 is planned while k computes. So a plan counts on what k will have done, and
they are committed in the order they were planned.

    submit ─► tables ◄─ planner (+ admitter, victims) ─► StepPlan
                ▲                                           │
                └─── committer (+ endings) ◄─ StepResult ◄──┘ executor
"""

from collections.abc import Sequence

import numpy as np

from shoal.core.events import PassEvents, Rejection
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Reason, Request, State
from shoal.errors import BadRequest, EngineError, PromiseBroken, Rejected
from shoal.kv.manager import KVManager
from shoal.sched.admission import Limits, Rules
from shoal.sched.admit import Admitter
from shoal.sched.committer import Committer
from shoal.sched.endings import Endings
from shoal.sched.integrity import check
from shoal.sched.planner import Planner
from shoal.sched.policies import Policies
from shoal.sched.tables import SharedTables
from shoal.sched.victims import Victims

RESUMED_FIRST = 2**40  # requests that another engine had accepted go before all that have only arrived


class Scheduler:
    """Decides what every pass computes."""

    def __init__(self, limits: Limits, kv: KVManager, policies: Policies, rules: Rules | None = None) -> None:
        self.tables = tables = SharedTables(limits, kv, policies, rules or Rules())
        self._endings = Endings(tables)
        victims = Victims(tables, self._endings)
        self._admitter = Admitter(tables, victims)
        self.planner = Planner(tables, self._admitter, victims)
        self.committer = Committer(tables, self._endings)
        self._arrivals = 0
        # for readers: these objects never change
        self.limits, self.kv, self.policies = limits, kv, policies
        self.requests, self.running, self.waiting = tables.requests, tables.running, tables.waiting
        self.flights, self.suspects = tables.flights, tables.suspects

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float, resumed: bool = False) -> None:
        """Queue a request; raises BadRequest if it can never be served, Rejected if it is refused for the moment."""
        self.submit_all([request], now_s, resumed)

    def submit_all(self, requests: Sequence[Request], now_s: float, resumed: bool = False, leave: bool = False) -> None:
        """Queue all of them (the n samples of a job) or, if this raises, none: then nothing has moved.

        `resumed`: an engine that is gone had accepted them, so no limit on load refuses them again. They may bring the
        output tokens that they have so far. `leave`: they end here after one token more, as HANDED, unless that token
        is their last anyway.
        """
        tables = self.tables
        self._check_ids([request.id for request in requests])
        tables.advance(now_s)
        try:
            max_tokens = [tables.admission.check(request) for request in requests]
            for request in requests:
                request.promise = tables.policies.tiers.of(request.tier)
            if not resumed:
                if requests:
                    self._check_promise(requests[0])
                tables.admission.check_queue(tables.waiting.newcomers, len(requests), now_s)
        except (BadRequest, Rejected) as error:
            kind, after_s = type(error).__name__, error.retry_after_s if isinstance(error, Rejected) else None
            tier = requests[0].promise.name if isinstance(error, PromiseBroken) else ""
            tables.between.rejected += [Rejection(request.id, kind, str(error), after_s, tier) for request in requests]
            raise
        for request, most in zip(requests, max_tokens, strict=True):
            request.leaves = leave and most > request.outputs + 1
            request.allow(request.outputs + 1 if request.leaves else most)
            self._enqueue(request, now_s, resumed)

    def _check_ids(self, ids: list[str]) -> None:
        for request_id in ids:
            if request_id in self.requests or ids.count(request_id) > 1:
                raise EngineError(f"request id {request_id!r} is in use; ids must be unique while a request runs")

    def _check_promise(self, request: Request) -> None:
        """Raise PromiseBroken if its tier refuses requests that will be late, and it will be."""
        promise, tables = request.promise, self.tables
        if promise.reject_late and self.policies.steps.known:
            soonest_s = self._soonest_s(request)
            if request.waited_s + soonest_s > promise.ttft_s:
                wait_s = soonest_s + tables.admission.pace.wait_s(self.waiting.newcomers, tables.now_s)
                waited = f" after a wait of {request.waited_s:.1f} s" if request.waited_s else ""
                raise PromiseBroken(
                    f"tier {promise.name} promises a first token within {promise.ttft_s:g} s, and this prompt of "
                    f"{len(request.tokens)} tokens takes {soonest_s:.2f} s even if it starts now{waited} (estimated "
                    f"wait {wait_s:.1f} s); shorten it, or ask for another tier",
                    wait_s,
                )

    def _soonest_s(self, request: Request) -> float:
        """How long until its first token, if it starts now beside the running requests."""
        read = sum(one.planned for one in self.running)
        budget = self.limits.max_num_batched_tokens
        return self.policies.steps.soonest_s(len(request.tokens), budget, len(self.running), read)

    def _enqueue(self, request: Request, now_s: float, resumed: bool) -> None:
        tables, policies = self.tables, self.policies
        request.resumed = resumed
        request.order = self._arrivals - RESUMED_FIRST if resumed else self._arrivals
        request.arrived_s = now_s - request.waited_s
        tables.between.arrived.append(request.id)
        tables.between.arrived_s.append(request.arrived_s)
        tables.between.requests.append(request)
        if request.timeout_s is not None:
            request.deadline_s = request.arrived_s + request.timeout_s
        if request.outputs:  # its prompt's logprobs were sent before its first token
            request.needs_prompt_logprobs = False
        self._arrivals += 1
        tables.requests[request.id] = request
        if request.promise.reject_late and not request.outputs:
            soonest_s = self._soonest_s(request) if policies.steps.known else 0.0
            request.start_by_s = request.queued_s + max(0.0, request.promise.ttft_s - soonest_s)
        policies.lanes.arrived(request)
        policies.order.arrived(request)
        tables.enqueue(request)
        tables.deadlines.arm(request)

    def expire(self, now_s: float) -> None:
        """End requests whose time is over, whether they wait, run or are in flight. plan() begins with this."""
        self.tables.advance(now_s)
        for request in self.tables.deadlines.due(now_s):
            self._endings.expire(request, now_s)

    def finish(self, request_id: str, reason: Reason, at_output: int | None = None, error: str = "") -> bool:
        """End a request from outside, cut after `at_output` tokens if given. False if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if at_output is not None:
            del request.tokens[request.prompt_len + at_output :]
        self._endings.end(request, reason, self.tables.between, error=error)
        return True

    def abort(self, request_id: str) -> bool:
        """End a request whose client is gone. False if it has ended already."""
        return self.finish(request_id, Reason.ABORT)

    def finish_at(self, request_id: str, outputs: int) -> bool:
        """End a request at output token number `outputs` (from 1), where the front found a stop string."""
        return self.finish(request_id, Reason.STOP, at_output=outputs)

    # ---- passes ---------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next pass, or None if there is nothing to compute before another pass comes back."""
        self.expire(now_s)
        return self.planner.plan(now_s)

    def meanwhile(self) -> None:
        """To be called before the oldest pass in flight is waited for: what need not be done while no pass computes."""
        self.policies.drafts.meanwhile()

    def commit(self, result: StepResult, now_s: float) -> PassEvents:
        """Take what came of the oldest pass in flight, and return its record."""
        return self.committer.commit(result, now_s)

    def fail(self, error: str, now_s: float) -> PassEvents:
        """The executor raised, and the passes in flight are lost. Their requests become suspects and are tried again
        apart from the others; only one that breaks a pass alone ends with this error.
        """
        return self.committer.fail(error, now_s)

    def take_events(self, now_s: float) -> PassEvents:
        """What happened since the last record (aborts, mostly), when no pass is in flight to carry it."""
        return self.committer.seal(PassEvents(-1), now_s)

    @property
    def news(self) -> bool:
        """A request ended or was refused, and no record has reported it yet."""
        between = self.tables.between
        return bool(between.finished or between.rejected or self.tables.groups.news)

    @property
    def in_flight(self) -> int:
        """Passes between plan() and commit()."""
        return len(self.flights)

    @property
    def newest_ids(self) -> list[str]:
        """The requests in the newest pass in flight."""
        return self.flights[-1].events.scheduled_ids

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and no pass or copy is in flight."""
        return not self.requests and not self.flights and not self.kv.transfers

    @property
    def more_coming(self) -> bool:
        """The driver knows of requests that are still to arrive; a static group waits for them."""
        return self._admitter.more_coming

    @more_coming.setter
    def more_coming(self, coming: bool) -> None:
        self._admitter.more_coming = coming

    def wake_s(self, now_s: float) -> float | None:
        """When to plan again although nothing has happened; None: not before something does."""
        known = (self.policies.batching.wake_s(self._admitter.door(now_s)), self.tables.deadlines.next_s())
        return min((at_s for at_s in known if at_s is not None), default=None)

    # ---- grammars -------------------------------------------------------------------------------------------------

    @property
    def masks_wait(self) -> bool:
        """Whether the newest pass cannot be sampled yet: a grammar in it misses a token of an earlier pass."""
        newest = self.flights[-1]
        return any(
            request.pending > newest.lines_of(request) and request.state is not State.FINISHED
            for _, request in newest.masked
        )

    def masks(self) -> LateMasks | None:
        """Which tokens grammars allow in the newest pass; None: all. To be asked as late as possible."""
        newest = self.flights[-1]
        masked = [one for one in newest.masked if one[1].state is not State.FINISHED]
        if not masked:
            return None
        lines = [line + place for line, request in masked for place in range(newest.lines_of(request))]
        allowed = np.zeros((len(lines), -(-self.limits.vocab_size // 32)), dtype=np.uint32)
        first = 0
        for _, request in masked:
            assert request.grammar is not None
            count = newest.lines_of(request)
            assert request.pending == count, f"{request} would be masked without its last token"
            if count == 1:
                request.grammar.fill(allowed[first])
            else:
                request.grammar.fill_ahead(allowed[first : first + count], newest.drafts[request].tokens)
            first += count
        return LateMasks(np.array(lines, dtype=np.int64), allowed)

    def check(self) -> None:
        """Every invariant that must hold between two calls."""
        check(self.tables)
