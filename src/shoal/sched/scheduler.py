"""The scheduler: plan(now) and commit(result, now).

Combines the axes (batching, prefill, memory, order, preemption) over one KV manager. It is the only writer of a
request's progress. Knows no torch and no clock; the simulator runs these same objects.

Two passes may be in flight: pass k+1 is planned while k computes. So a plan counts on what k will have done
(`planned`, `pending`), a commit drops what came too late (its request has ended), and tokens of a request that was
preempted meanwhile are still taken: they are right, only their KV is gone.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.events import Admitted, Finished, PassEvents, Preempted, Rejected
from shoal.core.plan import FROM_DEVICE, RowStart, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Reason, Request, State
from shoal.errors import BadRequest, DeadlinePassed, EngineError
from shoal.errors import Rejected as NotNow
from shoal.kv.manager import KVManager
from shoal.sched.admission import Admission, Limits, Rules
from shoal.sched.batching import Batching, Door
from shoal.sched.deadlines import Deadlines
from shoal.sched.layout import Layout
from shoal.sched.memory import Memory
from shoal.sched.ordering import Order
from shoal.sched.preempt import Preempt
from shoal.sched.prefill import Prefill
from shoal.sched.rows import RowTable
from shoal.sched.tenants import Tenants


@dataclass(frozen=True)
class Policies:
    """One choice per axis."""

    batching: Batching
    layout: Layout
    prefill: Prefill
    memory: Memory
    order: Order
    preempt: Preempt


class Draft:
    """A plan in the making: who computes how many positions, as long as things may still change."""

    def __init__(self, budget: int) -> None:
        self.left = budget  # below 0 if a prompt had to be taken whole
        self.takes: dict[Request, int] = {}
        self.starting: dict[Request, None] = {}
        self.prompts = 0
        self.decodes = 0

    def add(self, request: Request, count: int, prompt: bool) -> None:
        self.takes[request] = count
        self.left -= count
        self.prompts += prompt
        self.decodes += not prompt

    def remove(self, request: Request) -> None:
        """It lost its blocks after all."""
        self.left += self.takes.pop(request, 0)
        self.starting.pop(request, None)


@dataclass(frozen=True, slots=True)
class Flight:
    """What the scheduler remembers of a pass until it comes back: parallel lists, in the plan's order."""

    plan: StepPlan
    requests: list[Request]
    generations: list[int]  # of their rows, then
    ends: list[int]  # how far each will have been computed
    samples: list[bool]
    events: PassEvents
    masked: list[tuple[int, Request]]  # (row, request) of those that choose a token and must follow a grammar


