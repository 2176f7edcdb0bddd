"""Handoffs as an engine's host sees them: jobs that leave for another engine, and jobs that arrive from one.

Owns the submissions that wait for their blocks. Costs nothing while no job leaves or arrives. Keys are (front, number
of the job). Knows no sockets.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.core.grammar import Grammar
from shoal.core.job import Job
from shoal.core.request import Request
from shoal.disagg.handoff import Departures, Receptions
from shoal.engine import wire
from shoal.sched.scheduler import Scheduler

JobKey: TypeAlias = tuple[bytes, int]


@dataclass(frozen=True)
class EarlyJob:
    """A job that was submitted before all its blocks were here."""

    front: bytes
    message: wire.Submit
    job: Job
    grammars: Mapping[int, Grammar] | None
    finishes: list[wire.FinishAt] = field(default_factory=list)  # stop strings that were found meanwhile


class HostHandoffs:
    """Of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._departures = Departures(scheduler.kv)
        self._receptions = Receptions(scheduler.kv)
        self._early: dict[JobKey, EarlyJob] = {}

    # ---- jobs that arrive

    def announce(self, front: bytes, message: wire.Arriving) -> None:
        """Copy the blocks of a job that will come. A block for each running request, and a few more, stay free."""
        names = wire.split_digests(message.names)
        if len(names) == len(message.slots):
            spare = len(self._scheduler.running) + self._scheduler.kv.pool.total // 100
            self._receptions.announce((front, message.number), names, message.slots, message.peer, spare)

    def hold_back(self, front: bytes, message: wire.Submit, job: Job, grammars: Mapping[int, Grammar] | None) -> bool:
        """Whether this job has to wait for its blocks; then ready() returns it later."""
        if not self._receptions.waits((front, message.number)):
            return False
        self._early[front, message.number] = EarlyJob(front, message, job, grammars)
        return True

    def finish_later(self, front: bytes, message: wire.FinishAt) -> bool:
        """Whether this is about a job that has to wait for its blocks; then it is kept with it."""
        early = self._early.get((front, message.key // wire.SAMPLES))
        if early is not None:
            early.finishes.append(message)
        return early is not None

    def ready(self) -> list[EarlyJob]:
        """Jobs that need not wait any more."""
        if not self._early:
            return []
        ready = [key for key in self._early if not self._receptions.waits(key)]
        return [self._early.pop(key) for key in ready]

    def started(self, front: bytes, number: int) -> None:
        """A sample of it runs, and holds the blocks."""
        self._receptions.forget((front, number))

    # ---- jobs that leave

    def begin(self, front: bytes, number: int, requests: Sequence[Request]) -> None:
        """These end here after one token, and their blocks go to the outbox."""
        self._departures.begin((front, number), requests)

    def blocks(self) -> list[tuple[bytes, wire.OutboxBlocks]]:
        """After each pass: what went to the outbox, for each front."""
        return [
            (front, wire.OutboxBlocks(number, b"".join(one.names), list(one.slots)))
            for one in self._departures.step()
            for front, number in [_key(one.job)]
        ]

    # ---- both

    def forget(self, front: bytes, number: int) -> None:
        """The front has aborted it, or needs nothing of it here any more."""
        key = (front, number)
        self._early.pop(key, None)
        self._receptions.forget(key)
        self._departures.release(key)

    def forget_front(self, front: bytes) -> None:
        """It is gone, or has no jobs here."""
        for key in map(_key, {*self._receptions.jobs, *self._departures.jobs}):
            if key[0] == front:
                self.forget(*key)

    def check(self) -> None:
        self._departures.check()


def _key(job: Hashable) -> JobKey:
    assert isinstance(job, tuple), "the key of a job is its front and its number"
    return job
