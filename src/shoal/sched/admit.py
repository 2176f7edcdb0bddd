"""Admit: which waiting requests start in a pass.

The second half of planning: running requests have their share, now the queue is read in order. When a request does not
fit, no other overtakes it unless a policy allows that; an urgent one may preempt a running one; one that waits for
blocks from host memory keeps them. Owns the rules of starting; the tables hold what came of them.
"""

from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from shoal.core.events import Admitted, PassEvents
from shoal.core.request import Request, State
from shoal.kv.manager import Holding
from shoal.sched.batching import Door
from shoal.sched.pass_builder import PassBuilder
from shoal.sched.queue import PATIENCE
from shoal.sched.tables import SharedTables
from shoal.sched.victims import Victims

LOOK_PAST = 64  # requests behind one that may not start yet that are tried


class Start(Enum):
    """What came of trying to start a request."""

    STARTED = 1
    FETCHING = 2  # it holds its blocks, and some of them are on their way from the host
    NO_BLOCKS = 3
    NO_BUDGET = 4  # the pass is full


@dataclass
class Slots:
    """What is left while the queue is read."""

    free: int  # slots
    joining: int  # requests that the batching policy lets in
    kept: int  # slots of the headroom
    held_blocks: int = 0  # blocks kept free for requests that run in another lane
    ahead: set[Request] = field(default_factory=set)  # requests that wait for their blocks and keep them
    blocked: Request | None = None  # the request that does not fit
    past: int = 0  # requests behind it that were passed over

    def take(self, member: bool) -> None:
        self.free -= 1
        self.joining -= not member

    def give_back(self, member: bool) -> None:
        self.free += 1
        self.joining += not member


