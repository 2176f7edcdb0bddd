"""Speculation: which requests a drafter is asked for, and how many of its tokens each pass verifies.

A pass yields one token per decoding row, and each draft token adds its chance to be accepted (acceptance.py). It also
adds a position (decodetime.py). The best drafts of all rows are taken, in the order of their chances, as many as make
the pass yield most tokens per second: some for a few rows, none for many, whichever machine it is. What a pass takes
without drafts is measured first, in two passes of each size, and in one of 64 from then on.

    chances   .9 .8 .7 │ .5 .3 .2 …          tokens   rows + .9 + .8 + .7
    seconds   what rows + 3 positions take, and what the host adds between two passes with drafts

Draft tokens that are not verified are compared with what the request generates anyway, which is exact and costs
nothing: a draft never changes a draw. So a request whose text becomes predictable again is found. Asking costs the
host time; requests for which it gains less than it costs are asked for in turns, within a small share of each pass.

A draft model is asked last, for requests that have no other draft, and only where its own passes pay (modeldrafts.py).

With two passes in flight a draft would continue tokens that the host does not know. So the pass with drafts is planned
when none is in flight (`waits`), if it is expected to be worth the time that the device then waits for the host.

Owns what is known of the requests' drafts. Knows no blocks, no torch and no clock.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft, Drafter
from shoal.core.request import Request
from shoal.sched.acceptance import Acceptance, Predictable, agreeing
from shoal.sched.decodetime import DecodeTimes, Gap
from shoal.sched.flight import Flight
from shoal.sched.modeldrafts import NoModelDrafts
from shoal.sched.pass_builder import PassBuilder
from shoal.sched.steptime import StepModel

MARGIN = 0.05  # by which a pass must be better with drafts than without
SHARE = 0.005  # of a pass: what asking in turns may cost
ASK_S = 1e-5  # of one request, besides what the drafter takes
EAGER = 2.0  # a request is asked for in every pass if that gains so many times what it costs
FIRST_WORTH = 0.3  # tokens that asking is expected to gain at first
NEWEST = 0.1  # weight of the newest in that expectation
HOST_S = 4e-4  # between two passes, before that is known
DRAFTING_S = 1e-4  # … and what drafts add to it
PROMISING = 0.3  # tokens that a draft must be expected to gain for a pass in flight to be waited for
TRUST_BACK = 0.002  # of the trust in forecasts that comes back with each pass

Offer = tuple[Request, Draft, list[float]]  # a draft, and the chance that each of its tokens is accepted


class Row:
    """One running request: how predictable it is, and the draft that was not verified."""

    __slots__ = ("accepted", "at", "forecast", "own", "proposed", "seen", "unverified", "worth")

    def __init__(self) -> None:
        self.own = Predictable()
        self.worth = FIRST_WORTH  # tokens that asking for it gains
        self.forecast = 0.0  # tokens that its next draft is expected to gain
        self.unverified: Draft | None = None
        self.at = 0  # the place of that draft's first token
        self.seen = 0  # tokens that it had when it was last asked for
        self.proposed = self.accepted = 0  # draft tokens so far


class Speculation:
    """Asks a drafter, and takes what makes the pass better."""

    on = True

    def __init__(
        self, drafter: Drafter, steps: StepModel, vocab_size: int, most: int, models: NoModelDrafts | None = None
    ) -> None:
        self.drafter = drafter
        self.models = models or NoModelDrafts()
        self.names: Sequence[str] = (*drafter.names, *self.models.names)
        self.most = most  # draft tokens of one row and pass
        self.times = DecodeTimes(steps)
        self.plain, self.ahead, self.drafted = Gap(), Gap(), Gap()
        self.acceptance = Acceptance()
        self._steps = steps
        self._vocab_size = vocab_size
        self._rows: dict[Request, Row] = {}  # requests that have run and not ended
        self._eager: dict[Request, Row] = {}  # running requests that are asked for in every pass
        self._turns: OrderedDict[Request, Row] = OrderedDict()  # the other running requests
        self._forecasts: dict[Request, Row] = {}  # running requests whose next draft is expected to be accepted
        self._trust = 1.0  # share of the forecasts that came true, of late
        self._waited_for: Flight | None = None  # the pass that is to come back before the next is planned
        self._credit_s = 0.0  # what asking for requests of `_turns` may take
        self._ask_s = ASK_S + drafter.cost_s(1, 1)
        self._read = 0  # KV positions that the last pass read
        self._committed_s: float | None = None  # when the last pass came back; None: nothing ran since

    # ---- requests come and go -------------------------------------------------------------------------------------

    def started(self, request: Request) -> None:
        row = self._rows.get(request)
        if row is None:
            row = self._rows[request] = Row()
        self._eager[request] = row

    def stopped(self, request: Request) -> None:
        self._eager.pop(request, None)
        self._turns.pop(request, None)
        self._forecasts.pop(request, None)

    def ended(self, request: Request, by_itself: bool) -> None:
        self._rows.pop(request, None)
        self.drafter.ended(request, by_itself)
        self.models.ended(request, by_itself)

    # ---- a pass is planned ----------------------------------------------------------------------------------------

    def waits(self, flights: Sequence[Flight]) -> bool:
        if not flights or self.drafter.ahead:
            return False
        newest = flights[-1]
        if newest.drafts or self._waited_for is newest:
            return True
        if self._waited_for is not None:  # in vain: the pass planned since had no room for drafts
            self._waited_for = None
            self._forecasts.clear()
            self.models.in_vain()
        rows, positions = len(newest.requests), newest.events.computed_tokens
        if not rows or not (self._forecasts or self.models.names):
            return False
        costs, pays = PassCosts(self, rows, positions, positions > rows), False
        if self._forecasts:
            gained = self._trust * sum(row.forecast for row in self._forecasts.values())
            pays = costs.pays(len(self._forecasts) + int(gained), gained)
        if not pays and not self.models.worth_waiting(self._running(newest), costs, self.most):
            return False
        self._waited_for = newest
        return True

    def _running(self, flight: Flight) -> list[Request]:
        """Its requests that still run, and go on after it."""
        running = (request for request in flight.requests if request in self._eager or request in self._turns)
        return [request for request in running if request.end - request.planned > 1] if self.models.names else []

    def choose(self, batch: PassBuilder, flights: Sequence[Flight], room: int) -> Mapping[Request, Draft]:
        positions = sum(batch.takes.values()) if batch.prompts else len(batch.takes)
        costs = PassCosts(self, batch.decodes, positions, batch.prompts > 0)
        if flights and not self.drafter.ahead:
            if costs.can_pay(self.most, room):
                self._look_ahead(batch, costs, room)
            return {}
        waited, self._waited_for = self._waited_for is not None, None
        expected, self._forecasts = self._forecasts, {}
        taken = self._take(batch, costs, room, expected) if costs.can_pay(self.most, room) else {}
        if expected and not taken:
            self._trust -= NEWEST * self._trust  # a pass in flight was waited for, and for nothing
        if waited and not taken and not self.models.asked:
            self.models.in_vain()
        return taken

    def _take(
        self, batch: PassBuilder, costs: "PassCosts", room: int, expected: Mapping[Request, Row]
    ) -> Mapping[Request, Draft]:
        """Ask for drafts, and take the best of them."""
        asked = self._asked(batch, costs, room, expected)
        drafts = self.drafter.propose(asked) if asked else {}
        computed = self._compute(batch, costs, room, drafts) if self.models.names else {}
        taken: dict[Request, Draft] = {}
        for request, draft in computed.items():
            if draft.on_device and room > 0:
                taken[request] = draft.cut(room)
                room -= len(taken[request].tokens)
        drafts = {request: draft for request, draft in {**drafts, **computed}.items() if not draft.on_device}
        offers = [(request, draft, self._chances(request, draft)) for request, draft in drafts.items()]
        taken |= best_drafts(offers, costs, room) if offers else {}
        for request in {**asked, **dict.fromkeys(computed)}:
            if request not in taken:
                row = self._rows[request]
                row.unverified = drafts.get(request)
                row.at = len(request.tokens) + (request.pending if self.drafter.ahead else 0)
                row.forecast = 0.0
                if request in asked:
                    self._gained(request, row, 0.0, costs.token_s)
        return taken

    def _compute(
        self, batch: PassBuilder, costs: "PassCosts", room: int, drafts: Mapping[Request, Draft]
    ) -> Mapping[Request, Draft]:
        """Drafts of the draft model, if it pays, for requests that have no other."""
        candidates: dict[Request, int] = {}
        for request in batch.takes:
            most = self._usable(request, batch) if request not in drafts else 0
            if most > 0:
                candidates[request] = min(most, self.most)
                self._compare(request, self._rows[request])
        wanted = self.models.choose(candidates, costs, room)
        if not wanted:
            return {}
        found = self.models.propose(wanted)
        costs.spend(self.models.spent_s)
        return found

    def _look_ahead(self, batch: PassBuilder, costs: "PassCosts", room: int) -> None:
        """Note what drafts would gain if the passes in flight were waited for. None can be taken now."""
        asked = self._asked(batch, costs, room, {}, blind=True)
        if not asked:
            return
        drafts = self.drafter.propose(asked)
        least = costs.position_s / costs.token_s
        for request in asked:
            row, draft = self._rows[request], drafts.get(request)
            row.unverified, row.at = draft, len(request.tokens)
            chances = self._chances(request, draft) if draft is not None else ()
            gained = sum(chance for chance in chances if chance > least)
            row.forecast = gained if gained > PROMISING else 0.0
            if row.forecast:
                self._forecasts[request] = row
            else:
                self._forecasts.pop(request, None)
            self._gained(request, row, row.forecast, costs.token_s)

    def _asked(
        self, batch: PassBuilder, costs: "PassCosts", room: int, also: Mapping[Request, Row], blind: bool = False
    ) -> dict[Request, int]:
        """The requests to ask for, and how many tokens each can use. Learns what came of their last drafts."""
        asked: dict[Request, int] = {}
        for request in dict.fromkeys([*self._eager, *also, *self._due(costs)]):
            row = self._rows[request]
            row.seen = len(request.tokens)
            self._compare(request, row)
            most = request.end - len(request.tokens) if blind else self._usable(request, batch)
            if most > 0:
                asked[request] = min(most, self.most, room)
        return asked

    def _usable(self, request: Request, batch: PassBuilder) -> int:
        """How many draft tokens it can use in this pass."""
        if batch.takes.get(request) != 1 or request in batch.starting or request.need() != 1:
            return 0  # not in this pass, or it computes its prompt
        if request.grammar is not None and request.pending:
            return 0  # its grammar does not know where it is
        return request.end - request.planned - 1

    def _due(self, costs: "PassCosts") -> list[Request]:
        """The requests whose turn it is."""
        turns, due = self._turns, []
        self._credit_s += SHARE * costs.base_s
        for request, row in turns.items():
            cost_s = ASK_S + self.drafter.cost_s(1, len(request.tokens) - row.seen)
            if cost_s > self._credit_s:
                break
            self._credit_s -= cost_s
            due.append(request)
        else:
            self._credit_s = 0.0  # all of them had their turn
        for request in due:
            turns.move_to_end(request)
        return due

    def _compare(self, request: Request, row: Row) -> None:
        """Learn from a draft that was not verified: some of its tokens may be known by now."""
        draft, row.unverified = row.unverified, None
        if draft is not None and not self.drafter.by_chance:
            came = request.tokens[row.at : row.at + len(draft.tokens)]
            right = agreeing(draft.tokens, came)
            self.acceptance.learn(draft, right, row.own, len(came))
            self.models.learn(request, draft, right, len(came))

    def _chances(self, request: Request, draft: Draft) -> list[float]:
        """Of the tokens that the request can have: a draft ends before an end token, and where a grammar forbids it."""
        chances = self.acceptance.chances(draft, self._rows[request].own)
        tokens = draft.tokens[: len(chances)]
        ends, most = request.stop_ids, len(tokens)
        for place, token in enumerate(tokens):
            if token in ends or not 0 <= token < self._vocab_size:
                most = place
                break
        if request.grammar is not None and most:
            most = request.grammar.allows(tokens[:most])
        return chances[:most]

    # ---- a pass comes back ----------------------------------------------------------------------------------------

    def meanwhile(self) -> None:
        self.models.settle()

    def committed(
        self, flight: Flight, accepted: Mapping[Request, int], tokens: int, busy_s: float, now_s: float, more: bool
    ) -> None:
        self.models.settle()
        rows, positions = len(flight.requests), flight.events.computed_tokens
        self._read = sum(flight.ends)
        before_s, self._committed_s = self._committed_s, now_s if more else None
        self._trust = min(1.0, self._trust + TRUST_BACK)
        if rows and positions - flight.drafted == rows:  # no prompts
            took_s = now_s - (before_s if before_s is not None else flight.events.planned_s)
            if (flight.drafts or self.models.spent_s) and self.times.known:
                flight.events.saved_s = tokens / rows * PassCosts(self, rows, rows, False).base_s - took_s
            if busy_s > 0:
                self.times.learn(positions, self._read, busy_s, bool(flight.drafts))
                gap = self.drafted if flight.drafts else self.ahead if flight.ahead else self.plain
                gap.learn(took_s - busy_s - self.models.spent_s)
        self.models.committed()
        if flight.drafts:
            self._verified(flight, accepted, PassCosts(self, rows, rows, False).token_s)

    def _verified(self, flight: Flight, accepted: Mapping[Request, int], token_s: float) -> None:
        events, expected, came = flight.events, 0.0, 0
        for request, draft in flight.drafts.items():
            right = accepted.get(request)
            if right is None:
                continue  # it has ended meanwhile
            for name, proposed, taken in draft.shares(right):
                events.proposed[name] = events.proposed.get(name, 0) + proposed
                events.accepted[name] = events.accepted.get(name, 0) + taken
            events.row_tokens.append(1 + right)
            row = self._rows.get(request)
            if row is None:
                continue  # … with this pass
            self.acceptance.learn(draft, right, row.own)
            self.models.learn(request, draft, right, len(draft.tokens))
            row.proposed += len(draft.tokens)
            row.accepted += right
            if draft.drafters[0][0] in self.models.names:
                continue  # what the other drafters gain is another matter
            expected += row.forecast
            came += right
            row.forecast = (row.forecast + right) / 2 if row.forecast else float(right)
            if request in self._eager or request in self._turns:
                if row.forecast > PROMISING:
                    self._forecasts[request] = row
                self._gained(request, row, right, token_s)
        if expected:
            self._trust += NEWEST * (min(1.0, came / expected) - self._trust)

    def _gained(self, request: Request, row: Row, tokens: float, token_s: float) -> None:
        """Asking for it gained so many tokens: ask again in the next pass, or when it is its turn."""
        row.worth += NEWEST * (tokens - row.worth)
        if row.worth * token_s > EAGER * self._ask_s:
            self._turns.pop(request, None)
            self._eager[request] = row
        elif request in self._eager:
            del self._eager[request]
            self._turns[request] = row

    # ---- time -----------------------------------------------------------------------------------------------------

    def rehearsed(self, positions: int, seconds: float, of_draft: bool = False) -> None:
        if of_draft:
            self.models.rehearsed(positions, seconds)
        else:
            self.times.rehearse(positions, seconds)

    def seconds(self, positions: int, prompts: bool) -> float:
        """How long the device takes for a pass."""
        if prompts and self._steps.known:
            return self._steps.seconds(positions, self._read)
        return self.times.seconds(positions, self._read)

    @property
    def gap_s(self) -> float:
        """How long it waits before a pass with drafts."""
        if self.drafted.passes:
            return self.drafted.seconds
        if not self.times.known:
            return 0.0
        return DRAFTING_S + (self.plain.seconds if self.plain.passes else HOST_S)

    @property
    def least_gap_s(self) -> float:
        """… and before one without, planned as early as possible."""
        return min((gap.seconds for gap in (self.ahead, self.plain) if gap.passes), default=0.0)

    def counts(self, request: Request) -> tuple[int, int]:
        row = self._rows.get(request)
        return (row.proposed, row.accepted) if row is not None else (0, 0)

    def check(self, running: Mapping[Request, None]) -> None:
        """It knows the running requests, and each once."""
        assert self._eager.keys() | self._turns.keys() == running.keys(), "drafts of other requests than those that run"
        assert not self._eager.keys() & self._turns.keys(), "a request is asked for twice"
        assert self._forecasts.keys() <= running.keys(), "a forecast for a request that does not run"


class PassCosts:
    """What a pass costs and yields, without drafts and with so many."""

    __slots__ = ("_gap_s", "_of", "base_s", "known", "positions", "prompts", "rows", "token_s")

    def __init__(self, of: Speculation, rows: int, positions: int, prompts: bool) -> None:
        self._of = of
        self._gap_s = of.gap_s
        self.rows, self.positions, self.prompts = max(1, rows), positions, prompts
        self.base_s = of.seconds(positions, prompts) + of.least_gap_s  # without drafts
        self.known = of.times.known
        self.token_s = self.base_s / self.rows if self.known else 1.0

    @property
    def position_s(self) -> float:
        """What one more position adds."""
        return self._of.seconds(self.positions + 1, self.prompts) - self._of.seconds(self.positions, self.prompts)

    def spend(self, seconds: float) -> None:
        """The drafts took so long to compute, whether they are used or not."""
        self.base_s += seconds
        self._gap_s += seconds

    def rate(self, tokens: int, gained: float, more_s: float = 0.0) -> float:
        """Tokens per second with so many draft tokens, which gain so many and take `more_s` to compute; 1 without."""
        with_s = self._of.seconds(self.positions + tokens, self.prompts) + self._gap_s + more_s
        return (self.rows + gained) * self.base_s / (self.rows * with_s)

    def pays(self, tokens: int, gained: float) -> bool:
        return self.rate(tokens, gained) > 1 + MARGIN

    def can_pay(self, most: int, room: int) -> bool:
        """Whether drafts can pay at all, if every token of them is accepted; `most` of one row. That depends on what
        the pass takes without them, so it is no until that was measured."""
        if self.known and not self.prompts and not self._of.times.measured(self.rows):
            return False
        return any(self.pays(tokens, tokens) for tokens in (1, 4, 2 * self.rows, most * self.rows) if tokens <= room)


def best_drafts(offers: Sequence[Offer], costs: PassCosts, room: int) -> Mapping[Request, Draft]:
    """The drafts that yield most tokens per second, cut to the tokens that do; none if there are more without."""
    ranked = [(-chance, place) for place, (_, _, chances) in enumerate(offers) for chance in chances]
    ranked.sort()
    best, highest, gained = 0, 1 + MARGIN, 0.0
    for tokens, (chance, _) in enumerate(ranked[:room], 1):
        gained -= chance
        if tokens <= 16 or not tokens % (tokens.bit_length() - 3):  # of many, some sizes are enough
            rate = costs.rate(tokens, gained)
            if rate > highest:
                best, highest = tokens, rate
    counts = Counter(place for _, place in ranked[:best])
    return {offers[place][0]: offers[place][1].cut(count) for place, count in counts.items()}
