"""The batch as lanes: for each request, what was computed for it and when, and the padding beside it.

Knows records only. Does not know how lanes are drawn.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal.bench.record import PassRecord, RequestRecord, RunRecord

PROMPT, DECODE, AGAIN, VAIN, PAD = "prompt", "decode", "again", "vain", "pad"


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval in one lane. Its length is the work: a row with 1 of 100 columns takes 1% of its pass."""

    kind: str
    from_s: float
    to_s: float


@dataclass(slots=True)
class Lane:
    """One request, from its arrival to the last token its client received."""

    request: RequestRecord
    pieces: list[Piece] = field(default_factory=list)

    def add(self, kind: str, from_s: float, to_s: float, near_s: float) -> None:
        """Append a piece, or extend the last one if it has the same kind and ended just before."""
        if to_s <= from_s:
            return
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.kind == kind and from_s - last.to_s <= near_s:
            self.pieces[-1] = Piece(kind, last.from_s, to_s)
        else:
            self.pieces.append(Piece(kind, from_s, to_s))


def spans(passes: Sequence[PassRecord]) -> Iterator[tuple[float, float, PassRecord]]:
    """(from, to, pass). With two in flight, a pass is planned while the previous computes and starts when that ends."""
    before_s = 0.0
    for one in passes:
        yield max(one.planned_s, min(before_s, one.committed_s)), one.committed_s, one
        before_s = one.committed_s


def rectangle_width(one: PassRecord) -> int:
    """Columns of the pass's rectangle; 0 if the padding counted is too little for there to be one."""
    width = max((count for _, _, count in one.rows), default=0)
    missing = sum(width - count for _, _, count in one.rows)
    return width if one.padded and one.padded >= missing else 0


def needed(run: RunRecord) -> list[list[int]]:
    """For each pass, how many positions of each row its request needed: none of a row that came after its end, and of
    draft tokens those that were accepted, which shows in where its next row starts."""
    next_start: dict[int, int] = {}
    found: list[list[int]] = []
    for one in reversed(run.passes):
        found.append([])
        for number, position, positions in one.rows:
            request = run.requests[number]
            until = next_start.get(number, request.prompt + request.output - 1)
            drafted = position >= request.prompt and position < until < position + positions
            found[-1].append(0 if number in one.late else until - position if drafted else positions)
            next_start[number] = position
    return found[::-1]


def lanes(run: RunRecord, count: int, near_s: float = 0.0) -> list[Lane]:
    """Lanes of the first `count` requests to arrive. Pieces of a kind less than near_s apart become one.

    A pass records how many rows of its rectangle were finished, not which: they are taken to be the last to finish.
    """
    first = sorted(range(len(run.requests)), key=lambda number: run.requests[number].arrived_s)[:count]
    shown = {number: Lane(run.requests[number]) for number in first}
    last_pass = {number: index for index, one in enumerate(run.passes) for number, _, _ in one.rows}
    computed: dict[int, int] = defaultdict(int)
    ended: list[int] = []
    for index, ((from_s, to_s, one), kept) in enumerate(zip(spans(run.passes), needed(run), strict=True)):
        for number in ended[len(ended) - one.dead_rows :] if one.dead_rows else ():
            if number in shown:
                shown[number].add(PAD, from_s, to_s, near_s)
        width = rectangle_width(one)
        for (number, position, positions), useful in zip(one.rows, kept, strict=True):
            if number in shown:
                kind = kind_of(run.requests[number], position, computed[number])
                # min: rounding must not carry a piece into the next one
                until_s = min(to_s, from_s + (to_s - from_s) * (positions / width if width else 1))
                useful_s = until_s if useful == positions else from_s + (until_s - from_s) * useful / positions
                useful_s = min(useful_s, until_s)
                shown[number].add(kind, from_s, useful_s, near_s)
                shown[number].add(VAIN, useful_s, until_s, near_s)
                shown[number].add(PAD, until_s, to_s, near_s)
            computed[number] = max(computed[number], position + useful)
        ended += [number for number, _, _ in one.rows if last_pass[number] == index]
    return list(shown.values())


def kind_of(request: RequestRecord, position: int, computed: int) -> str:
    """The kind of work in computing this request from `position` on."""
    if position < computed:
        return AGAIN
    return PROMPT if position < request.prompt else DECODE
