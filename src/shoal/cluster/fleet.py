"""The fleet: the engines of a deployment on several machines, as many as are wanted, each restarted when it dies.

    slot    a place for one engine on the cluster, with a number that it keeps: placing → starting → up → draining
    tick    ask every slot what became of its engine, do what follows, and write the members file if it changed

Placing and restarting a *slot* (a node died) is the cluster's task; starting the *engine* in a slot is the fleet's, so
that epochs, pauses and faults are decided in one place, for all nodes. Owns slots and their policy. Knows the cluster
by a port: no ray, no sockets.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shoal.cluster.autoscale import Autoscaler, EngineLoad
from shoal.cluster.holder import HolderStatus
from shoal.core.clock import Clock, WallClock
from shoal.engine.members import Member, Membership
from shoal.engine.supervise import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_FAILED_STARTS, USERS_MISTAKE
from shoal.errors import BadConfig, EngineError

log = logging.getLogger(__name__)

LONG_PLACING_S = 15.0  # after which the log says that a slot waits for room on the cluster


class RemoteHolder(Protocol):
    """An EngineHolder on some node. Calls fail with ConnectionError where it has died, until the cluster has placed it
    again."""

    async def status(self) -> HolderStatus | None:
        """None: no answer yet."""

    async def start(self, config: Mapping[str, Any]) -> None: ...

    async def drain(self) -> None: ...

    def release(self) -> None:
        """Give up the place; an engine that runs there is killed."""


@dataclass
class Slot:
    """A place for one engine."""

    number: int
    holder: RemoteHolder
    placed_s: float  # when the place was asked for, or lost
    member: Member | None = None  # while its engine is up
    draining: bool = False  # its engine ends when its requests are elsewhere, and the slot with it
    restarting: bool = False  # its engine ends likewise, and is started again
    failures: int = 0  # starts in a row that did not come up
    start_at_s: float = 0.0
    after_fault: bool = False
    handled: int = -1  # epoch whose end has been dealt with
    told_waiting: bool = False
    load: EngineLoad | None = None  # as last reported


@dataclass
class Fleet:
    """Keeps the wanted number of engines running."""

    place: Callable[[int], RemoteHolder]  # a holder for this number, somewhere on the cluster
    config: Callable[[int, int, bool], Mapping[str, Any]]  # of an engine: number, epoch, whether a fault ended the last
    folder: Path
    scaler: Autoscaler
    needs: str = "room"  # what one engine needs of a node, in words
    clock: Clock = field(default_factory=WallClock)
    slots: dict[int, Slot] = field(default_factory=dict)
    was_up: bool = False

    def __post_init__(self) -> None:
        self._starts: dict[int, int] = dict(Membership.read(self.folder).starts or {})
        self._written: Membership | None = None
        self._to_restart: list[int] = []  # numbers, by a rolling restart

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(slot.member for _, slot in sorted(self.slots.items()) if slot.member is not None)

    async def tick(self) -> None:
        self._fit()
        await asyncio.gather(*(self._tend(slot) for slot in list(self.slots.values())))
        self._go_on_restarting()
        self.was_up = self.was_up or bool(self.members)
        membership = Membership(self.members, dict(self._starts))
        if membership != self._written:
            membership.write(self.folder)
            self._written = membership

    def scale(self, loads: Mapping[int, EngineLoad]) -> int:
        """Decide how many engines there should be, from what those that are up have reported."""
        for number, load in loads.items():
            if number in self.slots:
                self.slots[number].load = load
        active = [slot for slot in self.slots.values() if not slot.draining]
        up = [slot for slot in active if slot.member is not None]
        known = [slot.load for slot in up if slot.load is not None]
        before = self.scaler.wanted
        wanted = self.scaler.decide(known, len(active) - len(known), self.clock.now_s())
        if wanted != before:
            wait_s = self.scaler.predicted_wait_s(known)
            log.info("scaling from %d to %d engines: a new request would wait %.1f s", before, wanted, wait_s)
        return wanted

    def stop(self) -> None:
        for slot in self.slots.values():
            slot.holder.release()
        self.slots.clear()
        Membership((), dict(self._starts)).write(self.folder)

    def restart_all(self) -> None:
        """Restart the engines one by one: the next when the one before it is up again."""
        self._to_restart = sorted(self.slots)
        log.info("restarting %d engines, one after the other", len(self._to_restart))

    def _go_on_restarting(self) -> None:
        slots = self.slots.values()
        if self._to_restart and all(slot.member is not None and not slot.restarting for slot in slots):
            slot = self.slots.get(self._to_restart.pop(0))
            if slot is not None and not slot.draining:
                slot.restarting = True

    # ---- how many ---------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Add slots up to the wanted number; mark those beyond it as draining."""
        active = [slot for slot in self.slots.values() if not slot.draining]
        for _ in range(self.scaler.wanted - len(active)):
            number = next(one for one in range(len(self.slots) + 1) if one not in self.slots)
            self.slots[number] = Slot(number, self.place(number), self.clock.now_s())
        for slot in self._spare(active, len(active) - self.scaler.wanted):
            slot.draining = True
            log.info("engine %d is no longer needed; its requests go on elsewhere", slot.number)

    @staticmethod
    def _spare(active: Sequence[Slot], count: int) -> list[Slot]:
        """The ones that cost least to remove: not up yet, then the emptiest, then the newest."""

        def cost(slot: Slot) -> tuple[bool, float, int]:
            return slot.member is not None, slot.load.fill if slot.load else 0.0, -slot.number

        return sorted(active, key=cost)[: max(0, count)]

    # ---- one slot ---------------------------------------------------------------------------------------------------

    async def _tend(self, slot: Slot) -> None:
        try:
            status = await slot.holder.status()
        except ConnectionError as error:
            self._lost(slot, error)
            return
        if status is None:
            self._wait_for_place(slot)
            return
        slot.told_waiting = False
        if status.state == "up":
            self._came_up(slot, status)
            if slot.draining or slot.restarting:
                await self._quietly(slot.holder.drain())
            return
        slot.member = slot.load = None
        if slot.draining:
            self._release(slot)
            return
        if status.state == "ended" and status.epoch != slot.handled:
            self._ended(slot, status)
        is_there = self.slots.get(slot.number) is slot
        if is_there and status.state != "starting" and self.clock.now_s() >= slot.start_at_s:
            await self._start(slot)

    async def _start(self, slot: Slot) -> None:
        epoch = self._starts.get(slot.number, 0)
        self._starts[slot.number] = epoch + 1
        await self._quietly(slot.holder.start(self.config(slot.number, epoch, slot.after_fault)))

    @staticmethod
    async def _quietly(call: Any) -> None:
        """A place that is lost meanwhile shows in the next status."""
        with contextlib.suppress(ConnectionError):
            await call

    def _came_up(self, slot: Slot, status: HolderStatus) -> None:
        member = Member(slot.number, status.address, status.server_key)
        if member != slot.member:
            log.info("engine %d is up at %s", slot.number, status.address)
        slot.member, slot.failures = member, 0

    def _ended(self, slot: Slot, status: HolderStatus) -> None:
        slot.handled = status.epoch
        if slot.restarting:
            slot.restarting = False
            log.info("engine %d has ended, as asked, and is started again", slot.number)
            return
        if status.code == USERS_MISTAKE and not status.was_up and not self.was_up:
            raise BadConfig(status.refusal or f"engine {slot.number} refused its config; the reason is in the log")
        if status.was_up:
            slot.after_fault = status.fault
        slot.failures = 0 if status.was_up else slot.failures + 1
        if slot.failures >= MOST_FAILED_STARTS:
            if not self.was_up:
                raise EngineError(f"engine {slot.number} failed to start {slot.failures} times in a row")
            log.error("engine %d failed to start %d times in a row; another place is tried", slot.number, slot.failures)
            self._release(slot)
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**slot.failures) if slot.failures else 0.0
        slot.start_at_s = self.clock.now_s() + pause_s
        log.error("engine %d ended with code %d; restarting it in %.1f s", slot.number, status.code, pause_s)

    def _lost(self, slot: Slot, error: ConnectionError) -> None:
        """Its place has died, with its engine; the cluster looks for another."""
        if slot.member is not None:
            log.warning("engine %d and its place are lost: %s", slot.number, error)
            slot.placed_s = self.clock.now_s()
        slot.member = slot.load = None
        if slot.draining:
            self._release(slot)

    def _wait_for_place(self, slot: Slot) -> None:
        """No answer: a member is busy, and others wait for room on the cluster."""
        if slot.member is not None:
            return
        if slot.draining:
            self._release(slot)
        elif self.clock.now_s() - slot.placed_s > LONG_PLACING_S and not slot.told_waiting:
            slot.told_waiting = True
            log.warning("engine %d waits for a node with %s", slot.number, self.needs)

    def _release(self, slot: Slot) -> None:
        slot.holder.release()
        del self.slots[slot.number]
        if slot.draining:
            log.info("engine %d was removed", slot.number)
