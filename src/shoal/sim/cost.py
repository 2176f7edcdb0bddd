"""How long passes take: a cost model of few terms, and an Executor that takes that long on a virtual clock.

    device seconds = table(positions) + row_s · rows + draw_s · tokens drawn + read_s · KV positions read
                     + pair_s · (prompt position, earlier position) pairs

The table holds seconds at some numbers of positions, with straight lines between them: one for passes of decodes, one
for passes with prompts. It stands for the linear layers, which are bound by the weights' bytes up to some batch and by
arithmetic beyond it. Reads are the attention of decodes, pairs that of prompts. Owns the terms and what a plan counts
in them. Knows plans, no requests and no policies.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shoal.core.clock import VirtualClock
from shoal.core.plan import Ints, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.sim.request import END, ORDINARY


class PassSize(NamedTuple):
    """What a pass computes, padding included."""

    positions: int
    rows: int
    draws: int
    reads: int  # KV positions that its rows read
    pairs: int  # of prompt positions with positions up to them
    padded: int  # positions of padding
    prompts: bool  # not all rows are decodes
    starting: int  # rows that start

    @classmethod
    def of(cls, plan: StepPlan) -> "PassSize":
        counts, starts, rows = plan.counts, plan.starts, len(plan.rows)
        useful = int(counts.sum())
        ends = starts + counts
        pairs = 0
        if useful > rows:
            chunks = counts > 1
            some = counts[chunks]
            pairs = int((some * starts[chunks] + some * (some + 1) // 2).sum())
        if not plan.width:
            draws, reads = int(plan.draws.sum()), int(ends.sum())
            return cls(useful, rows, draws, reads, pairs, 0, useful > rows, len(plan.starting))
        # every row of the rectangle is as wide as the widest and reads as far as the longest
        lines = rows + plan.dead
        positions, longest = lines * plan.width, int(ends.max())
        wide = plan.width > 1
        pairs = positions * longest if wide else 0
        draws = int(plan.draws.sum())
        return cls(positions, lines, draws, lines * longest, pairs, positions - useful, wide, len(plan.starting))


Points = tuple[tuple[int, float], ...]  # (positions, seconds), ascending


class TimeTable:
    """Seconds by size: straight lines between points, and beyond the last one in proportion to its slope.

    >>> table = TimeTable(((1, 0.010), (101, 0.020), (201, 0.040)))
    >>> table.at(51), table.at(301), table.at(0)
    (0.015, 0.06, 0.01)
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self._at = [at for at, _ in points]
        self._seconds = [seconds for _, seconds in points]

    def at(self, size: int) -> float:
        at, seconds = self._at, self._seconds
        if size <= at[0] or len(at) == 1:
            return seconds[0]
        index = min(bisect_left(at, size), len(at) - 1)
        slope = (seconds[index] - seconds[index - 1]) / (at[index] - at[index - 1])
        return seconds[index] + (size - at[index]) * slope


@dataclass(frozen=True)
class DeviceTimes:
    """How long the device computes a pass."""

    decode: Points  # of passes in which every row decodes, by positions
    mixed: Points  # of passes with prompts
    row_s: float = 0.0
    draw_s: float = 0.0
    read_s: float = 0.0
    pair_s: float = 0.0


@dataclass(frozen=True)
class HostTimes:
    """What the host does between two passes: it commits one and plans the next."""

    pass_s: float = 0.0
    row_s: float = 0.0  # for each row of the next pass
    start_s: float = 0.0  # for each request that starts in it


@dataclass(frozen=True)
class CopyCosts:
    """KV blocks to host memory and back, beside the passes."""

    order_s: float = 0.0  # each copy, whatever its size
    out_block_s: float = 0.0
    in_block_s: float = 0.0


class Times(Protocol):
    """How long things take."""

    def device_s(self, size: PassSize) -> float:
        """A pass, from its begin to its end."""

    def host_s(self, size: PassSize) -> float:
        """On the host, before the pass begins."""

    def copy_s(self, direction: str, blocks: int) -> float: ...


