"""The live page's summaries: from requests and passes to lines of JSON, at most ten a second.

Owns lanes (one per request, whichever engine has it), what each pass computed for them, percentiles and shares. A line
says what changed since the one before; every now and then one also says what is (its key), so that a reader may begin
there. The lines are the format of recordings, version FORMAT; docs/live.md lists their fields. They hold no text. Knows
no clock: times are arguments, and lines count seconds from `began_s`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.live import LivePass, LiveRequest

FORMAT = 1  # of recordings
KEY_LINES = 50  # every so many lines one has a key
WINDOW_S = 30.0  # of the percentiles
FORGET_S = 60.0  # a request of an engine that went down is given up after so long …
RESUME_S = 5.0  # … or so long after the engine is up again: it had ended, and the engine could not say so any more
PROMPT, RECOMPUTE = 0, 1  # kinds of chunks
MOVES = ("abort", "handed")  # ends after which another engine may go on


@dataclass(slots=True, eq=False)
class LiveLane:
    """One request."""

    number: int
    live: LiveRequest
    engine: int
    prompt: int
    high: int = 0  # positions below were computed before
    last_s: float | None = None  # when its last token came, unless its engine decodes it without a break
    got_first: bool = False
    again: bool = False  # it lost its KV, and computes positions that it had computed


@dataclass(slots=True)
class EngineLanes:
    """One engine: its requests, and the ones whose decodes the last pass had."""

    epoch: int
    up: bool = True
    up_s: float = 0.0  # since when
    by_number: dict[int, LiveLane] = field(default_factory=dict)
    decoding: dict[LiveLane, None] = field(default_factory=dict)
    last_s: float = 0.0  # when the last pass with decodes ended
    ended_s: float = 0.0  # … and the last pass of all
    tiers: Counter[str] = field(default_factory=Counter)  # of the decodes
    tenants: Counter[str] = field(default_factory=Counter)
    left: list[int] = field(default_factory=list)  # lanes that no longer decode, for the next pass to say


class LiveSummary:
    """Takes what engines do in the order of time, and returns lines."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.engines: dict[int, EngineLanes] = {}
        self._lanes: dict[str, LiveLane] = {}  # by request id
        # ended on one engine, perhaps to go on elsewhere: since when, and whether a line has said that it ended
        self._moving: dict[str, tuple[LiveLane, float, bool]] = {}
        self._count = 0
        self._lines = 0
        self._samples: dict[tuple[str, str], deque[tuple[float, float, int]]] = {}  # (tier, what) → at, value, weight
        self._promises: dict[str, tuple[float | None, float | None]] = {}
        self._fresh()

    def _fresh(self) -> None:
        self._new: list[list[Any]] = []
        self._events: list[list[Any]] = []
        self._passes: list[dict[str, Any]] = []
        self._tokens: Counter[str] = Counter()
        self._views: dict[str, Any] = {}

    def _at(self, at_s: float) -> float:
        return round(at_s - self.began_s, 4)

    # ---- engines ----------------------------------------------------------------------------------------------------

    def up(self, engine: int, epoch: int, at_s: float) -> None:
        known = self.engines.get(engine)
        self.engines[engine] = EngineLanes(epoch, up_s=at_s)
        if known is None or known.epoch != epoch or not known.up:
            self._events.append(["up", self._at(at_s), engine, epoch])

    def down(self, engine: int, at_s: float) -> None:
        known = self.engines.get(engine)
        if known is None or not known.up:
            return
        known.up = False
        self._leave(known, list(known.decoding))
        for lane in known.by_number.values():
            self._moving[lane.live.id] = (lane, at_s, False)
        self._events.append(["down", self._at(at_s), engine])

    def _of(self, engine: int, epoch: int) -> EngineLanes:
        known = self.engines.get(engine)
        if known is None or known.epoch != epoch:
            known = self.engines[engine] = EngineLanes(epoch)
        return known

    # ---- requests ---------------------------------------------------------------------------------------------------

    def came(self, engine: int, epoch: int, requests: Iterable[LiveRequest], at_s: float) -> None:
        known = self._of(engine, epoch)
        for live in requests:
            if live.number in known.by_number:
                continue
            lane = self._lanes.get(live.id)
            if lane is None:
                lane = self._open(live, engine)
            elif live.resumed or live.id in self._moving:
                self._move(lane, live, engine, max(live.at_s, at_s))
            else:  # it has moved on already: the engine where it began tells its story after the next one
                lane.got_first = False
            known.by_number[live.number] = lane
            self._promises.setdefault(live.tier, (live.ttft_s, live.itl_s))

    def _open(self, live: LiveRequest, engine: int) -> LiveLane:
        self._count += 1
        lane = self._lanes[live.id] = LiveLane(self._count, live, engine, live.prompt, got_first=live.outputs > 0)
        self._new.append(self._described(lane))
        return lane

    def _described(self, lane: LiveLane) -> list[Any]:
        live = lane.live
        return [
            *(lane.number, live.id, lane.engine, self._at(live.at_s), live.tenant, live.tier, live.prompt, live.most),
            live.outputs,
        ]

    def _move(self, lane: LiveLane, live: LiveRequest, engine: int, at_s: float) -> None:
        """It goes on: on another engine, or on this one after its restart."""
        self._moving.pop(live.id, None)
        self._events.append(["move", self._at(at_s), lane.number, lane.engine, engine])
        lane.engine, lane.again = engine, True

    # ---- passes -----------------------------------------------------------------------------------------------------

    def batch(
        self, engine: int, epoch: int, came: Iterable[LiveRequest], passes: Sequence[LivePass], sent_s: float
    ) -> None:
        """What an engine sent at once. The requests came before the passes that compute them."""
        self.came(engine, epoch, came, passes[0].begun_s if passes else sent_s)
        for one in passes:
            self.passed(engine, epoch, one)

    def passed(self, engine: int, epoch: int, one: LivePass) -> None:
        known = self._of(engine, epoch)
        for number, waited_s, cached, resumed in one.admitted:
            self._note(known, number, "admit", one.begun_s, engine, round(waited_s, 4), cached, int(resumed))
            if (lane := known.by_number.get(number)) is not None:
                lane.high = max(lane.high, cached) if not resumed else lane.high
        for number, lost, how in one.preempted:
            if (lane := known.by_number.get(number)) is not None:
                self._leave(known, [lane])
                lane.again = True
            self._note(known, number, "preempt", one.begun_s, lost, how)
        if one.step >= 0 and (one.rows is None or one.rows):
            self._passes.append(self._computed(known, engine, one))
        for number in one.first:
            self._first(known, number, one.ended_s)
        for number, reason, outputs, kept_ttft, kept_itl in one.ended:
            self._ended(known, engine, number, one.ended_s, reason, outputs, kept_ttft, kept_itl)
        for kind in one.refused:
            self._events.append(["refuse", self._at(one.ended_s), kind])

    def _note(self, known: EngineLanes, number: int, kind: str, at_s: float, *rest: Any) -> None:
        lane = known.by_number.get(number)
        if lane is not None:
            self._events.append([kind, self._at(at_s), lane.number, *rest])

    def _computed(self, known: EngineLanes, engine: int, one: LivePass) -> dict[str, Any]:
        """A pass, as the page draws it."""
        begun_s = max(one.begun_s, min(known.ended_s, one.ended_s))  # planned ahead, it waited for the one before
        known.ended_s = one.ended_s
        shown: dict[str, Any] = {"e": engine, "n": one.step, "a": self._at(begun_s), "b": self._at(one.ended_s)}
        if one.rows is None:
            joined: list[LiveLane] = []
            left: list[LiveLane] = []
            decodes = len(known.decoding)
        else:
            joined, left, decodes = self._rows(known, one, shown)
        self._leave(known, left)
        self._gaps(known, joined, one.ended_s)
        for tenant, count in known.tenants.items():
            self._tokens[tenant] += count
        chunks = [0, 0]  # a restarted engine does not know that it computes them again
        for _, _, count, kind in shown.get("c", ()):
            chunks[kind] += count
        shown |= {"p": chunks[PROMPT], "d": decodes, "r": chunks[RECOMPUTE], "w": one.padded, "u": one.budget}
        shown |= {"run": one.running, "wait": one.waiting, "kv": [one.held, one.cached, one.total, one.host]}
        if joined:
            shown["in"] = [lane.number for lane in joined]
        if known.left:
            shown["out"], known.left = known.left, []
        for name in ("mfu", "mbu"):
            if getattr(one, name) is not None:
                shown[name] = round(getattr(one, name), 4)
        return shown

    def _rows(
        self, known: EngineLanes, one: LivePass, shown: dict[str, Any]
    ) -> tuple[list[LiveLane], list[LiveLane], int]:
        """Sorts the rows of a pass: chunks and drafts go to `shown`; returns which decodes joined and left, and how
        many positions decodes had. Hot: there may be a thousand rows in each of a hundred passes a second."""
        decoding: dict[LiveLane, None] = {}
        chunks: list[list[int]] = []
        drafts: list[list[int]] = []
        positions = 0
        lane_of = known.by_number.get
        for number, start, count in zip(one.rows or (), one.starts, one.counts, strict=True):
            lane = lane_of(number)
            if lane is None:
                continue
            if count == 1 and start >= lane.prompt and not lane.again:  # nearly all of them
                decoding[lane] = None
                positions += 1
                if start >= lane.high:
                    lane.high = start + 1
                continue
            lane.again = lane.again and start < lane.high
            if lane.again:
                chunks.append([lane.number, start, count, RECOMPUTE])
                self._tokens[lane.live.tenant] += count
            elif start < lane.prompt:
                chunks.append([lane.number, start, count, PROMPT])
                self._tokens[lane.live.tenant] += count
            else:
                decoding[lane] = None
                positions += count
                if count > 1:
                    got = (one.yields or {}).get(number, 1)
                    drafts.append([lane.number, count - 1, max(0, got - 1)])
                    count = got
            lane.high = max(lane.high, start + count)
        if chunks:
            shown["c"] = chunks
        if drafts:
            shown["x"] = drafts
        if decoding.keys() == known.decoding.keys():
            return [], [], positions
        joined = [lane for lane in decoding if lane not in known.decoding]
        left = [lane for lane in known.decoding if lane not in decoding]
        return joined, left, positions

    def _gaps(self, known: EngineLanes, joined: list[LiveLane], at_s: float) -> None:
        """The gaps between tokens that this pass ended. Takes the joined decodes in."""
        for tier, count in known.tiers.items():
            if count:
                self._sample(tier, "gap", at_s, at_s - known.last_s, count)
        for lane in joined:
            if lane.last_s is not None:
                self._sample(lane.live.tier, "gap", at_s, at_s - lane.last_s, 1)
            lane.last_s = None
            known.decoding[lane] = None
            known.tiers[lane.live.tier] += 1
            known.tenants[lane.live.tenant] += 1
        if known.decoding:
            known.last_s = at_s

    def _leave(self, known: EngineLanes, lanes: Iterable[LiveLane]) -> None:
        for lane in lanes:
            if lane in known.decoding:
                del known.decoding[lane]
                known.left.append(lane.number)
                lane.last_s = known.last_s
                for counts, name in ((known.tiers, lane.live.tier), (known.tenants, lane.live.tenant)):
                    counts[name] -= 1
                    if not counts[name]:
                        del counts[name]

    def _first(self, known: EngineLanes, number: int, at_s: float) -> None:
        lane = known.by_number.get(number)
        if lane is not None and not lane.got_first:
            lane.got_first = True
            lane.last_s = at_s
            ttft_s = at_s - lane.live.at_s
            self._sample(lane.live.tier, "ttft", at_s, ttft_s, 1)
            self._events.append(["first", self._at(at_s), lane.number, round(ttft_s, 4)])

    def _ended(self, known: EngineLanes, engine: int, number: int, at_s: float, reason: str, *rest: Any) -> None:
        lane = known.by_number.pop(number, None)
        if lane is None:
            return
        self._leave(known, [lane])
        if lane.engine != engine:
            return  # it runs elsewhere by now
        self._events.append(["end", self._at(at_s), lane.number, reason, *rest])
        if reason in MOVES:
            self._moving[lane.live.id] = (lane, at_s, True)
        else:
            self._lanes.pop(lane.live.id, None)

    # ---- figures ----------------------------------------------------------------------------------------------------

    def _sample(self, tier: str, what: str, at_s: float, value: float, weight: int) -> None:
        kept = self._samples.setdefault((tier, what), deque())
        kept.append((at_s, value, weight))

    def _percentiles(self, now_s: float) -> dict[str, Any]:
        """Per tier: [p50, p95, p99, how many, promise] of ttft and gap."""
        found: dict[str, Any] = {}
        for (tier, what), kept in self._samples.items():
            while kept and kept[0][0] < now_s - WINDOW_S:
                kept.popleft()
            promise = self._promises.get(tier, (None, None))[what == "gap"]
            if kept:
                of_tier = found.setdefault(tier, {})
                of_tier[what] = [*weighted(kept, (0.5, 0.95, 0.99)), sum(one[2] for one in kept), promise]
        return found

    def view(self, engine: int, answer: dict[str, Any]) -> None:
        """The queue and the block map of an engine, as it answered."""
        numbers = {id: lane.number for id, lane in self._lanes.items()}
        queue = [[numbers[id], why, slack] for id, why, slack in answer["queue"] if id in numbers]
        maps = {
            name: {**answer[name], "owners": [numbers.get(id, 0) for id in answer[name]["owners"]]}
            for name in ("blocks", "host_blocks")
            if name in answer
        }
        self._views[str(engine)] = {**answer, "queue": queue, **maps}

    # ---- lines ------------------------------------------------------------------------------------------------------

    def line(self, now_s: float) -> dict[str, Any]:
        """What happened since the last line."""
        self._forget(now_s)
        found: dict[str, Any] = {"t": self._at(now_s)}
        if self._lines % KEY_LINES == 0:
            found["key"] = self._key()
        self._lines += 1
        news = {"new": self._new, "ev": self._events, "passes": self._passes}
        found |= {name: value for name, value in news.items() if value}
        if self._tokens:
            found["tenants"] = dict(self._tokens)
        if self._views:
            found["views"] = self._views
        if self._lines % 5 == 1:
            found["tiers"] = self._percentiles(now_s)
        self._fresh()
        return found

    @property
    def news(self) -> bool:
        return bool(self._new or self._events or self._passes)

    def _key(self) -> dict[str, Any]:
        """All that a reader needs who begins here; what this line reports as new is not part of it."""
        fresh = {one[0] for one in self._new}
        lanes = [self._described(lane) for lane in self._lanes.values() if lane.number not in fresh]
        decoding = {str(engine): [lane.number for lane in one.decoding] for engine, one in self.engines.items()}
        return {"lanes": lanes, "decoding": decoding, "engines": {str(n): one.up for n, one in self.engines.items()}}

    def _forget(self, now_s: float) -> None:
        for id, (lane, at_s, told) in list(self._moving.items()):
            known = self.engines[lane.engine]
            restarted = known.up and known.up_s > at_s
            if now_s - at_s > FORGET_S or (restarted and now_s - known.up_s > RESUME_S):
                del self._moving[id]
                self._lanes.pop(id, None)
                if not told:
                    ended_s = at_s if restarted else now_s
                    self._events.append(["end", self._at(ended_s), lane.number, "lost", 0, None, None])


def weighted(samples: Iterable[tuple[float, float, int]], shares: Iterable[float]) -> list[float]:
    """Percentiles of (at, value, weight).

    >>> weighted([(0.0, 1.0, 9), (0.0, 5.0, 1)], (0.5, 0.95))
    [1.0, 5.0]
    """
    ordered = sorted((value, weight) for _, value, weight in samples)
    total = sum(weight for _, weight in ordered)
    found: list[float] = []
    for share in shares:
        seen = 0
        for value, weight in ordered:
            seen += weight
            if seen >= share * total:
                found.append(round(value, 5))
                break
    return found


def header(panes: list[str], **facts: Any) -> dict[str, Any]:
    """The first line of a recording, and the first event of a stream."""
    return {"shoal_live": FORMAT, "panes": panes, **facts}
