"""A pass in the making, and one in flight: what the scheduler notes on its way from a request to a StepPlan and back.

Knows requests and counts. Decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shoal.core.events import PassEvents
from shoal.core.plan import Ints, StepPlan
from shoal.core.request import Request


class Start(Enum):
    """What came of trying to start a request."""

    STARTED = 1
    FETCHING = 2  # it has its blocks, and some of them are on their way from the host
    NO_ROOM = 3
    NO_BUDGET = 4  # the pass is full


class Draft:
    """A plan in the making: who computes how many positions, as long as things may still change."""

    def __init__(self, budget: int, cap: int = 0, long: bool = False) -> None:
        self.left = budget  # below 0 if a prompt had to be taken whole
        self.cap = cap  # tokens that part short sequences from long ones; 0: all are alike
        self.long = long  # this pass is for the long ones
        self.only: Mapping[Request, int] | None = None  # nobody else may be in it
        self.takes: dict[Request, int] = {}
        self.starting: dict[Request, None] = {}
        self.grown: dict[Request, None] = {}  # who got blocks beyond those it started with
        self.prompts = 0
        self.decodes = 0

    def add(self, request: Request, count: int, prompt: bool) -> None:
        self.takes[request] = count
        self.left -= count
        self.prompts += prompt
        self.decodes += not prompt

    @property
    def picky(self) -> bool:
        """Not everybody may be in this pass."""
        return self.cap > 0 or self.only is not None

    def excludes(self, request: Request) -> bool:
        """It is to run in other passes."""
        if self.only is not None:
            return request not in self.only
        return self.cap > 0 and (len(request.tokens) > self.cap) != self.long

    def remove(self, request: Request) -> None:
        """It lost its blocks after all."""
        self.left += self.takes.pop(request, 0)
        self.starting.pop(request, None)
        self.grown.pop(request, None)


@dataclass(frozen=True, slots=True)
class Places:
    """Who stands in a pass, in order, and where: kept from pass to pass while nobody comes or goes."""

    requests: list[Request]
    ids: list[str]
    generations: list[int]
    rows: Ints
    lives: Ints  # the generations again


@dataclass(frozen=True, slots=True)
class Flight:
    """What the scheduler remembers of a pass until it comes back: parallel lists, in the plan's order."""

    plan: StepPlan
    requests: list[Request]
    generations: list[int]  # of their rows, then
    ends: list[int]  # how far each will have been computed
    samples: list[bool]
    events: PassEvents
    masked: list[tuple[int, Request]]  # (row, request) of those that choose a token and must follow a grammar
