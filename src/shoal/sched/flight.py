"""A pass in flight: what the scheduler remembers of it from its plan to its commit. Decides nothing."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from shoal.core.drafts import Draft
from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan
from shoal.core.request import Request
from shoal.sched.pass_builder import PassRows
from shoal.sched.steady import Steady

NO_DRAFTS: Mapping[Request, Draft] = MappingProxyType({})


class Flight(NamedTuple):
    """What the scheduler remembers of a pass until it comes back: parallel lists, in the plan's order."""

    plan: StepPlan
    rows: PassRows
    ends: list[int]  # how far each will have been computed if every draft token in flight is accepted
    draws: list[int]
    events: PassEvents
    masked: list[tuple[int, Request]]  # (line of its first draw, request) of those that draw under a grammar
    steady: Steady | None = None  # its first rows, if they were carried on
    departures: int = 0  # how often a request had lost its row, then
    ahead: bool = False  # it was planned while another was in flight
    drafts: Mapping[Request, Draft] = NO_DRAFTS  # that it verifies
    drafted: int = 0  # tokens of those
    rejected: list[int] | None = None  # each request's `rejected`, then; None: no draft tokens were in flight

    @property
    def requests(self) -> list[Request]:
        return self.rows.requests

    def lines_of(self, request: Request) -> int:
        """How many tokens a request that draws in it may get."""
        return 1 + len(self.drafts[request].tokens) if request in self.drafts else 1