class Admitter:
    """Starts waiting requests."""

    def __init__(self, tables: SharedTables, victims: Victims) -> None:
        self._tables = tables
        self._victims = victims
        self._policies = tables.policies
        self.more_coming = False  # the driver knows of requests that are still to arrive

    def door(self, now_s: float) -> Door:
        tables = self._tables
        first = tables.groups.first_of(tables.waiting)
        return Door(
            now_s,
            tables.limits.max_num_seqs - len(tables.running),
            len(tables.groups.members),
            len(tables.waiting),
            first.arrived_s if first else now_s,
            self.more_coming,
        )

    def next_in_queue(self) -> list[Request]:
        """The first waiting requests, if any may start while others run."""
        tables = self._tables
        full = len(tables.running) >= tables.limits.max_num_seqs and not self._policies.order.overtakes
        if full or not tables.waiting or self._policies.batching.grouped:
            return []
        return list(islice(tables.waiting.in_order(), LOOK_PAST))

    def admit(self, batch: PassBuilder, events: PassEvents, now_s: float) -> None:
        """Start waiting requests in order, as far as they fit."""
        tables, policies = self._tables, self._policies
        if not tables.waiting:
            return
        joining = policies.batching.may_join(self.door(now_s))
        preempted_members = len(tables.groups.members) > len(tables.running)
        overtakes = policies.order.overtakes and not policies.batching.grouped
        if joining <= 0 and not preempted_members and not overtakes:
            return
        for request in self._choose(batch, events, now_s, joining):
            tables.dequeue(request)
            waited_s = now_s - request.arrived_s
            resumed = batch.starting[request]
            events.admitted.append(Admitted(request.id, waited_s, request.planned, resumed, request.prompt_len))
        self._victims.requeue(batch)

    def _choose(self, batch: PassBuilder, events: PassEvents, now_s: float, joining: int) -> list[Request]:
        """Start the requests that may start, and return them. The queue is only read."""
        tables, grouped = self._tables, self._policies.batching.grouped
        most, headroom = tables.limits.max_num_seqs, self._policies.headroom
        slots = Slots(most - len(tables.running), joining, headroom.slots(most) if headroom.share else 0)
        passing = self._policies.order.overtakes or slots.kept > 0  # some may start although one ahead does not fit
        chosen: list[Request] = []
        for request in tables.waiting.in_order():
            if batch.left <= 0 or not tables.rows.free or slots.past > LOOK_PAST:
                break
            if slots.blocked is not None and not self._may_pass(request, slots.blocked):
                slots.past += 1
                continue
            if grouped and slots.joining <= 0 and request not in tables.groups.members:
                continue
            start = self._try(batch, events, request, slots, now_s)
            if start is Start.STARTED:
                chosen.append(request)
                if slots.blocked is not None:
                    slots.blocked.overtaken += 1
            elif start is Start.NO_BUDGET:
                break
            elif start is Start.NO_BLOCKS:
                slots.blocked = request
                if not passing:
                    break
        return chosen

    def _try(
        self, batch: PassBuilder, events: PassEvents, request: Request, slots: Slots, now_s: float
    ) -> Start | None:
        """Start this request if there are a slot and blocks for it; None: it keeps its slot and starts later."""
        tables = self._tables
        member = request in tables.groups.members  # preempted, of the group that runs: it needs no leave to join
        favoured = not slots.kept or not tables.running or self._favoured(request)
        if slots.free <= (0 if favoured else slots.kept):
            if batch.excludes(request) or not self._preempt_for(batch, events, request, now_s):
                return Start.NO_BLOCKS
            slots.free += 1
        slots.take(member)
        if request.pending or (request.group and request.group.must_wait(request, tables.kv.block_size)):
            return None  # its last token, or its leader's blocks, are still on the way
        if batch.only is not None and request not in batch.only:
            slots.give_back(member)
            return None
        if batch.excludes(request):
            slots.held_blocks += tables.kv.blocks_for(self._tokens_to_hold(request))
            return None
        spare = slots.held_blocks
        if not favoured:
            spare += self._policies.headroom.blocks(tables.kv.pool.total)
        start = self._start(batch, request, spare)
        while start is Start.NO_BLOCKS and self._find_blocks(batch, events, request, slots.ahead, now_s):
            start = self._start(batch, request, spare)
        if start is Start.FETCHING:
            slots.ahead.add(request)
        elif start is Start.NO_BLOCKS:
            slots.give_back(member)
        return start

    def _may_pass(self, request: Request, blocked: Request) -> bool:
        """Whether it may start although `blocked`, ahead of it, does not fit."""
        if self._policies.order.may_overtake(request, blocked):
            return True
        return self._policies.headroom.share > 0 and self._favoured(request) and not self._favoured(blocked)

    def _favoured(self, request: Request) -> bool:
        """Whether it may use the headroom. A request passed over too often may too, or it would wait for ever."""
        if request.overtaken >= PATIENCE or self._policies.headroom.may_use(request):
            return True
        return self._policies.order.favours(request, self._tables.running)

    def _preempt_for(self, batch: PassBuilder, events: PassEvents, request: Request, now_s: float) -> bool:
        """Preempt a running request for this one, if it is urgent and the order policy names a victim."""
        order = self._policies.order
        allowed = order.overtakes and self._policies.preempt.preempts and not self._policies.batching.grouped
        if not allowed or self._tables.suspects or not order.urgent(request, now_s):
            return False
        victim = order.victim_for(request, [one for one in self._victims.candidates() if one not in batch.starting])
        if victim is None:
            return False
        self._victims.preempt(victim, batch, events)
        return True

    def _find_blocks(
        self, batch: PassBuilder, events: PassEvents, request: Request, ahead: set[Request], now_s: float
    ) -> bool:
        """Free blocks for a request that does not fit: those reserved by requests behind it, or a victim's."""
        for other in list(self._tables.fetching):
            if other is not request and other not in ahead:
                self._tables.stop_fetching(other)
                return True
        if self._tables.kv.leaving:
            return False  # blocks are about to be free
        return self._preempt_for(batch, events, request, now_s)

    def _tokens_to_hold(self, request: Request) -> int:
        """Positions to hold blocks for when it starts."""
        if request.preemptions >= self._tables.max_preemptions:
            return request.end  # it reached its preemption limit: from now on it never runs short
        return self._policies.memory.tokens_to_hold(request)

    def _reserve(self, request: Request, spare: int) -> Holding | None:
        kv, running = self._tables.kv, len(self._tables.running)
        spare += self._policies.memory.spare(kv.pool.total, running)
        look = not request.needs_prompt_logprobs  # else it must compute every position itself
        capacity, salt = self._tokens_to_hold(request), self._salt(request)
        return kv.reserve(request.tokens, capacity, salt, request.names, spare if running else 0, look)

    def _start(self, batch: PassBuilder, request: Request, spare: int) -> Start:
        """Give it blocks, a row and its first positions, if that is possible now."""
        tables = self._tables
        holding: Holding | None = request.fetching
        if holding is None:
            holding = self._reserve(request, spare)
            if holding is None:
                return Start.NO_BLOCKS
        if holding.fetch is not None:
            request.fetching = holding
            tables.fetching[request] = None
            return Start.FETCHING
        hit = holding.published * tables.kv.block_size
        count = self._policies.prefill.take(len(request.tokens) - hit, batch.left, not batch.prompts)
        if not count:
            if request.fetching is None:
                tables.kv.release(holding)
            return Start.NO_BUDGET
        request.computed = request.planned = hit
        if not request.preemptions:
            request.cached_tokens = min(hit, request.prompt_len)  # output of an earlier engine may be cached, too
        if request.group and (request.group.leader is None or request.group.leader.state is not State.RUNNING):
            request.group.leader = request
        self._policies.order.started(request, len(request.tokens) - hit)
        tables.start(request, holding)
        batch.starting[request], request.began = request.began, True
        batch.add(request, count, prompt=True)
        return Start.STARTED

    def _salt(self, request: Request) -> str | None:
        """Which cached blocks it may share; None: none."""
        if self._tables.kv.keep:
            return request.salt
        if request.group:
            return request.group.name
        return f"\0{request.order}" if self._tables.kv.host is not None else None  # its own, found again after a swap
