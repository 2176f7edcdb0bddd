"""Handoffs as a front sees them: which engine gets a job next, and which engines keep blocks of it.

Tells decode engines of blocks that are in an outbox, and engines that they need not keep them any more. Off while no
engine has a role: then every job stays where it is. Knows jobs by number; owns none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from shoal.disagg.handoff import DECODE, PREFILL, HandoffTable, Release, Stage
from shoal.engine import wire
from shoal.routing.engines import RoutedEngine
from shoal.routing.router import Router
from shoal.routing.work import Work


class Outbox(Protocol):
    """Of an engine that is up, in EngineInfo."""

    @property
    def outbox(self) -> str: ...


class HandoffLink(Protocol):
    """A front's connection to one engine."""

    @property
    def info(self) -> Outbox | None: ...

    def send(self, message: wire.Message) -> bool: ...


class FrontHandoffs:
    """Of one front."""

    def __init__(self, links: Mapping[int, HandoffLink], router: Router) -> None:
        self._links = links
        self._router = router
        self.table = HandoffTable()
        self._intended: dict[int, tuple[RoutedEngine, int]] = {}  # job → its decode engine, and its tokens there

    def place(self, job: int, work: Work, only: int | None) -> int | None:
        """The engine that gets it next, as Router.place."""
        if not self._router.has_roles:
            return self._router.place(job, work, only)
        leaving = self.table.stage(job) is Stage.LEAVING
        target = self.table.target(job) if leaving else None
        if only is None and target in self._router.engines:
            only = target
        self._intend(job, None)
        if not leaving and self._router.has_role(DECODE):
            work = replace(work, most_outputs=1)  # the rest is computed elsewhere
        return self._router.place(job, work, only, DECODE if leaving else PREFILL)

    def going(self, job: int, engine: int, samples: Iterable[int]) -> bool:
        """It is about to be submitted to this engine; returns whether that is to hand it over."""
        if not self._router.has_roles:
            return False
        if self.table.stage(job) is Stage.LEAVING:
            self._send(self.table.arrive(job, engine))
            return False
        leave = self._router.engines[engine].role == PREFILL and self._router.has_role(DECODE)
        if leave:
            self.table.begin(job, engine, samples)
        return leave

    def blocks(self, link: HandoffLink, message: wire.OutboxBlocks, work: Work) -> None:
        """Blocks of a job are in the outbox of this engine: tell a decode engine, which is chosen now."""
        if link.info is None or not link.info.outbox:
            return
        number = self.table.target(message.number)
        if number is None:
            engine = self._router.choose(work, DECODE)
            if engine is None:
                return
            number = engine.number
            self._intend(message.number, engine, work)
        if number in self._links and self.table.send_blocks(message.number, number):
            news = wire.Arriving(message.number, link.info.outbox, message.names, message.slots)
            self._links[number].send(news)

    def _intend(self, job: int, engine: RoutedEngine | None, work: Work | None = None) -> None:
        """Count the work that will go to a decode engine among its load, so that not all goes to the same one."""
        before, tokens = self._intended.pop(job, (None, 0))
        if before is not None:
            before.intended -= tokens
        if engine is not None and work is not None:
            tokens = engine.cost(work, len(work.names))
            engine.intended += tokens
            self._intended[job] = (engine, tokens)

    def handed(self, job: int, sample: int) -> bool:
        """A sample is done on the prefill engine. True if the job is to leave it now."""
        if not self.table.handed(job, sample):
            return False
        self.table.leave(job)
        return True

    def token(self, job: int) -> None:
        """The first token has come from the engine that has it."""
        self._send(self.table.token(job))

    def end(self, job: int) -> None:
        """It has ended, or begins anew on another engine."""
        self._intend(job, None)
        self._send(self.table.end(job))

    def lost(self, engine: int) -> None:
        self.table.lost(engine)

    def _send(self, releases: Iterable[Release]) -> None:
        """At once: the next message may submit the same job again."""
        for one in releases:
            if one.engine in self._links:
                self._links[one.engine].send(wire.Abort([one.job]))
