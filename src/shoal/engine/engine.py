"""The engine: begin(now) plans a pass, finish(result, now) takes what came of it.

Several passes may be between their begin and their finish; they are finished in the order they were begun.
Knows no torch, no clock, no executor: whoever drives it (a loop, a test, the simulator) brings those.
"""

from collections.abc import Sequence

from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Reason, Request
from shoal.sched.scheduler import Scheduler


class Engine:
    """What a driver may ask of the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def submit(self, request: Request, now_s: float, resumed: bool = False) -> None:
        """Queue a request; raises BadRequest if it can never be served, Rejected if it is refused for the moment."""
        self.scheduler.submit(request, now_s, resumed)

    def submit_all(self, requests: Sequence[Request], now_s: float, resumed: bool = False) -> None:
        """Queue all (the n samples of a job) or, if this raises, none of them.

        `resumed`: an engine before this one had accepted them; no limit on load refuses them again.
        """
        self.scheduler.submit_all(requests, now_s, resumed)

    def abort(self, request_id: str) -> bool:
        """The client is gone. False if the request had ended already."""
        return self.scheduler.finish(request_id, Reason.ABORT)

    def finish_at(self, request_id: str, outputs: int) -> bool:
        """The front found a stop string in output token number `outputs` (counted from 1): the answer ends there."""
        return self.scheduler.finish(request_id, Reason.STOP, at_output=outputs)

    def expire(self, now_s: float) -> None:
        """End those whose time is over; begin() does this by itself."""
        self.scheduler.expire(now_s)

    def begin(self, now_s: float) -> StepPlan | None:
        """The next pass; None if nothing can be computed before another pass is finished."""
        return self.scheduler.plan(now_s)

    @property
    def newest_ids(self) -> list[str]:
        """Who is in the newest pass in flight."""
        return self.scheduler.flights[-1].events.scheduled_ids

    @property
    def masks_wait(self) -> bool:
        """Whether the newest pass must be sampled later: a grammar in it misses a token of an earlier pass."""
        return self.scheduler.masks_wait

    def masks(self) -> LateMasks | None:
        """What grammars allow the newest pass to say, as late as possible; None: everything."""
        return self.scheduler.masks()

    def finish(self, result: StepResult, now_s: float) -> PassEvents:
        """Commit the oldest pass in flight."""
        return self.scheduler.commit(result, now_s)

    def fail(self, error: str, now_s: float) -> PassEvents:
        """The executor broke: all requests of the passes in flight end with this error, nobody else does."""
        return self.scheduler.fail_flights(error, now_s)

    def rest(self, now_s: float) -> PassEvents:
        """What happened (aborts, mostly) while no pass was in flight."""
        return self.scheduler.take_between(now_s)

    def wake_s(self, now_s: float) -> float | None:
        """When begin() may have a plan, or somebody's time is over, although nothing has happened; None: never."""
        return self.scheduler.wake_s(now_s)

    @property
    def news(self) -> bool:
        """rest() would tell that somebody ended or was refused: do not sleep on it."""
        return self.scheduler.news

    @property
    def in_flight(self) -> int:
        return len(self.scheduler.flights)

    @property
    def idle(self) -> bool:
        """Nobody runs, nobody waits, nothing is in flight."""
        return self.scheduler.idle
