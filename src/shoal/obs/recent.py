"""The latest passes and requests of an engine, as numbers: what `shoal doctor --url` and `shoal calibrate --url` read.

A reader of PassEvents. Owns two rings of bounded size: sizes and times of passes, and lengths and times of requests
that ended. Keeps no tokens and no names. Knows no scheduler, no device and no clock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.core.events import PassEvents
from shoal.core.request import Reason

PASSES, REQUESTS = 2000, 2000
ANSWERED = frozenset({Reason.STOP, Reason.LENGTH})


class SeenPass(NamedTuple):
    """One pass."""

    committed_s: float
    busy_s: float
    between_s: float | None  # from the commit of the pass before to its own; None: the engine was idle before it
    positions: int  # padding included
    padded: int
    recomputed: int
    rows: int
    decodes: int  # rows of one position
    chunk: int  # positions of its longest prompt chunk
    lines: int
    reads: int
    pairs: int  # of prompt chunks
    span: int  # how far the longest sequence of those reaches
    starting: int
    budget: int
    preempted: int
    running: int
    waiting: int
    held: int  # KV blocks
    cached: int
    blocks: int


class SeenRequest(NamedTuple):
    """One request that ended with an answer."""

    arrived_s: float
    waited_s: float
    ttft_s: float
    e2e_s: float
    prompt: int
    cached: int
    output: int
    preemptions: int


@dataclass(slots=True)
class OpenEntry:
    """A request that has not ended."""

    arrived_s: float
    waited_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    first_s: float | None = None


class RecentWork:
    """Watches one engine; an Observer."""

    def __init__(self, passes: int = PASSES, requests: int = REQUESTS) -> None:
        self.passes: deque[SeenPass] = deque(maxlen=passes)
        self.requests: deque[SeenRequest] = deque(maxlen=requests)
        self.refused = 0
        self._open: dict[str, OpenEntry] = {}
        self._last_s: float | None = None  # when the pass before was committed, if the engine had more to do

    @property
    def tracked(self) -> int:
        """Entries of requests that have not ended: 0 when the engine is empty."""
        return len(self._open)

    def take(self, events: PassEvents) -> None:
        for id, at_s in zip(events.arrived, events.arrived_s, strict=True):
            self._open[id] = OpenEntry(at_s)
        for refused in events.rejected:
            self.refused += 1
            self._open.pop(refused.id, None)
        for start in events.admitted:
            entry = self._open.get(start.id)
            if entry is not None and not start.resumed:
                entry.waited_s, entry.prompt, entry.cached = start.waited_s, start.prompt_tokens, start.cached_tokens
        if 0 in events.indexes:
            for id, index in zip(events.owners, events.indexes, strict=True):
                if not index and id in self._open:
                    self._open[id].first_s = events.committed_s
        for end in events.finished:
            entry = self._open.pop(end.id, None)
            if entry is not None and entry.first_s is not None and end.reason in ANSWERED:
                self._end(entry, end.outputs, end.preemptions, events.committed_s)
        if events.scheduled_ids:
            self._pass(events)
        if not events.running and not events.waiting:
            self._last_s = None

    def _end(self, entry: OpenEntry, outputs: int, preemptions: int, now_s: float) -> None:
        assert entry.first_s is not None
        times = entry.waited_s, entry.first_s - entry.arrived_s, now_s - entry.arrived_s
        self.requests.append(
            SeenRequest(entry.arrived_s, *times, entry.prompt, entry.cached, outputs, max(0, preemptions))
        )

    def _pass(self, events: PassEvents) -> None:
        rows, counts = len(events.scheduled_ids), events.scheduled_counts
        decodes = rows if events.computed_tokens == rows else sum(count == 1 for count in counts)
        alone = decodes == rows
        chunks = span = 0
        if not alone:
            parts = list(zip(events.scheduled_starts, counts, strict=True))
            chunks = sum(start + 1 for start, count in parts if count == 1)
            span = max(start + count for start, count in parts if count > 1)
        self.passes.append(
            SeenPass(
                committed_s=events.committed_s,
                busy_s=events.busy_s,
                between_s=None if self._last_s is None else events.committed_s - self._last_s,
                positions=events.computed_tokens + events.padded_tokens,
                padded=events.padded_tokens,
                recomputed=events.recomputed_tokens,
                rows=rows + events.dead_rows,
                decodes=decodes,
                chunk=0 if alone else max(counts),
                lines=events.lines,
                reads=events.kv_reads,
                pairs=0 if alone else events.pairs - chunks,
                span=span,
                starting=len(events.admitted),
                budget=events.budget_tokens,
                preempted=len(events.preempted),
                running=events.running,
                waiting=events.waiting,
                held=events.blocks_held,
                cached=events.blocks_cached,
                blocks=events.blocks_total,
            )
        )
        self._last_s = events.committed_s

    def state(self) -> dict[str, Any]:
        """As JSON takes it: a list for each column."""
        return {
            "refused": self.refused,
            "passes": columns(SeenPass._fields, self.passes),
            "requests": columns(SeenRequest._fields, self.requests),
        }


def columns(names: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """
    >>> columns(("a", "b"), [(1, 2.123456789), (3, None)])
    {'a': [1, 3], 'b': [2.123457, None]}
    """
    kept = [[round(one, 6) if isinstance(one, float) else one for one in row] for row in rows]
    return {name: [row[index] for row in kept] for index, name in enumerate(names)}
