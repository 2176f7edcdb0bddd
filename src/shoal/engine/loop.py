"""The loop: keeps the executor busy with up to `depth` passes and hands out what happened.

Plans pass k+1 while k computes (depth 2), as late as possible: right after k-1 was committed. Only this
loop and the clients read a clock. Knows no scheduling.

A pass in which grammars choose needs the tokens of the pass before it. Its forward begins as any other; it is sampled
once they are committed, and the masks are computed while the forward runs. Nothing more is begun until then.

    device   forward k │ sample k │ forward k+1      │ sample k+1 │ forward k+2
    host       plan k+1 …         │ commit k, masks ─┘ plan k+2 …

A pass with drafts is planned when none is in flight, and the device waits for it. So it begins as soon as the pass
before it is committed, before what happened in that one is handed out.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence

from shoal.core.clock import Clock
from shoal.core.events import PassEvents
from shoal.core.plan import StepResult
from shoal.core.ports import Executor
from shoal.core.request import Request
from shoal.errors import EngineError, EngineLost
from shoal.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

QUIET_S = 0.5  # without a pass, before spare work is done: the next request may have to wait for a step of it


class EngineLoop:
    """Drives one scheduler and one executor; call step() until idle."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        depth: int = 2,
        check: bool = False,
        beside: Sequence[Executor] = (),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.depth = depth
        self.check = check  # run the integrity check after every pass
        self.open_ended = False  # whether more requests will come is not known, as in a server
        self._beside = beside  # executors that the scheduler's drafters use, closed with this one
        self._unsampled = False  # the newest pass was begun, but waits for its masks
        self._owed = 0  # passes that were sampled and whose result was not taken
        self._broken: Exception | None = None  # what the executor raised, for the next step to report
        # called before a pass begins, with its request ids and whether they are suspects
        self.on_begin: Callable[[Sequence[str], bool], None] | None = None
        self.spare: Iterator[object] | None = None  # work for times without requests, some milliseconds a step
        self._computed_s = -math.inf  # when the last pass was committed

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request, self.clock.now_s())

    def submit_all(self, requests: Sequence[Request], resumed: bool = False, leave: bool = False) -> None:
        """All or none of them."""
        self.scheduler.submit_all(requests, self.clock.now_s(), resumed, leave)

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def finish_at(self, request_id: str, outputs: int) -> bool:
        return self.scheduler.finish_at(request_id, outputs)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self, until_s: float | None = None) -> PassEvents:
        """Begin passes until `depth` are in flight, then wait for the oldest and commit it.

        With nothing to compute it waits for the time when there may be (a batching window), but not beyond `until_s`.
        """
        if self._broken is not None:
            return self._fail(self._broken)
        fault = self._begin()
        if fault is not None:
            return self._fail(fault)
        if not self.scheduler.in_flight:
            if not self.scheduler.news and not self._spare():
                self._wait(until_s)
            return self.scheduler.take_events(self.clock.now_s())
        self.scheduler.meanwhile()
        try:
            result = self._result()
        except Exception as error:
            return self._fail(error)
        self._computed_s = self.clock.now_s()
        events = self.scheduler.commit(result, self._computed_s)
        if self.depth > 1 and not self.scheduler.in_flight:
            self._broken = self._begin()  # if so: this pass did not break, and is reported first
        else:
            try:
                self._sample()
            except Exception as error:
                self._broken = error
        if self.check:
            self.scheduler.check()
        return events

    def _begin(self) -> Exception | None:
        """Begin passes until `depth` are in flight; returns what the executor raised, if it did."""
        while self.scheduler.in_flight < self.depth and not self._unsampled:
            plan = self.scheduler.plan(self.clock.now_s())
            if plan is None:
                break
            if self.on_begin is not None:
                self.on_begin(self.scheduler.newest_ids, bool(self.scheduler.suspects))
            try:
                self.executor.forward(plan)
                self._unsampled = True
                self._sample()
            except Exception as error:
                return error
        return None

    def _spare(self) -> bool:
        """Do some of the spare work, if the scheduler has been idle for a while; False: there was none to do."""
        if self.spare is None or not self.scheduler.idle or self.clock.now_s() < self._computed_s + QUIET_S:
            return False
        try:
            next(self.spare)
        except StopIteration:
            self.spare = None
        except Exception:
            log.warning("work for idle times failed, and is left", exc_info=True)
            self.spare = None
        return self.spare is not None

    def _sample(self) -> None:
        """Let the pass just begun choose its tokens, unless its masks must wait for an earlier one."""
        if self._unsampled and not self.scheduler.masks_wait:
            masks = self.scheduler.masks()
            self._unsampled = False
            self.executor.sample(masks)
            self._owed += 1

    def _result(self) -> StepResult:
        try:
            result = self.executor.result()
        except Exception:  # no other: interrupted, it is still owed
            self._owed -= 1
            raise
        self._owed -= 1
        return result

    def _wait(self, until_s: float | None) -> None:
        wake_s = self.scheduler.wake_s(self.clock.now_s())
        more_may_come = self.scheduler.more_coming or self.open_ended
        if wake_s is None and self.scheduler.requests and not more_may_come:
            raise EngineError("requests wait but nothing can be planned; this is a bug in the scheduler")
        if until_s is not None and self.spare is not None:
            until_s = min(until_s, self._computed_s + QUIET_S)
        known = [at_s for at_s in (wake_s, until_s) if at_s is not None]
        if known:
            self.clock.wait_until(min(known))

    def _fail(self, error: Exception) -> PassEvents:
        """The executor raised. The requests of the passes in flight become suspects and are tried again apart from the
        others; only one that breaks a pass alone ends with this error.

        Those passes come back first, so that none of them writes into blocks that were given to others. An executor
        that cannot go on takes the engine with it.
        """
        if isinstance(error, EngineLost):
            raise error
        log.error("a pass failed", exc_info=error)
        self._broken = None
        try:
            if self._unsampled:  # its forward runs; its tokens will be dropped, so it needs no masks
                self._unsampled = False
                self.executor.sample(None)
                self._owed += 1
        except Exception:
            log.exception("a pass beside the failed one failed too")
        while self._owed:
            try:
                self._result()
            except Exception:
                log.exception("a pass beside the failed one failed too")
        return self.scheduler.fail(f"{type(error).__name__}: {error}", self.clock.now_s())

    def close(self) -> None:
        for executor in self._beside:
            executor.close()
        self.executor.close()
