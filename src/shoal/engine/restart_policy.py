"""What a front does with new jobs while there is no engine: they wait for it, or are refused at once.

Owns the two policies and the limits of such a wait, which are those of the engine's queue. Knows no sockets and no
clock: how many wait, and for how long, are arguments.
"""

from typing import Protocol

from shoal.core.job import Job
from shoal.errors import DeadlinePassed, EngineDown
from shoal.sched.admission import check_room

RETRY_S = 5.0
STARTING = "the engine is starting or being restarted; try again in a few seconds"


class RestartPolicy(Protocol):
    """Decides about jobs that no engine has seen yet."""

    waits: bool  # whether jobs may wait at all

    def check(self, waiting: int, coming: int) -> None:
        """Raise unless a job of so many samples may wait; `waiting`: samples that do already."""

    def check_wait(self, waited_s: float) -> None:
        """Raise DeadlinePassed if a job may not wait that long."""


class WaitForEngine:
    """Jobs wait as they would in the engine's queue.

    >>> WaitForEngine(max_queue=4).check(waiting=3, coming=1)
    """

    waits = True

    def __init__(self, max_queue: int = 0, max_wait_s: float | None = None) -> None:
        """0 and None: no limit."""
        self.max_queue = max_queue
        self.max_wait_s = max_wait_s

    def check(self, waiting: int, coming: int) -> None:
        check_room(self.max_queue, waiting, coming, lambda: RETRY_S)

    def check_wait(self, waited_s: float) -> None:
        if self.max_wait_s is not None and waited_s >= self.max_wait_s:
            raise DeadlinePassed(
                f"not started after {waited_s:.1f} s, since the engine is being restarted, and the longest wait is "
                f"{self.max_wait_s:g} s; try again in a few seconds, or raise --max-wait",
                RETRY_S,
            )


class RefuseAtOnce:
    """Jobs do not wait: the client, or a load balancer, should try another server."""

    waits = False

    def check(self, waiting: int, coming: int) -> None:
        raise EngineDown(STARTING, RETRY_S)

    def check_wait(self, waited_s: float) -> None: ...


def check_timeout(job: Job, waited_s: float) -> None:
    """Raise DeadlinePassed if the job's own time is over."""
    if job.timeout_s is not None and waited_s >= job.timeout_s:
        raise DeadlinePassed(
            f"no token after {waited_s:.1f} s, since the engine is being restarted, and its timeout is "
            f"{job.timeout_s:g} s; raise timeout, or try again in a few seconds",
            RETRY_S,
        )
