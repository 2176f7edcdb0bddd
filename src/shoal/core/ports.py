"""The seams: what the engine asks of the rooms it must not know.

Each port has at least one real implementation and one fake in the tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.grammar import Grammar
from shoal.core.job import EngineInfo, GrammarSpec, Job, Sink
from shoal.core.plan import Ints, StepPlan, StepResult
from shoal.core.report import EngineStatus

# a sample's grammar, at the point that its output so far has reached
MakeGrammar: TypeAlias = Callable[[GrammarSpec, Sequence[int]], Grammar]


@dataclass(frozen=True, slots=True)
class LateMasks:
    """Which tokens grammars allow in one pass, known only after its forward has begun.

    A pass has one line per draw: its rows in the plan's order, and the draws of each in order. Lines that are not named
    may draw any token. Bit b of word w stands for token 32 w + b.
    """

    lines: Ints  # some of the pass's lines, ascending
    allowed: npt.NDArray[np.uint32]  # packed bits, one row of words for each of these lines

    def among(self, lines: Ints) -> "LateMasks | None":
        """The masks of some lines of the pass (ascending), as if these were all of its lines; None if they have none.

        >>> masks = LateMasks(np.array([1, 4]), np.array([[8], [9]], dtype=np.uint32))
        >>> masks.among(np.array([0, 4])).lines.tolist(), masks.among(np.array([0, 4])).allowed.tolist()
        ([1], [[9]])
        """
        _, here, kept = np.intersect1d(lines, self.lines, assume_unique=True, return_indices=True)
        return LateMasks(here, self.allowed[kept]) if len(here) else None


class Executor(Protocol):
    """Computes passes, in the order they were handed over, at most a few in flight.

    forward() may change the row tables at once, while earlier passes still compute: so a row must not be started
    again before the last pass that names it has come back. KV blocks are read and written strictly in pass order.
    """

    def forward(self, plan: StepPlan) -> None:
        """Begin a pass; returns as soon as it can."""

    def sample(self, masks: LateMasks | None) -> None:
        """Choose the tokens of the pass just begun; no other is begun in between."""

    def result(self) -> StepResult:
        """Wait for the oldest pass not yet taken. Raises what the pass raised."""

    def close(self) -> None:
        """Give everything back; no further calls."""


class BlockOutbox(Protocol):
    """Host blocks that other engines read. A reader trusts a block only while that is labelled with the name that it
    looks for: so a label is cleared before its block is overwritten, and set after."""

    memory: Any  # bytes, [blocks, bytes of a block]: a numpy array, or a tensor on the device
    address: str  # where engines find it

    def clear(self, block: int) -> None: ...

    def label(self, block: int, name: bytes) -> None: ...

    def close(self) -> None: ...


class BlockReader(Protocol):
    """Reads the outboxes of other engines."""

    def read(self, peer: str, blocks: Sequence[int], names: Sequence[bytes], take: Callable[[int, Any], None]) -> None:
        """Call take(number, bytes) for these blocks, in order: the bytes of one or more of them, [blocks, …], and which
        the first of them is. Waits a while for those that are not there yet.

        Raises TransferFailed, and then what was taken is not to be trusted.
        """

    def close(self) -> None:
        """End all reading, of other threads, too."""


class EngineClient(Protocol):
    """An engine as its fronts see it, in this process or another. All calls are made on the front's event loop."""

    @property
    def info(self) -> EngineInfo | None:
        """None while the engine is down."""

    @property
    def last_info(self) -> EngineInfo | None:
        """The same, kept while the engine is down; None before the first one is up."""

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """All of them, up or down; info is that of any one that is up."""

    @property
    def accepting(self) -> bool:
        """Whether submit() takes jobs: the engine is up, or jobs wait for it."""

    @property
    def trouble(self) -> str:
        """The message for requests that are not accepted."""

    @property
    def jobs(self) -> int:
        """How many of this front's jobs have not ended."""

    def submit(self, job: Job, sink: Sink) -> None:
        """Ask for a job. Raises EngineDown if there is no engine and jobs do not wait for one, QueueFull if too many
        wait; every other answer comes through the sink.
        """

    def abort(self, job_id: str) -> None:
        """The client is gone; its sink gets no further call. Fine if the job has ended."""

    def finish_at(self, job_id: str, sample: int, outputs: int) -> None:
        """A stop string was found in output token number `outputs` (from 1): the sample ends there, as "stop"."""

    async def ask(self, what: str, engine: int | None = None) -> Any:
        """'metrics': an engine's metrics as Prometheus text; 'state', 'live' and 'load': its tables, what the live page
        shows of them, and its load, as dictionaries; 'passes': its latest passes and requests; 'reset_prefix_cache':
        forget the cached blocks that no request holds, and how many these were.

        `engine`: its number; None: any one.

        Raises EngineDown if it does not answer.
        """