class CostModel:
    """The fitted times of one profile."""

    def __init__(self, device: DeviceTimes, host: HostTimes | None = None, copies: CopyCosts | None = None) -> None:
        self.device, self.host, self.copies = device, host or HostTimes(), copies or CopyCosts()
        self._decode, self._mixed = TimeTable(device.decode), TimeTable(device.mixed)

    def device_s(self, size: PassSize) -> float:
        device = self.device
        table = self._mixed if size.prompts else self._decode
        return (
            table.at(size.positions)
            + device.row_s * size.rows
            + device.draw_s * size.draws
            + device.read_s * size.reads
            + device.pair_s * size.pairs
        )

    def host_s(self, size: PassSize) -> float:
        host = self.host
        return host.pass_s + host.row_s * size.rows + host.start_s * size.starting

    def copy_s(self, direction: str, blocks: int) -> float:
        copies = self.copies
        return copies.order_s + blocks * (copies.out_block_s if direction == "out" else copies.in_block_s)


@dataclass(slots=True)
class CopyUnderWay:
    id: int
    done_s: float
    took_s: float


class SimulatedExecutor:
    """An Executor that computes nothing and takes the time that `times` says. Its clock is the loop's.

    The host's time before a pass goes by in forward(); the wait for the device in result(). Each row draws ORDINARY
    tokens, and END where the trace says that its answer ends.
    """

    def __init__(self, times: Times, clock: VirtualClock, rows: int) -> None:
        self.times = times
        self.clock = clock
        self._ends: Ints = np.zeros(rows, dtype=np.int64)  # row → position of its last token
        self._free_s = 0.0  # when the device has done all passes
        self._copier_free_s = 0.0
        self._copies: list[CopyUnderWay] = []
        self._passes: deque[tuple[float, StepResult]] = deque()  # (when it is done, what will have come of it)

    def forward(self, plan: StepPlan) -> None:
        size = PassSize.of(plan) if len(plan.rows) else None
        if size is not None:
            self.clock.advance(self.times.host_s(size))
        begun_s = max(self.clock.now_s(), self._free_s)
        for start in plan.starting:
            self._ends[start.row] = start.ends_at
        for order in plan.copies:
            took_s = self.times.copy_s(order.direction, len(order.source))
            self._copier_free_s = max(self._copier_free_s, begun_s) + took_s
            self._copies.append(CopyUnderWay(order.id, self._copier_free_s, took_s))
        busy_s = self.times.device_s(size) if size is not None else 0.0
        self._free_s = begun_s + busy_s
        if size is None:  # nothing to compute: it waits for its copies
            self._free_s = max([begun_s, *(copy.done_s for copy in self._copies)])
        self._passes.append((self._free_s, self._result_of(plan, busy_s, 0 if size is None else size.padded)))

    def _result_of(self, plan: StepPlan, busy_s: float, padded: int) -> StepResult:
        drawing = np.flatnonzero(plan.draws)
        rows, generations, ends = plan.rows, plan.generations, plan.starts + plan.counts
        if len(drawing) < len(rows):
            rows, generations, ends = rows[drawing], generations[drawing], ends[drawing]
        tokens = np.where(self._ends[rows] == ends, END, ORDINARY)
        done = self._done() if self._copies else ()
        return StepResult(
            plan.step,
            rows,
            generations,
            np.ones(len(rows), dtype=np.int64),
            tokens,
            copies_done=done,
            padded=padded,
            busy_s=busy_s,
        )

    def _done(self) -> tuple[tuple[int, float], ...]:
        """Copies that are done when the newest pass is."""
        done = [copy for copy in self._copies if copy.done_s <= self._free_s]
        self._copies = [copy for copy in self._copies if copy.done_s > self._free_s]
        return tuple((copy.id, copy.took_s) for copy in done)

    def sample(self, masks: LateMasks | None) -> None:
        pass

    def result(self) -> StepResult:
        done_s, result = self._passes.popleft()
        self.clock.wait_until(done_s)
        return result

    def close(self) -> None:
        pass


def points_of(pairs: Sequence[Sequence[float]]) -> Points:
    return tuple((int(at), float(seconds)) for at, seconds in pairs)
