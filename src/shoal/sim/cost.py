"""How long passes take: a cost model of few terms, and an Executor that takes that long on a virtual clock.

    device seconds = table(positions) + row_s · rows + draw_s · tokens drawn + read_s · KV positions read
                     + pair_s · (prompt position, earlier position) pairs + span_s · furthest position of a prompt chunk

The table holds seconds at some numbers of positions, with straight lines between them: one for passes of decodes, one
for passes with prompts. It stands for the linear layers, which are bound by the weights' bytes up to some batch and by
arithmetic beyond it. Reads are the attention of decodes, pairs that of prompts; the last positions of a chunk go
through all before them one after the other, which takes its time however small the chunk is. Owns the terms and what a
plan counts in them. Knows plans, no requests and no policies.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shoal.core.clock import VirtualClock
from shoal.core.plan import BlockCopy, Flags, Ints, StepPlan, StepResult
from shoal.core.ports import LateMasks

total = np.add.reduce  # as sum(), which takes twice as long for so few


class PassSize(NamedTuple):
    """What a pass computes, padding included."""

    positions: int
    rows: int
    draws: int
    reads: int  # KV positions that its rows read
    pairs: int  # of prompt positions with positions up to them
    padded: int  # positions of padding
    prompts: bool  # not all rows are decodes (of one position, or of several that verify drafts)
    starting: int  # rows that start
    span: int = 0  # how far the longest sequence reaches of which it computes a prompt chunk

    @classmethod
    def of(cls, plan: StepPlan) -> "PassSize":
        counts, starts, rows = plan.counts, plan.starts, len(plan.rows)
        useful, past = int(total(counts)), int(total(starts))
        pairs, draws, span = 0, rows, 0
        if counts is not plan.draws:
            draws = int(total(plan.draws))
        # a row that draws after each of its positions decodes, and may verify drafts: it is no prompt
        prompts = useful > rows and useful > draws and bool((counts > np.maximum(plan.draws, 1)).any())
        if prompts:
            chunks = (counts > np.maximum(plan.draws, 1)).nonzero()[0]
            some = counts[chunks]
            pairs = int(total(some * starts[chunks] + some * (some + 1) // 2))
            span = int((starts[chunks] + some).max())
        if not plan.width:
            return cls(useful, rows, draws, useful + past, pairs, 0, prompts, len(plan.starting), span)
        # every row of the rectangle is as wide as the widest and reads as far as the longest
        lines = rows + plan.dead
        positions, longest = lines * plan.width, int((starts + counts).max())
        wide = plan.width > 1
        pairs, padded = positions * longest if wide else 0, positions - useful
        span = longest if wide else 0
        return cls(positions, lines, draws, lines * longest, pairs, padded, wide, len(plan.starting), span)


Points = tuple[tuple[int, float], ...]  # (positions, seconds), ascending


class TimeTable:
    """Seconds by size: straight lines between points, and beyond the last one as from the last that is at most two
    thirds of it: two neighbours are too near to each other to show a slope.

    >>> table = TimeTable(((1, 0.010), (101, 0.020), (201, 0.040)))
    >>> table.at(51), table.at(301), table.at(0)
    (0.015, 0.06, 0.01)
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self._at = [at for at, _ in points]
        self._seconds = [seconds for _, seconds in points]
        last, latest_s = points[-1]
        at, at_s = max((one for one in points if one[0] <= last * 2 / 3), default=points[0])
        self._slope = (latest_s - at_s) / (last - at) if last > at else 0.0

    def at(self, size: int) -> float:
        at, seconds = self._at, self._seconds
        if size <= at[0] or len(at) == 1:
            return seconds[0]
        if size > at[-1]:
            return seconds[-1] + (size - at[-1]) * self._slope
        index = bisect_left(at, size)
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
    span_s: float = 0.0


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
            + device.span_s * size.span
        )

    def host_s(self, size: PassSize) -> float:
        host = self.host
        return host.pass_s + host.row_s * size.rows + host.start_s * size.starting

    def copy_s(self, direction: str, blocks: int) -> float:
        copies = self.copies
        return copies.order_s + blocks * (copies.out_block_s if direction == "out" else copies.in_block_s)


class Coin:
    """Whether draft tokens are accepted: each with the same probability, by a hash of its request's seed and position.

    >>> coin = Coin(0.7)
    >>> toss = coin.tossed(np.arange(10_000), np.full(10_000, 7))
    >>> bool(0.68 < toss.mean() < 0.72), bool((toss == coin.tossed(np.arange(10_000), np.full(10_000, 7))).all())
    (True, True)
    """

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def tossed(self, seeds: Ints, positions: Ints) -> Flags:
        mixed = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # as splitmix64 does
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
        shares = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
        return shares < self.probability


