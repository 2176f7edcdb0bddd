"""The loop: keeps the executor busy with up to `depth` passes and hands out what happened.

Plans pass k+1 while k computes (depth 2), as late as possible: right after k-1 was committed. It is the only place
in this room, with the clients, that reads a clock. Knows no scheduling.
"""

import logging

from shoal.core.clock import Clock
from shoal.core.events import PassEvents
from shoal.core.ports import Executor
from shoal.core.request import Request
from shoal.engine.engine import Engine
from shoal.errors import EngineError

log = logging.getLogger(__name__)


class EngineLoop:
    """Drives one engine with one executor; call turn() until idle."""

    def __init__(self, engine: Engine, executor: Executor, clock: Clock, depth: int = 2, check: bool = False) -> None:
        self.engine = engine
        self.executor = executor
        self.clock = clock
        self.depth = depth
        self.check = check  # run the integrity check after every pass

    def submit(self, request: Request) -> None:
        self.engine.submit(request, self.clock.now_s())

    def abort(self, request_id: str) -> bool:
        return self.engine.abort(request_id)

    def finish_at(self, request_id: str, outputs: int) -> bool:
        return self.engine.finish_at(request_id, outputs)

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def turn(self, until_s: float | None = None) -> PassEvents:
        """Begin passes until `depth` are in flight, then wait for the oldest and commit it.

        With nothing to compute it waits for the time when there may be (a batching window), but not beyond `until_s`.
        """
        while self.engine.in_flight < self.depth:
            plan = self.engine.begin(self.clock.now_s())
            if plan is None:
                break
            try:
                self.executor.forward(plan)
                self.executor.sample(None)
            except Exception as error:
                return self._fail(error, handed_over=self.engine.in_flight - 1)
        if not self.engine.in_flight:
            self._wait(until_s)
            return self.engine.rest(self.clock.now_s())
        try:
            result = self.executor.result()
        except Exception as error:
            return self._fail(error, handed_over=self.engine.in_flight - 1)
        events = self.engine.finish(result, self.clock.now_s())
        if self.check:
            self.engine.scheduler.check()
        return events

    def _wait(self, until_s: float | None) -> None:
        wake_s = self.engine.wake_s(self.clock.now_s())
        scheduler = self.engine.scheduler
        if wake_s is None and scheduler.requests and not scheduler.more_coming:
            raise EngineError("requests wait but nothing can be planned; this is a bug in the scheduler")
        known = [at_s for at_s in (wake_s, until_s) if at_s is not None]
        if known:
            self.clock.wait_until(min(known))

    def _fail(self, error: Exception, handed_over: int) -> PassEvents:
        """Whatever the executor raised, it ends the requests of the passes in flight and no others.

        Those passes come back first, so that none of them writes into blocks that were given to others.
        """
        log.error("a pass failed", exc_info=error)
        for _ in range(handed_over):
            try:
                self.executor.result()
            except Exception:
                log.exception("a pass beside the failed one failed too")
        return self.engine.fail(f"{type(error).__name__}: {error}", self.clock.now_s())

    def close(self) -> None:
        self.executor.close()
