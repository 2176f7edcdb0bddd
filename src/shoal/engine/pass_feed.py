"""The feed of passes: what an engine did, in numbers, for fronts that keep it for the live page and for recordings.

Owns the numbers of requests, which fronts follow, and what they have not been sent yet. Costs nothing until the first
front follows; then some microseconds a pass, and one message in a tenth of a second. Reads the scheduler's tables and
PassEvents. Passes on no token and no text. Knows no sockets.
"""

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from shoal.core.events import PassEvents
from shoal.core.live import LiveBatch, LivePass, LiveRequest
from shoal.core.request import Request
from shoal.sched.scheduler import Scheduler

FEED_S = 0.1  # between two batches

_encoder = msgspec.msgpack.Encoder()


class PassFeed:
    """Of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._followers: dict[bytes, bool] = {}  # front → whether it knows the requests
        self._numbers: dict[str, int] = {}  # by request id
        self._known: dict[int, LiveRequest] = {}
        self._count = 0
        self._came: list[LiveRequest] = []
        self._gone: list[int] = []
        self._passes: list[LivePass] = []
        self._last_ids: list[str] = []
        self._last_decodes = False  # the last pass had one position of each row
        self._sent_s = -math.inf
        # MFU and MBU of a pass, where the device's rates are known; set by the program that knows them
        self.shares: Callable[[PassEvents], tuple[float | None, float | None]] = lambda events: (None, None)

    def follow(self, front: bytes) -> None:
        if not self._followers:
            for request in self.scheduler.requests.values():
                self._arrive(request, ran=True)
        self._followers[front] = False

    def forget(self, front: bytes) -> None:
        self._followers.pop(front, None)
        if not self._followers:
            self._numbers, self._known = {}, {}
            self._came, self._gone, self._passes, self._last_ids = [], [], [], []

    @property
    def pending(self) -> bool:
        return bool(self._passes or self._came) or not all(self._followers.values())

    def take(self, events: PassEvents) -> None:
        """Note a record. Hot: once per pass."""
        if not self._followers:
            return
        for request in events.requests:
            self._arrive(request)
        if events.scheduled_ids or events.finished or events.preempted or events.rejected or events.arrived:
            self._passes.append(self._pass(events))
        for end in events.finished:
            number = self._numbers.pop(end.id, None)
            if number is not None:
                self._gone.append(number)
                self._known.pop(number, None)

    def due(self, now_s: float) -> dict[bytes, LiveBatch]:
        """What to send to each front now; nothing, if that was a moment ago."""
        if now_s - self._sent_s < FEED_S:
            return {}
        return self.flush(now_s)

    def flush(self, now_s: float) -> dict[bytes, LiveBatch]:
        """The same, whenever that was."""
        if not self._followers or not self.pending:
            return {}
        self._sent_s = now_s
        packed = _encoder.encode(self._passes)
        batch = LiveBatch(now_s, self._came, self._gone, packed)
        everything = LiveBatch(now_s, [*self._known.values()], self._gone, packed)
        found = {front: batch if knows else everything for front, knows in self._followers.items()}
        self._followers = dict.fromkeys(self._followers, True)
        self._came, self._gone, self._passes, self._last_ids = [], [], [], []  # the next batch names its rows
        return found

    def missed(self, front: bytes) -> None:
        """A batch could not be sent."""
        if front in self._followers:
            self._followers[front] = False

    # ---- records ----------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request, ran: bool = False) -> None:
        """`ran`: its output so far is from before; else a pass may have added to it since it arrived."""
        if request.id in self._numbers:
            return
        self._count += 1
        self._numbers[request.id] = self._count
        live = described(request, self._count, ran or request.resumed)
        self._known[self._count] = live
        self._came.append(live)

    def _pass(self, events: PassEvents) -> LivePass:
        ids, counts = events.scheduled_ids, events.scheduled_counts
        decodes = len(counts) > 0 and max(counts) == 1
        same = decodes and self._last_decodes and ids == self._last_ids and not events.recomputed_tokens
        self._last_decodes, self._last_ids = decodes, ids
        host = self.scheduler.kv.host
        number = self._number
        return LivePass(
            events.step,
            events.planned_s or events.committed_s,
            events.committed_s,
            None if same else [number(id) for id in ids],
            [] if same else list(events.scheduled_starts),
            [] if same else list(counts),
            {number(id): got for id, got in Counter(events.owners).items()} if events.proposed else None,
            events.computed_tokens,
            events.recomputed_tokens,
            events.padded_tokens,
            events.budget_tokens,
            events.running,
            events.waiting,
            events.blocks_held,
            events.blocks_cached,
            events.blocks_total,
            0 if host is None else len(host),
            *self.shares(events),
            [(number(one.id), one.waited_s, one.cached_tokens, one.resumed) for one in events.admitted],
            [(number(one.id), one.lost_tokens, one.how) for one in events.preempted],
            self._first(events),
            [(number(end.id), end.reason.value, end.outputs, end.kept_ttft, end.kept_itl) for end in events.finished],
            [one.kind for one in events.rejected],
        )

    def _first(self, events: PassEvents) -> list[int]:
        """Requests whose first token this is."""
        if 0 not in events.indexes:
            return []
        return [self._number(id) for id, index in zip(events.owners, events.indexes, strict=True) if not index]

    def _number(self, id: str) -> int:
        """0 for one that has ended before this front followed."""
        return self._numbers.get(id, 0)


def described(request: Request, number: int, ran: bool) -> LiveRequest:
    promise = request.promise
    return LiveRequest(
        number,
        request.id,
        request.arrived_s,
        request.tenant,
        promise.name,
        request.prompt_len,
        request.outputs if ran else 0,
        request.max_tokens,
        promise.ttft_s if math.isfinite(promise.ttft_s) else None,
        promise.itl_s if math.isfinite(promise.itl_s) else None,
        request.resumed,
    )
