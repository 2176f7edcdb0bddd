"""Victims: preempting a running request, in the way that the preemption policy chooses.

Owns nothing. Knows which requests may be preempted; the order policy picks among them.
"""

from shoal.core.events import PassEvents, Preempted
from shoal.core.request import Request, State
from shoal.sched.endings import Endings
from shoal.sched.pass_builder import PassBuilder
from shoal.sched.preempt import How
from shoal.sched.tables import Blocks, SharedTables


class Victims:
    """Preempts requests."""

    def __init__(self, tables: SharedTables, endings: Endings) -> None:
        self._tables = tables
        self._endings = endings

    def candidates(self) -> list[Request]:
        """Running requests below their preemption limit. One at its limit already holds every block it can need."""
        most = self._tables.max_preemptions
        return [request for request in self._tables.running if request.preemptions < most]

    def preempt(self, victim: Request, batch: PassBuilder, events: PassEvents) -> None:
        """Take a request out of a pass, of its row and of its blocks. requeue() brings it back to the queue."""
        how = self._tables.policies.preempt.choose(victim, self._tables.kv)
        batch.remove(victim)
        batch.lost = True
        events.preempted.append(Preempted(victim.id, victim.computed, how.value))
        if how is How.DROP:
            self._endings.evict(victim)
            return
        self._tables.vacate(victim, State.WAITING, Blocks.SWAP if how is How.SWAP else Blocks.RELEASE)
        victim.preemptions += 1
        batch.victims.append(victim)

    def requeue(self, batch: PassBuilder) -> None:
        """The queue is not being read: let the victims back in."""
        while batch.victims:
            self._tables.enqueue(batch.victims.pop(0))