class Scheduler:
    """Decides what every pass computes."""

    def __init__(self, limits: Limits, kv: KVManager, policies: Policies, rules: Rules | None = None) -> None:
        self.limits = limits
        self.kv = kv
        self.policies = policies
        rules = rules or Rules()
        self.admission = Admission(limits, kv.pool.total * kv.block_size, rules.max_queue)
        self.deadlines = Deadlines(rules.max_wait_s)
        self.tenants = Tenants(rules.limits_of)
        # twice as many rows as slots, so that a row still read by a late pass keeps nobody waiting
        self.rows = RowTable(2 * limits.max_num_seqs)
        self.requests: dict[str, Request] = {}  # everyone not finished
        self.waiting = policies.order.line()
        self.running: dict[Request, None] = {}
        self.flights: deque[Flight] = deque()
        self._arrivals = 0
        self._step = 0
        self._between = PassEvents(step=-1)  # what happened since the last record was handed out
        self.more_coming = False  # the driver knows of requests that are still to arrive
        self._inside: set[Request] = set()  # grouped batching: members of the group that have not ended
        self._held_back = PassEvents(step=-1)  # … and what they will be told when it ends
        self._dead = 0  # rows of the rectangle whose request has ended
        self._now_s = 0.0  # the latest time anybody told

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float, resumed: bool = False) -> None:
        """Queue a request; raises BadRequest if it can never be served, NotNow if it is refused for the moment."""
        self.submit_all([request], now_s, resumed)

    def submit_all(self, requests: Sequence[Request], now_s: float, resumed: bool = False) -> None:
        """Queue all of them (the n samples of a job) or, if this raises, none: then nothing has moved.

        `resumed`: they were accepted before, by an engine that is gone, so no limit on load refuses them again. They
        may bring what they have said so far as their output.
        """
        self._check_ids([request.id for request in requests])
        self._now_s = max(self._now_s, now_s)
        try:
            max_tokens = [self.admission.check(request) for request in requests]
            if not resumed:
                self.tenants.allow(requests, now_s)
                self.admission.check_room(self.waiting.newcomers, len(requests), now_s)
        except (BadRequest, NotNow) as error:
            kind, after_s = type(error).__name__, error.retry_after_s if isinstance(error, NotNow) else None
            self._between.rejected += [Rejected(request.id, kind, str(error), after_s) for request in requests]
            raise
        for request, most in zip(requests, max_tokens, strict=True):
            request.max_tokens = most
            self._enqueue(request, now_s)
        self.tenants.enter(requests, now_s, resumed)

    def _check_ids(self, ids: list[str]) -> None:
        for request_id in ids:
            if request_id in self.requests or ids.count(request_id) > 1:
                raise EngineError(f"request id {request_id!r} is in use; ids must be unique while a request runs")

    def _enqueue(self, request: Request, now_s: float) -> None:
        self._between.arrived.append(request.id)
        self._between.arrived_s.append(now_s)
        request.order = self._arrivals
        request.arrived_s = now_s
        if request.timeout_s is not None:
            request.deadline_s = now_s + request.timeout_s
        if request.outputs:  # its prompt's logprobs were told before its first token
            request.wants_prompt_logprobs = False
        self._arrivals += 1
        self.requests[request.id] = request
        self.policies.order.arrived(request)
        self.waiting.push(request, self.policies.order.key(request))
        self.deadlines.arm(request)

    def expire(self, now_s: float) -> None:
        """End those whose time is over, whether they wait, run or are in flight. plan() begins with this.

        Who has said something keeps it as its answer; who has not is refused.
        """
        self._now_s = max(self._now_s, now_s)
        for request in self.deadlines.due(now_s):
            out = self._held_back if request in self._inside else self._between
            if request.outputs:
                self._end(request, Reason.TIMEOUT, out)
            else:
                message = self.deadlines.why(request, now_s)
                out.rejected.append(Rejected(request.id, DeadlinePassed.__name__, message))
                self._end(request, Reason.REJECTED, out, error=message)
        self.tenants.forget(now_s)

    def finish(self, request_id: str, reason: Reason, at_output: int | None = None, error: str = "") -> bool:
        """End a request from outside, cut after `at_output` tokens if given. False if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if at_output is not None:
            del request.tokens[request.prompt_len + at_output :]
        # what a group's member was told so far is still held back, and its end must not overtake that
        out = self._held_back if request in self._inside else self._between
        self._end(request, reason, out, error=error)
        return True

    @property
    def idle(self) -> bool:
        return not self.requests and not self.flights

    @property
    def news(self) -> bool:
        """Somebody ended or was refused, and no record has told it yet."""
        held = self._held_back.finished if not self._inside else ()
        return bool(self._between.finished or self._between.rejected or held)

    # ---- plan -----------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next pass, or None if there is nothing to compute before another pass comes back."""
        self.expire(now_s)
        events = PassEvents(self._step, planned_s=now_s, budget_tokens=self.limits.max_num_batched_tokens)
        # a group is taken whole: the budget is for those who come one by one
        draft = Draft(sys.maxsize if self.policies.batching.grouped else self.limits.max_num_batched_tokens)
        if self.policies.prefill.alone:
            self._more_of_prompts(draft, events)
            self._admit(draft, events, now_s)
            if not draft.takes:
                self._decode(draft, events)
        else:
            self._decode(draft, events)
            self._more_of_prompts(draft, events)
            if not events.preempted:  # who just lost blocks must not see newcomers take them
                self._admit(draft, events, now_s)
        if not draft.takes:
            self._between.preempted += events.preempted
            return None
        return self._freeze(draft, events)

    def wake_s(self, now_s: float) -> float | None:
        """When to plan again although nothing has happened; None: not before something does."""
        known = (self.policies.batching.wake_s(self._door(now_s)), self.deadlines.next_s())
        return min((at_s for at_s in known if at_s is not None), default=None)

    def _door(self, now_s: float) -> Door:
        first = self.waiting.oldest() if self.policies.batching.grouped else self.waiting.first()
        return Door(
            now_s,
            self.limits.max_num_seqs - len(self.running),
            len(self._inside),
            len(self.waiting),
            first.arrived_s if first else now_s,
            self.more_coming,
        )

    def _decode(self, draft: Draft, events: PassEvents) -> None:
        """Those who run and need one position. Hot: once per running request and pass."""
        takes = draft.takes
        for request in list(self.running):
            if request.need() == 1 and draft.left > 0:
                if request.state is State.RUNNING and request.planned < request.holding.capacity:
                    takes[request] = 1  # as draft.add, without the call
                    draft.left -= 1
                    draft.decodes += 1
                else:
                    self._give(draft, events, request, 1)

    def _more_of_prompts(self, draft: Draft, events: PassEvents) -> None:
        """Those who run and need more than one."""
        prompts = [request for request in self.running if request.need() > 1]
        prompts.sort(key=self.policies.order.key)
        for request in prompts:
            if draft.left <= 0:
                break
            if request.state is State.RUNNING:
                count = self.policies.prefill.take(request.need(), draft.left, not draft.prompts)
                if count:
                    self._give(draft, events, request, count)

    def _give(self, draft: Draft, events: PassEvents, request: Request, count: int) -> None:
        """Let it compute `count` more positions, taking blocks from others if there are none left."""
        if request.state is not State.RUNNING:
            return  # it gave way to somebody earlier in this pass
        while not self.kv.grow(request.holding, request.planned + count):
            victim = self.policies.order.victim(self.running)
            self._preempt(victim, draft, events)
            if victim is request:
                return
        draft.add(request, count, prompt=count > 1)

    def _preempt(self, victim: Request, draft: Draft, events: PassEvents) -> None:
        draft.remove(victim)
        events.preempted.append(Preempted(victim.id, victim.computed))
        victim.preemptions += 1
        victim.furthest = max(victim.furthest, victim.planned)
        del self.running[victim]
        self._leave_row(victim)
        self.policies.preempt.evict(victim, self.kv)
        self.waiting.push(victim, self.policies.order.key(victim))

    def _admit(self, draft: Draft, events: PassEvents, now_s: float) -> None:
        """Those who wait, in order; when one does not fit, nobody overtakes it."""
        free = self.limits.max_num_seqs - len(self.running)
        room = self.policies.batching.may_join(self._door(now_s)) if self.waiting else 0
        if room <= 0 and len(self._inside) <= len(self.running):
            return
        chosen: list[Request] = []
        for request in self.waiting.in_order():
            if not free or draft.left <= 0 or not self.rows.free:
                break
            member = request in self._inside  # of the group that runs, back after a preemption: it needs no leave
            if room <= 0 and not member:
                continue
            free -= 1
            room -= not member
            if request.pending or (request.group and request.group.must_wait(request, self.kv.block_size)):
                continue  # its last token, or its leader's blocks, are still on the way: keep its place
            if not self._start(draft, request):
                break
            chosen.append(request)
        for request in chosen:
            self.waiting.remove(request, self.policies.order.key(request))
            waited_s = now_s - request.arrived_s
            resumed, prompt_len = request.preemptions > 0, request.prompt_len
            events.admitted.append(Admitted(request.id, waited_s, request.planned, resumed, prompt_len))

    def _start(self, draft: Draft, request: Request) -> bool:
        """Give it blocks, a row and its first positions; False if it does not fit now."""
        memory = self.policies.memory
        spare = memory.spare(self.kv.pool.total, len(self.running))
        look = not request.wants_prompt_logprobs  # else it must see every position itself
        holding = self.kv.reserve(request.tokens, memory.room(request), self._salt(request), request.names, spare, look)
        if holding is None:
            return False
        hit = holding.published * self.kv.block_size
        count = self.policies.prefill.take(len(request.tokens) - hit, draft.left, not draft.prompts)
        if not count:
            self.kv.release(holding)
            return False
        taken = self.rows.take()
        assert taken is not None, "asked for a row when none was free"
        request.row, request.generation = taken
        request.holding = holding
        request.computed = request.planned = hit
        if not request.preemptions:
            request.cached_tokens = min(hit, request.prompt_len)  # what it said elsewhere may be cached, too
        if request.group and (request.group.leader is None or request.group.leader.state is not State.RUNNING):
            request.group.leader = request
        self.policies.order.started(request, len(request.tokens) - hit)
        request.move(State.RUNNING)
        self.running[request] = None
        if self.policies.batching.grouped:
            self._inside.add(request)
        self._dead = max(0, self._dead - 1)  # it takes a dead row's place
        draft.starting[request] = None
        draft.add(request, count, prompt=True)
        return True

    def _salt(self, request: Request) -> str | None:
        """Whose cached blocks it may share; None for nobody's."""
        if self.kv.keep:
            return request.salt
        return request.group.name if request.group else None

    def _freeze(self, draft: Draft, events: PassEvents) -> StepPlan:
        """Turn the draft into arrays, and count on what they will do. Hot: once per scheduled request and pass."""
        step = self._step
        starting = tuple(self._row_start(request) for request in draft.starting)
        requests, counts = list(draft.takes), list(draft.takes.values())
        starts = [request.planned for request in requests]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        samples, tokens, grown = [], [], []
        for request, start, end in zip(requests, starts, ends, strict=True):
            known = len(request.tokens)
            sampling = end == known + request.pending
            samples.append(sampling)
            if end <= known:
                tokens += request.tokens[start:end]
            else:
                tokens += request.tokens[start:known]
                tokens += [FROM_DEVICE] * (end - max(start, known))
            blocks = request.holding.blocks
            if len(blocks) != request.blocks_sent:
                grown += [(request.row, index, blocks[index]) for index in range(request.blocks_sent, len(blocks))]
                request.blocks_sent = len(blocks)
            if start < request.furthest:
                events.recomputed_tokens += min(end, request.furthest) - start
            request.planned = end
            request.pending += sampling
            request.last_step = step
        generations = [request.generation for request in requests]
        width = self.policies.layout.width(counts)
        dead = self._dead_rows(draft) if width and draft.decodes else 0
        plan = StepPlan(
            step,
            starting,
            np.array(grown, dtype=np.int64).reshape(-1, 3),
            np.array([request.row for request in requests], dtype=np.int64),
            np.array(generations, dtype=np.int64),
            np.array(starts, dtype=np.int64),
            np.array(counts, dtype=np.int64),
            np.array(samples, dtype=np.bool_),
            np.array(tokens, dtype=np.int64),
            width=width,
            dead=dead,
        )
        events.dead_rows = dead
        events.scheduled_ids = [request.id for request in requests]
        events.scheduled_starts, events.scheduled_counts = starts, counts
        events.computed_tokens = len(tokens)
        masked = [
            (request.row, request)
            for request, sampling in zip(requests, samples, strict=True)
            if request.grammar is not None and sampling
        ]
        self.flights.append(Flight(plan, requests, generations, ends, samples, events, masked))
        self._step += 1
        return plan

    def _dead_rows(self, draft: Draft) -> int:
        """Rows that are computed for nobody: of those who have ended, or whose last token is on the way."""
        if not self.policies.layout.keeps_dead:
            return 0
        return self._dead + sum(request not in draft.takes and request.need() == 0 for request in self.running)

    def _row_start(self, request: Request) -> RowStart:
        request.blocks_sent = len(request.holding.blocks)
        return RowStart(
            request.row,
            request.generation,
            tuple(request.tokens),
            request.prompt_len,
            request.params,
            request.seed,
            request.sample,
            request.stop_ids,
            tuple(request.holding.blocks),
            request.wants_prompt_logprobs,
            request.prompt_len + request.ends_after - 1 if request.ends_after else 0,
        )

    # ---- grammars -------------------------------------------------------------------------------------------------

    @property
    def masks_wait(self) -> bool:
        """Whether the newest pass cannot be sampled yet: a grammar in it misses a token of an earlier pass."""
        return any(
            request.pending > 1 and request.state is not State.FINISHED for _, request in self.flights[-1].masked
        )

    def masks(self) -> LateMasks | None:
        """Which tokens may come of the newest pass; None: all."""
        masked = [one for one in self.flights[-1].masked if one[1].state is not State.FINISHED]
        if not masked:
            return None
        allowed = np.zeros((len(masked), -(-self.limits.vocab_size // 32)), dtype=np.uint32)
        for line, (_, request) in zip(allowed, masked, strict=True):
            assert request.grammar is not None
            assert request.pending == 1, f"{request} would be masked without its last token"
            request.grammar.fill(line)
        return LateMasks(np.array([row for row, _ in masked], dtype=np.int64), allowed)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now_s: float) -> PassEvents:
        """Take what came of the oldest pass in flight, and tell what happened. Hot, as above."""
        flight = self.flights.popleft()
        self._check_result(flight.plan, result)
        self._now_s = max(self._now_s, now_s)
        events = flight.events
        events.padded_tokens, events.busy_s = result.padded, result.busy_s
        out = self._held_back if self.policies.batching.grouped else events
        failed, logprobs = dict(result.failures), dict(result.logprobs)
        tokens = result.tokens.tolist()
        size = self.kv.block_size
        for place, first, values in result.prompt_logprobs:
            if flight.requests[place].state is not State.FINISHED:
                out.note_prompt(flight.requests[place].id, first, values)
        number = -1  # of the sampling row
        for request, generation, end, sampling in zip(
            flight.requests, flight.generations, flight.ends, flight.samples, strict=True
        ):
            number += sampling
            if request.state is State.FINISHED:
                continue  # it ended while this pass computed: too late
            alive = request.generation == generation  # else it was preempted meanwhile
            if alive:
                request.computed = end
            if sampling:
                request.pending -= 1
                if number in failed:
                    why = request.grammar.error if request.grammar is not None else ""
                    self._end(request, Reason.ERROR, out, error=why or failed[number])
                    continue
                if number in logprobs:
                    out.logprobs[request.id, request.outputs] = logprobs[number]
                self._append(request, tokens[number], out)
            if alive and request.holding is not None and end // size > request.holding.published:
                self.kv.publish(request.holding, request.tokens, end)
        if self.policies.order.counts:
            for request, sampling in zip(flight.requests, flight.samples, strict=True):
                if sampling:
                    self.policies.order.said(request)
        if self.tenants:  # somebody's tokens are counted
            self.tenants.charge(flight.requests, now_s)
        self.rows.committed(flight.plan.step)
        return self._seal(events, now_s)

    def fail_flights(self, error: str, now_s: float) -> PassEvents:
        """The executor broke: every request of every pass in flight ends with this error."""
        events = PassEvents(-1)
        while self.flights:
            flight = self.flights.popleft()
            events.step = flight.plan.step
            events.admitted += flight.events.admitted
            events.preempted += flight.events.preempted
            for request in flight.requests:
                if request.state is not State.FINISHED:
                    out = self._held_back if request in self._inside else events
                    self._end(request, Reason.ERROR, out, error=error)
            self.rows.committed(flight.plan.step)
        return self._seal(events, now_s)

    def take_between(self, now_s: float) -> PassEvents:
        """What happened since the last record, when no pass is there to carry it."""
        return self._seal(PassEvents(-1), now_s)

    def _append(self, request: Request, token: int, events: PassEvents) -> None:
        grammar = request.grammar
        if grammar is not None and not grammar.accept(token):
            self._end(request, Reason.ERROR, events, error=grammar.error)
            return
        outputs = len(request.tokens) - request.prompt_len
        events.owners.append(request.id)
        events.tokens.append(token)
        events.indexes.append(outputs)
        request.tokens.append(token)
        outputs += 1
        if token in request.stop_ids and (outputs > request.params.min_tokens or grammar is not None):
            self._end(request, Reason.STOP, events, stop_token=token)
        elif grammar is not None and grammar.ended:
            self._end(request, Reason.STOP, events)
        elif outputs >= request.max_tokens:
            self._end(request, Reason.LENGTH, events)

    def _end(
        self, request: Request, reason: Reason, events: PassEvents, stop_token: int | None = None, error: str = ""
    ) -> None:
        """Finish it and give back all it holds."""
        if request.state is State.RUNNING:
            if reason is Reason.ERROR:
                self.kv.discard(request.holding)  # nobody may hit what it computed
            else:
                self.kv.publish(request.holding, request.tokens, min(request.computed, len(request.tokens)))
                self.kv.release(request.holding)
            request.holding = None
            del self.running[request]
            self._leave_row(request)
            self._dead = self._dead + 1 if self.running else 0
        else:
            self.waiting.remove(request, self.policies.order.key(request))
        request.move(State.FINISHED)
        self._inside.discard(request)
        self.deadlines.drop(request)
        self.tenants.leave(request, self._now_s)
        by_itself = reason in (Reason.STOP, Reason.LENGTH)
        if by_itself:
            self.policies.memory.learn(request)
        self.policies.order.left(request, by_itself)
        request.reason, request.error = reason, error
        del self.requests[request.id]
        events.finished.append(
            Finished(request.id, reason, request.outputs, request.preemptions, request.cached_tokens, stop_token, error)
        )

    def _leave_row(self, request: Request) -> None:
        self.rows.give_back(request.row, request.last_step)
        request.row = request.generation = -1
        request.blocks_sent = 0

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        if (
            result.step != plan.step
            or not np.array_equal(result.rows, plan.rows[plan.samples])
            or not np.array_equal(result.generations, plan.generations[plan.samples])
        ):
            raise EngineError(f"asked for pass {plan.step}, the executor answered {result.step} or other rows")

    def _seal(self, events: PassEvents, now_s: float) -> PassEvents:
        """Add what happened between passes and the gauges."""
        between, self._between = self._between, PassEvents(step=-1)
        events.add(between)
        if not self._inside and (self._held_back.owners or self._held_back.finished):  # the group has ended
            held, self._held_back = self._held_back, PassEvents(step=-1)
            events.add(held)
        if events.finished:
            self.admission.pace.note(len(events.finished), now_s)
        events.committed_s = now_s
        events.running, events.waiting = len(self.running), len(self.waiting)
        pool = self.kv.pool
        events.blocks_held, events.blocks_cached, events.blocks_total = pool.held, pool.cached, pool.total
        return events

    # ---- integrity ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant that must hold between two calls."""
        assert len(self.running) <= self.limits.max_num_seqs, "more requests run than there are slots"
        everyone = set(self.running) | set(self.waiting)
        assert set(self.requests.values()) == everyone, "a request is lost or in two places"
        self.kv.check(request.holding for request in self.running)
        self.rows.check([request.row for request in self.running])
        self.waiting.check()
        self.deadlines.check(self.requests.values())
        self.tenants.check(self.requests.values())
        under_way: dict[Request, int] = {}
        for flight in self.flights:
            for request, sampling in zip(flight.requests, flight.samples, strict=True):
                under_way[request] = under_way.get(request, 0) + sampling
        for request in self.requests.values():
            runs = request in self.running
            assert (request.state is State.RUNNING) == runs, f"{request} is in the wrong place"
            assert (request.holding is not None) == runs, f"{request} holds blocks but does not run, or the reverse"
            assert request.pending == under_way.get(request, 0), f"{request} waits for tokens that no pass will bring"
            assert 0 <= request.computed <= request.planned <= request.end, f"{request} is ahead of itself"
            assert request.planned <= len(request.tokens) + request.pending, f"{request} computes tokens nobody has"
            assert request.outputs < request.max_tokens, f"{request} should have ended"
            if runs:
                assert request.planned <= request.holding.capacity, f"{request} writes beyond its blocks"
                published = request.holding.published * self.kv.block_size
                assert published <= request.computed, f"{request} lets others hit what is not committed"
