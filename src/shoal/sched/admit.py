"""Admitter: who of those that wait starts in this pass.

The second half of planning: the running ones have had their share, now the line is asked in order. When one does not
fit, nobody overtakes it, unless a policy lets it; who is urgent may take somebody's place; who waits for blocks from
host memory keeps its place. Works on the scheduler's tables and has none of its own.
"""

from itertools import islice
from typing import TYPE_CHECKING

from shoal.core.events import Admitted, PassEvents
from shoal.core.request import Request, State
from shoal.kv.manager import Holding
from shoal.sched.pass_builder import PassBuilder, Start
from shoal.sched.queue import PATIENCE

if TYPE_CHECKING:
    from shoal.sched.scheduler import Scheduler

LOOK_PAST = 64  # requests behind one that may not start yet that are asked whether they may


class Admitter:
    """The door of one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.s = scheduler

    def line(self) -> list[Request]:
        """The first of those who wait, where they may start at all."""
        full = len(self.s.running) >= self.s.limits.max_num_seqs and not self.s.policies.order.overtakes
        if full or not self.s.waiting or self.s.policies.batching.grouped:
            return []
        return list(islice(self.s.waiting.in_order(), LOOK_PAST))

    def admit(self, batch: PassBuilder, events: PassEvents, now_s: float) -> None:
        """Those who wait, in order; when one does not fit, nobody overtakes it, unless a policy lets it."""
        grouped = self.s.policies.batching.grouped
        room = self.s.policies.batching.may_join(self.s.door(now_s)) if self.s.waiting else 0
        if not self.s.waiting or (
            room <= 0 and len(self.s.inside) <= len(self.s.running) and (grouped or not self.s.policies.order.overtakes)
        ):
            return
        self.s.evicted = []
        chosen = self._choose(batch, events, now_s, room)
        evicted, self.s.evicted = self.s.evicted, None
        for request in chosen:
            self.s.waiting.remove(request, self.s.policies.order.key(request))
            waited_s = now_s - request.arrived_s
            resumed = batch.starting[request]
            events.admitted.append(Admitted(request.id, waited_s, request.planned, resumed, request.prompt_len))
        for request in evicted:
            self.s.waiting.push(request, self.s.policies.order.key(request))

    def _choose(self, batch: PassBuilder, events: PassEvents, now_s: float, room: int) -> list[Request]:
        """Start those who may start, and return them. The line is only read."""
        headroom, grouped = self.s.policies.headroom, self.s.policies.batching.grouped
        free = self.s.limits.max_num_seqs - len(self.s.running)
        kept = headroom.slots(self.s.limits.max_num_seqs) if headroom.share else 0
        passing = self.s.policies.order.overtakes or kept > 0  # some may start although one ahead of them does not fit
        blocked: Request | None = None  # that one
        past = held = 0
        ahead: set[Request] = set()  # who waits for its blocks and keeps them
        chosen: list[Request] = []
        for request in self.s.waiting.in_order():
            if batch.left <= 0 or not self.s.rows.free or past > LOOK_PAST:
                break
            if blocked is not None and not self._may_pass(request, blocked):
                past += 1
                continue
            member = request in self.s.inside  # of the group that runs, back after a preemption: it needs no leave
            if grouped and room <= 0 and not member:
                continue
            favoured = not kept or not self.s.running or self._favoured(request)
            if free <= (0 if favoured else kept):
                if batch.excludes(request) or not self._make_way(batch, events, request, now_s):
                    blocked = request
                    if not passing:
                        break
                    continue
                free += 1
            free -= 1
            room -= not member
            if request.pending or (request.group and request.group.must_wait(request, self.s.kv.block_size)):
                continue  # its last token, or its leader's blocks, are still on the way: keep its place
            if batch.only is not None and request not in batch.only:
                free += 1
                room += not member
                continue
            if batch.excludes(request):  # keep its place, and its blocks
                held += self.s.kv.blocks_for(self._room(request))
                continue
            spare = held if favoured else held + headroom.blocks(self.s.kv.pool.total)
            start = self._start(batch, request, spare)
            while start is Start.NO_BLOCKS and self._make_room(batch, events, request, ahead, now_s):
                start = self._start(batch, request, spare)
            if start is Start.STARTED:
                chosen.append(request)
                if blocked is not None:
                    blocked.overtaken += 1
            elif start is Start.FETCHING:
                ahead.add(request)
            elif start is Start.NO_BUDGET:
                break
            elif start is Start.NO_BLOCKS:
                free += 1
                room += not member
                blocked = request
                if not passing:
                    break
        return chosen

    def _may_pass(self, request: Request, blocked: Request) -> bool:
        """Whether it may start although `blocked`, ahead of it, does not fit."""
        if self.s.policies.order.may_overtake(request, blocked):
            return True
        return self.s.policies.headroom.share > 0 and self._favoured(request) and not self._favoured(blocked)

    def _favoured(self, request: Request) -> bool:
        """Whether it may use the headroom. Who was passed over for long may, too, or it would wait for ever."""
        if request.overtaken >= PATIENCE or self.s.policies.headroom.may_use(request):
            return True
        return self.s.policies.order.favours(request, self.s.running)

    def _make_way(self, batch: PassBuilder, events: PassEvents, request: Request, now_s: float) -> bool:
        """Take a running request's place, if this one is urgent and the order policy names somebody."""
        order = self.s.policies.order
        allowed = order.overtakes and self.s.policies.preempt.gives_way and not self.s.policies.batching.grouped
        allowed = allowed and not self.s.suspects
        if not allowed or not order.urgent(request, now_s):
            return False
        victim = order.victim_for(request, [one for one in self.s.may_give_way() if one not in batch.starting])
        if victim is None:
            return False
        self.s.preempt(victim, batch, events)
        return True

    def _make_room(
        self, batch: PassBuilder, events: PassEvents, request: Request, ahead: set[Request], now_s: float
    ) -> bool:
        """Find blocks for one that does not fit: from those behind it who do not run yet, or as _make_way does."""
        for other in list(self.s.fetching):
            if other is not request and other not in ahead:
                self.stop_fetching(other)
                return True
        if self.s.kv.leaving:
            return False  # blocks are about to be free
        return self._make_way(batch, events, request, now_s)

    def stop_fetching(self, request: Request) -> None:
        """Give back what it has reserved before it started."""
        self.s.kv.release(request.fetching)
        request.fetching = None
        del self.s.fetching[request]

    def _room(self, request: Request) -> int:
        """Positions to hold blocks for when it starts."""
        if request.preemptions >= self.s.max_preemptions:
            return request.end  # it gave way often enough: from now on it never runs short
        return self.s.policies.memory.room(request)

    def _reserve(self, request: Request, spare: int) -> Holding | None:
        memory = self.s.policies.memory
        spare += memory.spare(self.s.kv.pool.total, len(self.s.running))
        look = not request.wants_prompt_logprobs  # else it must see every position itself
        room, salt = self._room(request), self._salt(request)
        return self.s.kv.reserve(request.tokens, room, salt, request.names, spare if self.s.running else 0, look)

    def _start(self, batch: PassBuilder, request: Request, spare: int) -> Start:
        """Give it blocks, a row and its first positions, if that is possible now."""
        holding = request.fetching
        if holding is None:
            holding = self._reserve(request, spare)
            if holding is None:
                return Start.NO_BLOCKS
        if holding.fetch is not None:
            request.fetching = holding
            self.s.fetching[request] = None
            return Start.FETCHING
        hit = holding.published * self.s.kv.block_size
        count = self.s.policies.prefill.take(len(request.tokens) - hit, batch.left, not batch.prompts)
        if not count:
            if request.fetching is None:
                self.s.kv.release(holding)
            return Start.NO_BUDGET
        taken = self.s.rows.take()
        assert taken is not None, "asked for a row when none was free"
        request.row, request.generation = taken
        request.holding, request.fetching = holding, None
        self.s.fetching.pop(request, None)
        self.unpark(request)
        request.computed = request.planned = hit
        if not request.preemptions:
            request.cached_tokens = min(hit, request.prompt_len)  # what it said elsewhere may be cached, too
        if request.group and (request.group.leader is None or request.group.leader.state is not State.RUNNING):
            request.group.leader = request
        self.s.policies.order.started(request, len(request.tokens) - hit)
        request.move(State.RUNNING)
        self.s.running[request] = None
        self.s.places = None
        self.s.grammars += request.grammar is not None
        if self.s.policies.batching.grouped:
            self.s.inside.add(request)
        self.s.dead = max(0, self.s.dead - 1)  # it takes a dead row's place
        batch.starting[request], request.began = request.began, True
        batch.add(request, count, prompt=True)
        return Start.STARTED

    def unpark(self, request: Request) -> None:
        """The host memory need not keep its blocks any more."""
        if request.parked:
            self.s.kv.unpin(request.parked)
            request.parked = []

    def _salt(self, request: Request) -> str | None:
        """Whose cached blocks it may share; None for nobody's."""
        if self.s.kv.keep:
            return request.salt
        if request.group:
            return request.group.name
        return f"\0{request.order}" if self.s.kv.host is not None else None  # its own, found again after a swap
