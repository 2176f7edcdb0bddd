"""Endings: how a request ends, whatever ends it.

Owns nothing. Takes the request out of all tables, gives back what it holds and records how it ended.
"""

import math

from shoal.core.events import Finished, PassEvents, Rejection
from shoal.core.request import Reason, Request, State
from shoal.errors import DeadlinePassed, Evicted, PromiseBroken, ShoalError
from shoal.sched.tables import Blocks, SharedTables

EVICTED = "evicted: KV memory ran out; ask again, or raise --kv-memory"


class Endings:
    """Ends requests."""

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables

    def end(
        self,
        request: Request,
        reason: Reason,
        events: PassEvents,
        stop_token: int | None = None,
        error: str = "",
        kind: type[ShoalError] | None = None,
    ) -> None:
        """Finish a request and give back all it holds; `events` is the record of the moment. `kind`: of the error, if
        the engine is not to blame for it."""
        tables = self._tables
        out = tables.groups.record(request, events)
        if request.state is State.RUNNING:
            self._leave_running(request, reason)
        else:
            if request.fetching is not None:
                tables.stop_fetching(request)
            tables.unpark(request)
            tables.dequeue(request)
            request.move(State.FINISHED)
        request.reason, request.error = reason, error
        del tables.requests[request.id]
        self._forget(request)
        kept_ttft, kept_itl = kept_promises(request, tables.now_s)
        out.finished.append(
            Finished(
                request.id,
                reason,
                request.outputs,
                request.preemptions,
                request.cached_tokens,
                stop_token,
                error,
                request.promise.name,
                kept_ttft,
                kept_itl,
                "" if kind is None else kind.__name__,
            )
        )

    def _leave_running(self, request: Request, reason: Reason) -> None:
        tables = self._tables
        failed = reason is Reason.ERROR
        if not failed:
            tables.kv.publish(request.holding, request.tokens, min(request.computed, len(request.tokens)))
        tables.vacate(request, State.FINISHED, Blocks.DISCARD if failed else Blocks.RELEASE)
        tables.policies.layout.ended(len(tables.running))

    def _forget(self, request: Request) -> None:
        tables, policies = self._tables, self._tables.policies
        policies.lanes.left(request)
        tables.groups.leave(request)
        tables.suspects.forget(request)
        tables.deadlines.drop(request)
        by_itself = request.reason in (Reason.STOP, Reason.LENGTH)
        if by_itself:
            policies.memory.learn(request)
        policies.order.left(request, by_itself)
        policies.drafts.ended(request, by_itself)

    def expire(self, request: Request, now_s: float) -> None:
        """End a request whose time is over. Output that it has is its answer; without any it is rejected."""
        tables = self._tables
        if request.outputs:
            self.end(request, Reason.TIMEOUT, tables.between)
            return
        deadlines = tables.deadlines
        message = deadlines.why(request, now_s)
        kind = PromiseBroken if deadlines.lost_promise(request, now_s) else DeadlinePassed
        after_s = tables.admission.pace.wait_s(len(tables.waiting), now_s)
        self._reject(request, Rejection(request.id, kind.__name__, message, after_s))

    def evict(self, request: Request) -> None:
        """End a request that is preempted for good: with an error if it has output, else as rejected."""
        request.preemptions += 1
        if request.outputs:
            self.end(request, Reason.ERROR, self._tables.between, error=EVICTED, kind=Evicted)
        else:
            self._reject(request, Rejection(request.id, Evicted.__name__, EVICTED))

    def _reject(self, request: Request, rejection: Rejection) -> None:
        between = self._tables.between
        self._tables.groups.record(request, between).rejected.append(rejection)
        self.end(request, Reason.REJECTED, between, error=rejection.message)


def kept_promises(request: Request, now_s: float) -> tuple[bool | None, bool | None]:
    """Whether its promises were kept: the first token's, and the others' on average. None: there was none."""
    promise, first_s, gaps = request.promise, request.first_s, request.outputs - 1
    if request.reason is Reason.ABORT:
        return None, None
    elsewhere = math.isnan(first_s) and request.outputs > 0  # it had its first token before it came here
    ttft = None if elsewhere or promise.ttft_s == math.inf else first_s - request.arrived_s <= promise.ttft_s
    # without any token, NaN: not kept
    if promise.itl_s == math.inf or gaps < 1 or math.isnan(first_s):
        return ttft, None
    return ttft, (now_s - first_s) / gaps <= promise.itl_s
