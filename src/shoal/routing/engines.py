"""One engine as the router knows it: its load, and the blocks that a prompt can hit there.

Owns the arithmetic of load: what the engine reported, and submissions that its last report did not count yet. Blocks
are known by name: those the engine published, exactly, and those of prompts that were sent there and are not computed
yet, which it will have. Knows no other engines.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.core.report import EngineReport, split_names
from shoal.routing.work import BlockNames, Work

UNKNOWN_OUTPUT = 64  # tokens of an answer, until an engine has seen some


@dataclass(slots=True)
class Placement:
    """A job on an engine."""

    engine: int
    submission: int  # number among those sent there
    names: tuple[bytes, ...]  # of its prompt, counted among the engine's promised ones; (): no more


class RoutedEngine:
    """An engine that is up."""

    def __init__(self, number: int, block_size: int, role: str = "") -> None:
        self.number = number
        self.block_size = block_size
        self.role = role  # "": any job may be placed here
        self.intended = 0  # tokens of jobs that will be placed here
        self.names: set[bytes] = set()  # published: prompts hit these
        self.promised: Counter[bytes] = Counter()  # of prompts that are on their way or being computed
        self.jobs = 0  # that the router has placed here
        self.placed = 0  # how many it has placed in all
        self.queued = 0  # tokens, as reported
        self.expected = UNKNOWN_OUTPUT
        self.wait_s = 0.0
        self._unreported: dict[int, int] = {}  # submission → its tokens, until a report counts it or it has ended
        self._submissions = 0
        self._unreported_tokens = 0
        self._began: list[Placement] = []  # their names may be promised until the next report

    @property
    def load(self) -> int:
        """Tokens that it has to compute before it is idle, about."""
        return self.queued + self._unreported_tokens + self.intended

    def hits(self, names: BlockNames | Sequence[bytes]) -> int:
        """How many of the first blocks it holds, or will hold when the prompts that were sent there are computed."""
        count, known, promised = 0, self.names, self.promised
        while count < len(names) and (names[count] in known or names[count] in promised):
            count += 1
        return count

    def cost(self, work: Work, hits: int) -> int:
        """Tokens that it would have to compute for this work, with so many blocks cached."""
        expected = self.expected if work.most_outputs is None else min(self.expected, work.most_outputs)
        return work.tokens - hits * self.block_size + expected * work.samples

    def add(self, work: Work, hits: int, promises: bool) -> Placement:
        """A job is sent there."""
        tokens = self.cost(work, hits)
        self._submissions += 1
        self._unreported[self._submissions] = tokens
        self._unreported_tokens += tokens
        self.jobs += 1
        self.placed += 1
        names = tuple(work.names[number] for number in range(len(work.names))) if promises else ()
        self.promised.update(names)
        return Placement(self.number, self._submissions, names)

    def take_back(self, placement: Placement) -> None:
        """The last job could not be sent."""
        self._submissions -= 1
        self.placed -= 1
        self.remove(placement)

    def remove(self, placement: Placement) -> None:
        """A job has ended, or went elsewhere."""
        self.jobs -= 1
        self._unreported_tokens -= self._unreported.pop(placement.submission, 0)
        self._release(placement)

    def began(self, placement: Placement) -> None:
        """Its prompt is computed: the next report has its blocks."""
        if placement.names:
            self._began.append(placement)

    def take(self, report: EngineReport) -> None:
        self.queued = max(0, report.queued_tokens)
        self.expected = report.expected_output or UNKNOWN_OUTPUT
        self.wait_s = report.wait_s
        if report.snapshot:
            self.names.clear()
        self.names.difference_update(split_names(report.evicted))
        self.names.update(split_names(report.added))
        while self._unreported and (first := next(iter(self._unreported))) <= report.submissions:
            self._unreported_tokens -= self._unreported.pop(first)
        for placement in self._began:
            self._release(placement)
        self._began.clear()

    def _release(self, placement: Placement) -> None:
        """Its prompt's blocks are published, or will never be."""
        for name in placement.names:
            if self.promised[name] == 1:
                del self.promised[name]
            else:
                self.promised[name] -= 1
        placement.names = ()

    def check(self, placements: Iterable[Placement]) -> None:
        """The counts are those of the jobs placed here."""
        here = list(placements)
        assert self.jobs == len(here), "jobs are counted wrongly"
        assert self.promised == Counter(name for one in here for name in one.names), "promised names drifted"
        assert self._unreported_tokens == sum(self._unreported.values()), "unreported tokens drifted"
        assert self.load >= 0, "a load below zero"
