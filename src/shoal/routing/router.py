"""The router: on which engine each job runs.

Owns the engines that are up and the placements of jobs. A job is on one engine that is up, or on none: then it waits.
When an engine leaves, its jobs are on none, and whoever holds them places them anew. Knows jobs and engines by number;
what a job is stays with its owner.
"""

from collections.abc import Mapping

from shoal.core.names import pick
from shoal.core.report import EngineReport
from shoal.routing.engines import Placement, RoutedEngine
from shoal.routing.policies import ROUTING, RoutingPolicy
from shoal.routing.work import Work


class Router:
    """Places jobs on engines.

    >>> from shoal.routing.work import BlockNames
    >>> router = Router("least-load")
    >>> work = Work(tokens=100, most_outputs=10, samples=1, names=BlockNames([1] * 100, "", 16))
    >>> router.place(1, work)  # None: no engine is up
    >>> router.joined(0, block_size=16)
    >>> router.joined(1, block_size=16)
    >>> [router.place(job, work) for job in (1, 2, 3)]
    [0, 1, 0]
    """

    def __init__(self, policy: str | RoutingPolicy = "prefix") -> None:
        self.policy: RoutingPolicy = pick(ROUTING, policy, "routing")() if isinstance(policy, str) else policy
        self._engines: dict[int, RoutedEngine] = {}
        self._placements: dict[int, Placement] = {}  # by job

    @property
    def engines(self) -> Mapping[int, RoutedEngine]:
        """Those that are up, by number."""
        return self._engines

    def block_size(self) -> int:
        """Of the engines' blocks; 0 while none is up. All engines of a server have the same."""
        return next((one.block_size for one in self._engines.values()), 0)

    # ---- engines --------------------------------------------------------------------------------------------------

    @property
    def has_roles(self) -> bool:
        return any(one.role for one in self._engines.values())

    def has_role(self, role: str) -> bool:
        """Whether an engine of this role is up."""
        return any(one.role == role for one in self._engines.values())

    def joined(self, number: int, block_size: int = 0, role: str = "") -> None:
        """An engine is up, and has no jobs of ours. One that was up is a new one."""
        self.left(number)
        self._engines[number] = RoutedEngine(number, block_size, role)

    def left(self, number: int) -> None:
        """An engine is down, or takes no more jobs: its jobs are on none."""
        if self._engines.pop(number, None) is not None:
            for job in [job for job, placement in self._placements.items() if placement.engine == number]:
                del self._placements[job]

    def report(self, number: int, report: EngineReport) -> None:
        engine = self._engines.get(number)
        if engine is not None:
            engine.take(report)

    # ---- jobs -----------------------------------------------------------------------------------------------------

    def choose(self, work: Work, role: str) -> RoutedEngine | None:
        """The best engine of this role for a job that will be placed later; None if none is up."""
        allowed = [one for one in self._engines.values() if one.role == role]
        return self.policy.choose(work, allowed) if allowed else None

    def place(self, job: int, work: Work, only: int | None = None, role: str = "") -> int | None:
        """Choose an engine for a job that is on none, and count it there; None if no engine is up.

        `only`: the one engine that may get it. `role`: of the engines that should get it; if none of them is up, any.
        """
        assert job not in self._placements, f"job {job} is placed already"
        allowed = [one for one in self._engines.values() if only is None or one.number == only]
        if not allowed:
            return None
        allowed = [one for one in allowed if one.role == role] or allowed
        engine = allowed[0] if len(allowed) == 1 else self.policy.choose(work, allowed)
        names = self.policy.uses_names and len(self._engines) > 1
        self._placements[job] = engine.add(work, engine.hits(work.names) if names else 0, names)
        return engine.number

    def unsent(self, job: int) -> None:
        """The job that was placed last could not be sent: it is on no engine."""
        placement = self._placements.pop(job)
        self._engines[placement.engine].take_back(placement)

    def began(self, job: int) -> None:
        """Its first token has come: its prompt is computed."""
        placement = self._placements.get(job)
        if placement is not None:
            self._engines[placement.engine].began(placement)

    def ended(self, job: int) -> None:
        """It has ended, or leaves its engine. Fine if it is on none."""
        placement = self._placements.pop(job, None)
        if placement is not None:
            self._engines[placement.engine].remove(placement)

    def engine_of(self, job: int) -> int | None:
        placement = self._placements.get(job)
        return None if placement is None else placement.engine

    def check(self) -> None:
        """Every job is on an engine that is up, and all counts are right."""
        for number, engine in self._engines.items():
            engine.check(one for one in self._placements.values() if one.engine == number)
        assert {one.engine for one in self._placements.values()} <= self._engines.keys(), "a job on no live engine"