@dataclass(slots=True)
class CopyUnderWay:
    id: int
    done_s: float
    took_s: float


class SimulatedExecutor:
    """An Executor that computes nothing and takes the time that `times` says. Its clock is the loop's.

    The host's time before a pass goes by in forward(); the wait for the device in result(). Each row draws ORDINARY
    tokens, and END where the trace says that its answer ends. Draft tokens are accepted by `coin`.
    """

    def __init__(self, times: Times, clock: VirtualClock, rows: int, coin: Coin | None = None) -> None:
        self.times = times
        self.clock = clock
        self._coin = coin or Coin(0.0)
        self._ends: Ints = np.zeros(rows, dtype=np.int64)  # row → position of its last token
        self._seeds: Ints = np.zeros(rows, dtype=np.int64)
        self._ones: Ints = np.ones(rows, dtype=np.int64)
        self._free_s = 0.0  # when the device has done all passes
        self.peers: dict[str, SimulatedExecutor] = {}  # of engines whose outboxes it reads, by address
        self.written_s: dict[int, float] = {}  # host block → when its newest content is there
        self._copier_free_s = 0.0
        self._copies: list[CopyUnderWay] = []
        self._passes: deque[tuple[float, StepResult]] = deque()  # (when it is done, what will have come of it)

    def forward(self, plan: StepPlan) -> None:
        size = PassSize.of(plan) if len(plan.rows) else None
        if size is not None:
            self.clock.advance(self.times.host_s(size))
        begun_s = max(self.clock.now_s(), self._free_s)
        for start in plan.starting:
            self._ends[start.row], self._seeds[start.row] = start.ends_at, start.seed
        for order in plan.copies:
            took_s = self.times.copy_s(order.direction, len(order.source))
            since_s = self.clock.now_s() if order.direction == "out" else begun_s
            self._copier_free_s = max(self._copier_free_s, since_s, self._there_s(order)) + took_s
            self._copies.append(CopyUnderWay(order.id, self._copier_free_s, took_s))
            if order.direction == "out":
                self.written_s.update(dict.fromkeys(order.target, self._copier_free_s))
        busy_s = self.times.device_s(size) if size is not None else 0.0
        self._free_s = begun_s + busy_s
        if size is None:  # nothing to compute: it waits for its copies
            self._free_s = max([begun_s, *(copy.done_s for copy in self._copies)])
        self._passes.append((self._free_s, self._result_of(plan, busy_s, size)))

    def _there_s(self, order: BlockCopy) -> float:
        """When its sources are there: another engine may still be writing them to its outbox."""
        written_s = self.peers[order.peer].written_s if order.peer else {}
        return max((written_s.get(source, 0.0) for source in order.source), default=0.0) if written_s else 0.0

    def _result_of(self, plan: StepPlan, busy_s: float, size: PassSize | None) -> StepResult:
        rows, generations, draws, ends = plan.rows, plan.generations, plan.draws, plan.starts + plan.counts
        drawing = None if size is not None and size.draws == len(rows) else draws.nonzero()[0]
        if drawing is not None and len(drawing) < len(rows):
            rows, generations, draws, ends = rows[drawing], generations[drawing], draws[drawing], ends[drawing]
        last = self._ends.take(rows)
        if size is None or size.draws == len(rows):
            accepted, tokens = self._ones[: len(rows)], (last == ends).astype(np.int64)
        else:
            accepted, tokens = self._verify(rows, draws, ends, last)
        return StepResult(
            plan.step,
            rows,
            generations,
            accepted,
            tokens,
            copies_done=self._done() if self._copies else (),
            padded=0 if size is None else size.padded,
            busy_s=busy_s,
        )

    def _verify(self, rows: Ints, draws: Ints, ends: Ints, last: Ints) -> tuple[Ints, Ints]:
        """How many tokens each row yields, and all of them: a draft is wrong where the coin or the answer's end says
        so. Row by row, the token of line i stands at position `ends` - `draws` + 1 + i."""
        first = np.cumsum(draws) - draws
        row_of = np.repeat(np.arange(len(rows)), draws)
        position = np.arange(len(row_of)) - first[row_of] + (ends - draws + 1)[row_of]
        over = position >= last[row_of]  # no draft is right where the answer ends, and what follows is dropped
        right = self._coin.tossed(self._seeds[rows][row_of], position) & ~over
        wrong = np.cumsum(~right) - ~right  # before this line, over all rows
        kept = (wrong == wrong[first][row_of]).nonzero()[0]
        accepted = np.bincount(row_of[kept], minlength=len(rows))
        # the last line of a row has no draft to be right; whatever the coin says, nothing follows it
        return accepted.astype(np.int64), (position[kept] == last[row_of[kept]]).astype(np.int64)

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
