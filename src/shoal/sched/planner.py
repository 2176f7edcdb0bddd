"""Planner: what the next pass computes.

Fills a pass in this order: running requests that decode, prompts under way, waiting requests (admit.py), and last the
draft tokens, for which no request is preempted or delayed. Then freezes it into a StepPlan and counts on what it will
do. Owns the number of the next pass. Knows no torch and no clock.
"""

from itertools import accumulate, islice

from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan
from shoal.core.request import Request, State
from shoal.sched.admit import Admitter
from shoal.sched.flight import Flight
from shoal.sched.pass_builder import (
    PassBuilder,
    count_on,
    grown_blocks,
    row_start,
)
from shoal.sched.steady import NOTHING
from shoal.sched.tables import SharedTables
from shoal.sched.victims import Victims


class Planner:
    """Builds passes."""

    def __init__(self, tables: SharedTables, admitter: Admitter, victims: Victims) -> None:
        self._tables = tables
        self._policies = tables.policies
        self._admitter = admitter
        self._victims = victims
        self._step = 0

    def plan(self, now_s: float) -> StepPlan | None:
        """The next pass, or None if there is nothing to compute before another pass comes back."""
        tables = self._tables
        events = PassEvents(self._step, planned_s=now_s, budget_tokens=tables.limits.max_num_batched_tokens)
        cap = self._policies.lanes.cap
        if tables.flights and self._policies.drafts.waits(tables.flights):
            return None  # its drafts, or those of the next pass, are worth more than a pass planned early
        if tables.suspects:
            if tables.flights:
                return None  # one pass at a time, so that it is certain which requests were in it
            batch = self._build_suspects(events, now_s)
        elif cap:
            batch = self._build_lanes(events, now_s, cap)
        else:
            batch = self._build(PassBuilder(self._budget), events, now_s)
        # copies go out even if nothing is computed; and with nothing else to wait for, wait for them
        kv = tables.kv
        if batch.takes or kv.has_orders or (kv.transfers and not tables.flights):
            return self.freeze(batch, events)
        tables.between.preempted += events.preempted
        return None

    @property
    def _budget(self) -> int:
        return self._tables.groups.budget(self._tables.limits.max_num_batched_tokens)

    def _build_lanes(self, events: PassEvents, now_s: float, cap: int) -> PassBuilder:
        """A pass of short or of long sequences, whichever is next; of the others, if those have nothing to compute."""
        tables, lanes = self._tables, self._policies.lanes
        first, second = lanes.order()
        batch = self._build(PassBuilder(self._budget, cap, first), events, now_s)
        if batch.takes:
            lanes.ran(first, other_waits=any(map(batch.excludes, (*tables.running, *tables.waiting))))
            return batch
        batch = self._build(PassBuilder(self._budget, cap, second), events, now_s)
        if batch.takes:
            lanes.ran(second, other_waits=False)
        return batch

    def _build_suspects(self, events: PassEvents, now_s: float) -> PassBuilder:
        """A pass of requests that may have broken an earlier one, apart from all others."""
        tables, group = self._tables, self._tables.suspects.group
        for request in list(tables.running):
            if request not in group:
                tables.vacate(request, State.WAITING)
                tables.enqueue(request)
        batch = PassBuilder(self._budget)
        batch.only = group
        return self._build(batch, events, now_s)

    def _build(self, batch: PassBuilder, events: PassEvents, now_s: float) -> PassBuilder:
        """Fill a pass with requests that it does not exclude."""
        if self._policies.prefill.alone:
            self._prefill(batch, events, now_s)
            if not batch.takes:
                batch.left = max(batch.left, self._tables.limits.max_num_batched_tokens)
                self._decode(batch, events)
        else:
            self._decode(batch, events)
            self._prefill(batch, events, now_s)
        if batch.decodes and batch.left > 0 and self._policies.drafts.on and batch.only is None:
            self._draft(batch)
        return batch

    def _prefill(self, batch: PassBuilder, events: PassEvents, now_s: float) -> None:
        """Prompts: first those under way, then those that wait."""
        self._bound_prompts(batch, events)
        kept = self._continue_prompts(batch, events)
        if self._policies.prefill.alone or not batch.lost:  # blocks freed for decodes are not for waiting requests
            self._admitter.admit(batch, events, now_s)
        if kept:
            self._rest_to_prompts(batch)

    def _bound_prompts(self, batch: PassBuilder, events: PassEvents) -> None:
        """Limit what is left of the pass for prompts, by the budget policy."""
        if self._policies.budget.learns:
            batch.left = self._policies.budget.prompt_tokens(self._tables.running, batch.decodes, batch.left)
            events.budget_tokens = min(events.budget_tokens, batch.decodes + batch.left)

    def _decode(self, batch: PassBuilder, events: PassEvents) -> None:
        """Running requests that need one position. Hot: once per running request and pass."""
        tables = self._tables
        if not batch.picky and not tables.grammars:
            steady = (tables.steady or NOTHING).renewed(tables.running)
            if steady is not None and steady.ready(batch, tables.kv):
                tables.steady = steady
                batch.take_steady(steady.rows.requests)
                return
        tables.steady = None
        takes, runs = batch.takes, State.RUNNING
        running = list(self._tables.running)
        if batch.picky:
            running = [request for request in running if not batch.excludes(request)]
        for request in running:
            planned, visible, end = request.planned, len(request.tokens) + request.pending, request.end
            # request.need() == 1, without the call
            if (visible if visible < end else end) - planned == 1 and batch.left > 0:
                if request.state is runs and planned < request.holding.capacity:
                    takes[request] = 1  # as batch.add, without the call
                    batch.left -= 1
                    batch.decodes += 1
                else:
                    self._give(batch, events, request, 1)
        self._victims.requeue(batch)

    def _continue_prompts(self, batch: PassBuilder, events: PassEvents) -> bool:
        """Running requests that need more than one position. Returns whether some of the pass was kept for others.

        A giant prompt must not fill pass after pass while requests wait that go before it; nor may an endless stream of
        those stop it, so a quarter of what is left is for the prompt that has run longest.
        """
        if batch.steady and batch.decodes == len(self._tables.running):
            return False  # all of them decode
        key, kept = self._policies.order.prefill_key, False
        prompts = [
            request
            for request in self._tables.running
            if request not in batch.takes  # they decode
            and request.need() > 1
            and not batch.excludes(request)
        ]
        if not prompts:
            return False
        oldest = prompts[0]
        prompts.sort(key=lambda request: (request is not oldest, key(request)))
        waiting = [(key(one)[0], len(one.tokens)) for one in self._admitter.next_in_queue()]
        running = [(key(one)[0], one.need()) for one in prompts]
        for request in prompts:
            if batch.left <= 0:
                break
            if request.state is State.RUNNING:
                rank = key(request)[0]
                ahead = waiting + running if request is oldest else waiting  # the other prompts are sorted
                wanted = sum(tokens for other, tokens in ahead if other < rank)
                left = max(batch.left - wanted, batch.left // 4, 1)
                kept = kept or left < batch.left
                count = self._policies.prefill.take(request.need(), left, not batch.prompts)
                if count:
                    self._give(batch, events, request, count)
        self._victims.requeue(batch)
        return kept

    def _rest_to_prompts(self, batch: PassBuilder) -> None:
        """What the started requests did not use goes to the prompts in this pass, where there are blocks for it."""
        for request in sorted(batch.takes, key=self._policies.order.prefill_key):
            given = batch.takes[request]
            if batch.left <= 0:
                break
            if request.need() > given:
                count = self._policies.prefill.take(request.need(), given + batch.left, True)
                if count > given and self._grow(batch, request, count):
                    batch.raise_to(request, count)

    def _give(self, batch: PassBuilder, events: PassEvents, request: Request, count: int) -> None:
        """Let it compute `count` more positions, preempting others if there are no blocks left."""
        tables = self._tables
        if request.state is not State.RUNNING:
            return  # it was preempted earlier in this pass
        while not self._grow(batch, request, count):
            if tables.fetching:  # blocks reserved by a request that does not run yet are taken first
                tables.stop_fetching(next(reversed(tables.fetching)))
                continue
            if tables.kv.leaving:
                return  # a victim's blocks are free as soon as they have been copied
            victim = self._policies.order.victim(self._victims.candidates())
            self._victims.preempt(victim, batch, events)
            if victim is request:
                return
        batch.add(request, count, prompt=count > 1)

    def _grow(self, batch: PassBuilder, request: Request, count: int) -> bool:
        """Blocks for `count` more positions; False if there are not enough, and then nothing has moved."""
        if not self._tables.kv.grow(request.holding, request.planned + count):
            return False
        if len(request.holding.blocks) != request.blocks_sent and request not in batch.starting:
            batch.grown[request] = None
        return True

    def _draft(self, batch: PassBuilder) -> None:
        """Draft tokens for decoding requests: what the rest of the pass and the free blocks allow."""
        tables, policies = self._tables, self._policies
        room = batch.left
        if policies.budget.learns:
            room = policies.budget.draft_tokens(tables.running, sum(batch.takes.values()), room)
        if room < 1:
            return
        for request, draft in policies.drafts.choose(batch, tables.flights, room).items():
            # blocks that running requests need next are not for drafts: none is to be preempted for them
            spare = max(0, tables.kv.pool.free - len(tables.running)) * tables.kv.block_size
            most = min(len(draft.tokens), request.holding.capacity + spare - request.planned - 1)
            if most > 0 and self._grow(batch, request, 1 + most):
                batch.add_draft(request, draft.cut(most))

    def freeze(self, batch: PassBuilder, events: PassEvents) -> StepPlan:
        """Turn the pass into arrays, and count on what they will do. Hot: once per scheduled request and pass."""
        tables, step = self._tables, self._step
        starting = tuple(row_start(request) for request in batch.starting)
        if batch.prompts and self._policies.order.counts:
            self._charge_prompts(batch)
        steady = tables.steady = tables.steady if batch.steady and not batch.drafts else None
        if steady is None:
            counted = count_on(batch, list(batch.takes), step, events)
        else:
            counted = steady.advance(step, known=not tables.flights)
            if len(batch.takes) > len(steady):  # prompts, of which the pass may have room for a single position
                prompts = list(islice(batch.takes, len(steady), None))
                counted = counted.followed_by(count_on(batch, prompts, step, events))
        rows, counts, starts, ends, draws, arrays = counted
        drafted = sum(len(draft.tokens) for draft in batch.drafts.values())
        width = self._policies.layout.width(counts) if counts else 0
        dead = self._dead_rows(batch) if width and batch.decodes else 0
        plan = StepPlan(
            step,
            starting,
            grown_blocks(batch),
            rows.rows,
            rows.generations,
            *arrays,
            tables.kv.take_orders(),
            width=width,
            dead=dead,
        )
        events.dead_rows = dead
        events.scheduled_ids = rows.ids
        events.scheduled_starts, events.scheduled_counts = starts, counts
        self._measure(plan, sum(counts), sum(ends), sum(draws), events)
        rejected = None
        if drafted or any(flight.drafted for flight in tables.flights):
            rejected = [request.rejected for request in rows.requests]
        masked = _masked(rows.requests, draws) if tables.grammars else []
        ahead = bool(tables.flights)
        left = tables.departures
        tables.flights.append(
            Flight(plan, rows, ends, draws, events, masked, steady, left, ahead, batch.drafts, drafted, rejected)
        )
        self._step += 1
        return plan

    def _charge_prompts(self, batch: PassBuilder) -> None:
        for request, count in batch.takes.items():
            self._policies.order.computed(request, 1 if request in batch.drafts else count)

    @staticmethod
    def _measure(plan: StepPlan, positions: int, reads: int, lines: int, events: PassEvents) -> None:
        """How large the pass is, for readers that know what positions cost."""
        events.computed_tokens, events.kv_reads, events.pairs, events.lines = positions, reads, reads, lines
        if positions > len(plan.rows):  # else every row decodes: its position attends to all up to it
            counts = plan.counts
            events.pairs = int((counts * plan.starts + counts * (counts + 1) // 2).sum())

    def _dead_rows(self, batch: PassBuilder) -> int:
        """Rows of the rectangle that are padding: of requests that have ended, or whose last token is on the way."""
        running = self._tables.running
        return self._policies.layout.dead_rows(
            sum(request not in batch.takes and request.need() == 0 for request in running)
        )


def _masked(requests: list[Request], draws: list[int]) -> list[tuple[int, Request]]:
    """(its first line among the draws of the pass, request) of those that draw under a grammar."""
    drawing = zip(requests, draws, accumulate(draws, initial=0), strict=False)
    return [(line, request) for request, count, line in drawing if count and request.grammar is not None]
