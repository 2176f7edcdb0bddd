"""The scheduler: plan(now) and commit(result, now).

Combines the axes (batching, prefill, budget, memory, order, lanes, what to do when short) over one KV manager. It is
the only writer of a request's progress. Knows no torch and no clock; the simulator runs these same objects.

Two passes may be in flight: pass k+1 is planned while k computes. So a plan counts on what k will have done
(`planned`, `pending`), a commit drops what came too late (its request has ended), and tokens of a request that was
preempted meanwhile are still taken: they are right, only their KV is gone.

Blocks go to host memory and back beside the passes (kv/manager.py). Who waits for blocks keeps its place in the line
with what it has reserved (`fetching`), and starts when they have come.
"""

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.core.events import Finished, PassEvents, Preempted, Rejection
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Reason, Request, State
from shoal.core.tiers import Tiers
from shoal.errors import BadRequest, DeadlinePassed, EngineError, Evicted, PromiseBroken, Rejected
from shoal.kv.manager import KVManager
from shoal.sched.admission import Admission, Limits, Rules
from shoal.sched.admit import Admitter
from shoal.sched.batching import Batching, Door
from shoal.sched.budget import Budget, Fixed
from shoal.sched.deadlines import Deadlines
from shoal.sched.integrity import check
from shoal.sched.lanes import Headroom, Lanes
from shoal.sched.layout import Layout
from shoal.sched.memory import Memory
from shoal.sched.ordering import Order
from shoal.sched.pass_builder import Flight, PassBuilder, Places, count_on, count_on_decodes, grown_blocks, row_start
from shoal.sched.preempt import CopyTimes, How, Preempt
from shoal.sched.prefill import Prefill
from shoal.sched.rows import RowTable
from shoal.sched.steptime import StepModel
from shoal.sched.suspects import Suspects
from shoal.sched.tenants import Tenants

EVICTED = "KV memory ran out and this request had to give way; ask again, or raise --kv-memory"


@dataclass(frozen=True)
class Policies:
    """One choice per axis."""

    batching: Batching
    layout: Layout
    prefill: Prefill
    memory: Memory
    order: Order
    preempt: Preempt
    budget: Budget = field(default_factory=Fixed)
    lanes: Lanes = field(default_factory=Lanes)
    headroom: Headroom = field(default_factory=Headroom)
    tiers: Tiers = field(default_factory=Tiers)
    steps: StepModel = field(default_factory=StepModel)  # how long passes take, for those who want to know
    copies: CopyTimes = field(default_factory=CopyTimes)  # … and copies of blocks

    @property
    def learns(self) -> bool:
        """Somebody wants to know how long passes take."""
        late = any(tier.reject_late for tier in self.tiers)
        return self.budget.learns or self.preempt.learns or late or len(self.tiers) > 1


class Scheduler:
    """Decides what every pass computes."""

    def __init__(self, limits: Limits, kv: KVManager, policies: Policies, rules: Rules | None = None) -> None:
        self.limits = limits
        self.kv = kv
        self.policies = policies
        rules = rules or Rules()
        self.admission = Admission(limits, kv.pool.total * kv.block_size, rules.max_queue)
        self.deadlines = Deadlines(rules.max_wait_s)
        self.max_preemptions = rules.max_preemptions
        self.tenants = Tenants(rules.limits_of)
        # twice as many rows as slots, so that a row still read by a late pass keeps nobody waiting
        self.rows = RowTable(2 * limits.max_num_seqs)
        self.requests: dict[str, Request] = {}  # everyone not finished
        self.waiting = policies.order.queue()
        self.running: dict[Request, None] = {}
        self.fetching: dict[Request, None] = {}  # of those who wait: who has blocks, some of which are on their way
        self.flights: deque[Flight] = deque()
        self.suspects = Suspects()
        self.admitter = Admitter(self)
        self._arrivals = 0
        self._step = 0
        self._between = PassEvents(step=-1)  # what happened since the last record was handed out
        self.more_coming = False  # the driver knows of requests that are still to arrive
        self.inside: set[Request] = set()  # grouped batching: members of the group that have not ended
        self._held_back = PassEvents(step=-1)  # … and what they will be told when it ends
        self.dead = 0  # rows of the rectangle whose request has ended
        self._now_s = 0.0  # the latest time anybody told
        self._learns = policies.learns
        self.places: Places | None = None  # of the last pass, until somebody comes or goes
        self.grammars = 0  # running requests that must follow one
        self.evicted: list[Request] | None = None  # while the line is read: who must join it afterwards

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float, resumed: bool = False) -> None:
        """Queue a request; raises BadRequest if it can never be served, Rejected if it is refused for the moment."""
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
            for request in requests:
                request.promise = self.policies.tiers.of(request.tier)
            if not resumed:
                if requests:
                    self._check_promise(requests[0])
                self.tenants.allow(requests, now_s)
                self.admission.check_room(self.waiting.newcomers, len(requests), now_s)
        except (BadRequest, Rejected) as error:
            kind, after_s = type(error).__name__, error.retry_after_s if isinstance(error, Rejected) else None
            tier = requests[0].promise.name if isinstance(error, PromiseBroken) else ""
            self._between.rejected += [Rejection(request.id, kind, str(error), after_s, tier) for request in requests]
            raise
        for request, most in zip(requests, max_tokens, strict=True):
            request.allow(most)
            self._enqueue(request, now_s)
        self.tenants.enter(requests, now_s, resumed)

    def _check_promise(self, request: Request) -> None:
        """Raise PromiseBroken if its tier wants to hear at once that it will be late, and it will."""
        promise = request.promise
        if promise.reject_late and self.policies.steps.known:
            soonest_s = self._prompt_s(len(request.tokens))
            if soonest_s > promise.ttft_s:
                wait_s = soonest_s + self.admission.pace.wait_s(self.waiting.newcomers, self._now_s)
                raise PromiseBroken(
                    f"tier {promise.name} promises a first token within {promise.ttft_s:g} s, and this prompt of "
                    f"{len(request.tokens)} tokens takes {soonest_s:.2f} s even if it starts now (estimated wait "
                    f"{wait_s:.1f} s); shorten it, or ask for another tier",
                    wait_s,
                )

    def _prompt_s(self, tokens: int) -> float:
        """How long until the first token, for a prompt that starts now beside those who run."""
        constant, per_token, per_read = self.policies.steps.coefficients
        passes = -(-tokens // self.limits.max_num_batched_tokens)
        beside = sum(request.planned for request in self.running)
        return passes * (constant + per_token * len(self.running) + per_read * beside) + per_token * tokens

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
        promise = request.promise
        if promise.reject_late and not request.outputs:
            soonest_s = self._prompt_s(len(request.tokens)) if self.policies.steps.known else 0.0
            request.start_by_s = now_s + max(0.0, promise.ttft_s - soonest_s)
        self.policies.lanes.came(request)
        self.policies.order.arrived(request)
        self.waiting.push(request, self.policies.order.key(request))
        self.deadlines.arm(request)

    def expire(self, now_s: float) -> None:
        """End those whose time is over, whether they wait, run or are in flight. plan() begins with this.

        Who has said something keeps it as its answer; who has not is refused.
        """
        self._now_s = max(self._now_s, now_s)
        for request in self.deadlines.due(now_s):
            out = self._held_back if request in self.inside else self._between
            if request.outputs:
                self._end(request, Reason.TIMEOUT, out)
            else:
                message = self.deadlines.why(request, now_s)
                kind = PromiseBroken if self.deadlines.lost_promise(request, now_s) else DeadlinePassed
                after_s = self.admission.pace.wait_s(len(self.waiting), now_s) if kind is PromiseBroken else None
                out.rejected.append(Rejection(request.id, kind.__name__, message, after_s))
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
        out = self._held_back if request in self.inside else self._between
        self._end(request, reason, out, error=error)
        return True

    def abort(self, request_id: str) -> bool:
        """End a request whose client is gone. False if it has ended already."""
        return self.finish(request_id, Reason.ABORT)

    def finish_at(self, request_id: str, outputs: int) -> bool:
        """End a request at output token number `outputs` (from 1), where the front found a stop string."""
        return self.finish(request_id, Reason.STOP, at_output=outputs)

    @property
    def in_flight(self) -> int:
        """Passes between plan() and commit()."""
        return len(self.flights)

    @property
    def newest_ids(self) -> list[str]:
        """The requests in the newest pass in flight."""
        return self.flights[-1].events.scheduled_ids

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and no pass or copy is in flight."""
        return not self.requests and not self.flights and not self.kv.transfers

    @property
    def news(self) -> bool:
        """Somebody ended or was refused, and no record has told it yet."""
        held = self._held_back.finished if not self.inside else ()
        return bool(self._between.finished or self._between.rejected or held)

    # ---- plan -----------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next pass, or None if there is nothing to compute before another pass comes back."""
        self.expire(now_s)
        events = PassEvents(self._step, planned_s=now_s, budget_tokens=self.limits.max_num_batched_tokens)
        lanes = self.policies.lanes
        cap = lanes.cap if lanes.on else 0
        if self.suspects:
            if self.flights:
                return None  # one pass at a time, so that there is no doubt who was in it
            batch = self._build_suspects(events, now_s)
        elif cap:
            batch = self._build_lanes(events, now_s, cap)
        else:
            batch = self._build(PassBuilder(self._budget), events, now_s)
        # copies go out even if nobody computes; and with nothing else to wait for, wait for them
        if batch.takes or self.kv.has_orders or (self.kv.transfers and not self.flights):
            return self._freeze(batch, events)
        self._between.preempted += events.preempted
        return None

    def _build_lanes(self, events: PassEvents, now_s: float, cap: int) -> PassBuilder:
        """Short or long ones, whose turn it is; the others, if those have nothing to compute."""
        lanes = self.policies.lanes
        first, second = lanes.turns()
        batch = self._build(PassBuilder(self._budget, cap, first), events, now_s)
        if batch.takes:
            lanes.ran(first, other_waits=any(batch.excludes(request) for request in (*self.running, *self.waiting)))
            return batch
        batch = self._build(PassBuilder(self._budget, cap, second), events, now_s)
        if batch.takes:
            lanes.ran(second, other_waits=False)
        return batch

    def _build_suspects(self, events: PassEvents, now_s: float) -> PassBuilder:
        """Those who may have broken a pass, apart from all others."""
        group = self.suspects.group
        for request in list(self.running):
            if request not in group:
                self._set_aside(request, trusted=True)
        batch = PassBuilder(self._budget)
        batch.only = group
        return self._build(batch, events, now_s)

    @property
    def _budget(self) -> int:
        """A group is taken whole: the budget is for those who come one by one."""
        return sys.maxsize if self.policies.batching.grouped else self.limits.max_num_batched_tokens

    def _build(self, batch: PassBuilder, events: PassEvents, now_s: float) -> PassBuilder:
        """Fill a pass with those it does not exclude."""
        if self.policies.prefill.alone:
            self._bound_prompts(batch, events)
            kept = self._more_of_prompts(batch, events)
            self.admitter.admit(batch, events, now_s)
            if kept:
                self._rest_to_prompts(batch)
            if not batch.takes:
                batch.left = max(batch.left, self.limits.max_num_batched_tokens)
                self._decode(batch, events)
        else:
            self._decode(batch, events)
            self._bound_prompts(batch, events)
            kept = self._more_of_prompts(batch, events)
            if not batch.lost:  # who just lost blocks must not see newcomers take them
                self.admitter.admit(batch, events, now_s)
            if kept:
                self._rest_to_prompts(batch)
        return batch

    def _bound_prompts(self, batch: PassBuilder, events: PassEvents) -> None:
        """What is left of the pass for prompts, by the budget policy."""
        if self.policies.budget.learns:
            batch.left = self.policies.budget.prompt_tokens(self.running, batch.decodes, batch.left)
            events.budget_tokens = min(events.budget_tokens, batch.decodes + batch.left)

    def wake_s(self, now_s: float) -> float | None:
        """When to plan again although nothing has happened; None: not before something does."""
        known = (self.policies.batching.wake_s(self.door(now_s)), self.deadlines.next_s())
        return min((at_s for at_s in known if at_s is not None), default=None)

    def door(self, now_s: float) -> Door:
        first = self.waiting.oldest() if self.policies.batching.grouped else self.waiting.first()
        return Door(
            now_s,
            self.limits.max_num_seqs - len(self.running),
            len(self.inside),
            len(self.waiting),
            first.arrived_s if first else now_s,
            self.more_coming,
        )

    def _decode(self, batch: PassBuilder, events: PassEvents) -> None:
        """Those who run and need one position. Hot: once per running request and pass."""
        takes, runs = batch.takes, State.RUNNING
        running = list(self.running)
        if batch.picky:
            running = [request for request in running if not batch.excludes(request)]
        for request in running:
            planned, visible, end = request.planned, len(request.tokens) + request.pending, request.end
            if (
                visible if visible < end else end
            ) - planned == 1 and batch.left > 0:  # request.need(), without the call
                if request.state is runs and planned < request.holding.capacity:
                    takes[request] = 1  # as batch.add, without the call
                    batch.left -= 1
                    batch.decodes += 1
                else:
                    self._give(batch, events, request, 1)

    def _more_of_prompts(self, batch: PassBuilder, events: PassEvents) -> bool:
        """Those who run and need more than one. Whether some of the pass was kept from them, for others in it.

        A giant prompt must not fill pass after pass while somebody waits who goes before it; nor may an endless row of
        those stop it, so a quarter of what is left is for the prompt that has run longest.
        """
        turn, kept = self.policies.order.prefill_key, False
        prompts = [request for request in self.running if request.need() > 1 and not batch.excludes(request)]
        if not prompts:
            return False
        oldest = prompts[0]
        prompts.sort(key=lambda request: (request is not oldest, turn(request)))
        waiting = [(turn(one)[0], len(one.tokens)) for one in self.admitter.line()]
        running = [(turn(one)[0], one.need()) for one in prompts]
        for request in prompts:
            if batch.left <= 0:
                break
            if request.state is State.RUNNING:
                place = turn(request)[0]
                ahead = waiting + running if request is oldest else waiting  # the others come by turn
                wanted = sum(tokens for other, tokens in ahead if other < place)
                left = max(batch.left - wanted, batch.left // 4, 1)
                kept = kept or left < batch.left
                count = self.policies.prefill.take(request.need(), left, not batch.prompts)
                if count:
                    self._give(batch, events, request, count)
        return kept

    def _rest_to_prompts(self, batch: PassBuilder) -> None:
        """What the newcomers did not use goes to the prompts in this pass, where there are blocks for it."""
        for request in sorted(batch.takes, key=self.policies.order.prefill_key):
            given = batch.takes[request]
            if batch.left <= 0:
                break
            if request.need() > given:
                count = self.policies.prefill.take(request.need(), given + batch.left, True)
                if count > given and self.kv.grow(request.holding, request.planned + count):
                    if len(request.holding.blocks) != request.blocks_sent:
                        batch.grown[request] = None
                    batch.raise_to(request, count)

    def _give(self, batch: PassBuilder, events: PassEvents, request: Request, count: int) -> None:
        """Let it compute `count` more positions, taking blocks from others if there are none left."""
        if request.state is not State.RUNNING:
            return  # it gave way to somebody earlier in this pass
        while not self.kv.grow(request.holding, request.planned + count):
            if self.fetching:  # who does not run yet yields first
                self.admitter.stop_fetching(next(reversed(self.fetching)))
                continue
            if self.kv.leaving:
                return  # somebody gave way already: its blocks are free when they have been copied
            victim = self.policies.order.victim(self.may_give_way())
            self.preempt(victim, batch, events)
            if victim is request:
                return
        if len(request.holding.blocks) != request.blocks_sent:
            batch.grown[request] = None
        batch.add(request, count, prompt=count > 1)

    def may_give_way(self) -> list[Request]:
        """Those who have not given way too often. Who has holds all the room it may need, and never asks for more."""
        return [request for request in self.running if request.preemptions < self.max_preemptions]

    def preempt(self, victim: Request, batch: PassBuilder, events: PassEvents) -> None:
        how = self.policies.preempt.choose(victim, self.kv)
        batch.remove(victim)
        batch.lost = True
        events.preempted.append(Preempted(victim.id, victim.computed, how.value))
        if how is How.DROP:
            self._drop(victim)
            return
        victim.furthest = max(victim.furthest, victim.planned)
        if how is How.SWAP:
            victim.parked = self.kv.spill(victim.holding, victim.tokens, victim.computed)
        del self.running[victim]
        self._leave_row(victim)
        self.kv.release(victim.holding)
        victim.holding = None
        victim.computed = victim.planned = 0
        victim.preemptions += 1
        victim.move(State.WAITING)
        if self.evicted is not None:
            self.evicted.append(victim)
        else:
            self.waiting.push(victim, self.policies.order.key(victim))

    def _drop(self, victim: Request) -> None:
        """It ends. Who has said something ends with an error; who has not is refused, and may ask again."""
        out = self._held_back if victim in self.inside else self._between  # told with the next record
        victim.preemptions += 1
        if victim.outputs:
            self._end(victim, Reason.ERROR, out, error=EVICTED)
        else:
            out.rejected.append(Rejection(victim.id, Evicted.__name__, EVICTED))
            self._end(victim, Reason.REJECTED, out, error=EVICTED)

    def _freeze(self, batch: PassBuilder, events: PassEvents) -> StepPlan:
        """Turn the batch into arrays, and count on what they will do. Hot: once per scheduled request and pass."""
        step = self._step
        starting = tuple(row_start(request) for request in batch.starting)
        places = self._places_of(list(batch.takes))
        requests = places.requests
        counts = list(batch.takes.values())
        starts = [request.planned for request in requests]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        if batch.prompts:
            samples, tokens = count_on(requests, starts, ends, step, events)
            if self.policies.order.counts:
                for request, count in zip(requests, counts, strict=True):
                    self.policies.order.computed(request, count)
        else:
            samples, tokens = count_on_decodes(requests, ends, step, events)
        width = self.policies.layout.width(counts) if counts else 0
        dead = self._dead_rows(batch) if width and batch.decodes else 0
        plan = StepPlan(
            step,
            starting,
            grown_blocks(batch),
            places.rows,
            places.lives,
            np.array(starts, dtype=np.int64),
            np.array(counts, dtype=np.int64),
            np.array(samples, dtype=np.int64),
            np.array(tokens, dtype=np.int64),
            self.kv.take_orders(),
            width=width,
            dead=dead,
        )
        events.dead_rows = dead
        events.scheduled_ids = places.ids
        events.scheduled_starts, events.scheduled_counts = starts, counts
        events.computed_tokens = len(tokens)
        masked = []
        if self.grammars:
            masked = [
                (request.row, request)
                for request, sampling in zip(requests, samples, strict=True)
                if request.grammar is not None and sampling
            ]
        self.flights.append(Flight(plan, requests, places.generations, ends, samples, events, masked))
        self._step += 1
        return plan

    def _places_of(self, requests: list[Request]) -> Places:
        """Where they stand; the same as in the pass before, while nobody comes or goes."""
        if self.places is None or self.places.requests != requests:
            generations = [request.generation for request in requests]
            self.places = Places(
                requests,
                [request.id for request in requests],
                generations,
                np.array([request.row for request in requests], dtype=np.int64),
                np.array(generations, dtype=np.int64),
            )
        return self.places

    def _dead_rows(self, batch: PassBuilder) -> int:
        """Rows that are computed for nobody: of those who have ended, or whose last token is on the way."""
        if not self.policies.layout.keeps_dead:
            return 0
        return self.dead + sum(request not in batch.takes and request.need() == 0 for request in self.running)

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
        if self._learns:
            read = int(flight.plan.starts.sum() + flight.plan.counts.sum())
            prompts = len(flight.plan.tokens) > len(flight.requests)
            self.policies.steps.learn(events.computed_tokens + result.padded, read, result.busy_s, prompts)
        if result.copies_done or result.copies_failed:
            self._note_copies(result, events)
        out = self._held_back if self.policies.batching.grouped else events
        failed, logprobs = dict(result.failures), dict(result.logprobs)
        tokens = result.tokens.tolist()
        size, decodes = self.kv.block_size, events.computed_tokens == len(flight.requests)
        for place, first, values in result.prompt_logprobs:
            if flight.requests[place].state is not State.FINISHED:
                out.note_prompt(flight.requests[place].id, first, values)
        finished, number = State.FINISHED, -1  # number of the sampling row
        for request, generation, end, sampling in zip(
            flight.requests, flight.generations, flight.ends, flight.samples, strict=True
        ):
            number += sampling
            if request.state is finished:
                continue  # it ended while this pass computed: too late
            alive = request.generation == generation  # else it was preempted meanwhile
            if alive:
                request.computed = end
            if sampling:
                request.pending -= 1
                if failed and number in failed:
                    why = request.grammar.error if request.grammar is not None else ""
                    self._end(request, Reason.ERROR, out, error=why or failed[number])
                    continue
                if logprobs and number in logprobs:
                    out.logprobs[request.id, request.outputs] = logprobs[number]
                token, ids = tokens[number], request.tokens
                outputs = len(ids) - request.prompt_len
                last = outputs + 1 >= request.max_tokens or token in request.stop_ids
                if last or not outputs or request.grammar is not None:
                    self._append(request, token, out)
                else:  # as _append, without the call
                    out.owners.append(request.id)
                    out.tokens.append(token)
                    out.indexes.append(outputs)
                    ids.append(token)
            if alive and (end % size == 0 or not decodes) and request.holding is not None:
                self.kv.publish(request.holding, request.tokens, end)
        if self.policies.order.counts:
            for request, sampling in zip(flight.requests, flight.samples, strict=True):
                if sampling:
                    self.policies.order.said(request)
        if self.tenants:  # somebody's tokens are counted
            self.tenants.charge(flight.requests, now_s)
        self.rows.committed(flight.plan.step)
        if self.suspects:
            self.suspects.clear()
        if self.kv.host is not None:
            self.kv.spill_cold()
        return self._seal(events, now_s)

    def _note_copies(self, result: StepResult, events: PassEvents) -> None:
        """Blocks have arrived in host memory, or on the device."""
        for number, seconds in result.copies_done:
            out = self.kv.transfers[number].holding is None
            blocks = self.kv.copied(number)
            self.policies.copies.learn(out, blocks, seconds)
            if out:
                events.blocks_out += blocks
            else:
                events.blocks_in += blocks
        for number in result.copies_failed:
            self.kv.copied(number, failed=True)

    def fail(self, error: str, now_s: float) -> PassEvents:
        """The executor broke. Everybody in the passes in flight is a suspect, and is tried again apart from the others;
        one that breaks a pass alone ends with this error.
        """
        events = PassEvents(-1, faults=1)
        accused: dict[Request, None] = {}
        while self.flights:
            flight = self.flights.popleft()
            events.step = flight.plan.step
            events.admitted += flight.events.admitted
            events.preempted += flight.events.preempted
            accused |= dict.fromkeys(request for request in flight.requests if request.state is not State.FINISHED)
            self.rows.committed(flight.plan.step)
        for request in accused:
            request.pending = 0
            if request.state is State.RUNNING:
                self._set_aside(request, trusted=False)
        guilty = self.suspects.accuse(list(accused))
        if guilty is not None:
            self._end(guilty, Reason.ERROR, self._held_back if guilty in self.inside else events, error=error)
        return self._seal(events, now_s)

    def _set_aside(self, request: Request, trusted: bool) -> None:
        """Back into the line, with nothing but its tokens; what it computed may be used by others if it is trusted."""
        if trusted:
            self.kv.release(request.holding)
        else:
            self.kv.discard(request.holding)
        request.holding = None
        request.furthest = max(request.furthest, request.planned)
        request.computed = request.planned = 0
        del self.running[request]
        self._leave_row(request)
        request.move(State.WAITING)
        self.waiting.push(request, self.policies.order.key(request))

    def take_events(self, now_s: float) -> PassEvents:
        """What happened since the last record, when no pass is there to carry it."""
        return self._seal(PassEvents(-1), now_s)

    def _append(self, request: Request, token: int, events: PassEvents) -> None:
        grammar = request.grammar
        if grammar is not None and not grammar.accept(token):
            self._end(request, Reason.ERROR, events, error=grammar.error)
            return
        outputs = len(request.tokens) - request.prompt_len
        if not outputs:
            request.first_s = self._now_s
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
            self.dead = self.dead + 1 if self.running else 0
        else:
            if request.fetching is not None:
                self.admitter.stop_fetching(request)
            self.admitter.unpark(request)
            self.waiting.remove(request, self.policies.order.key(request))
        request.move(State.FINISHED)
        self.policies.lanes.left(request)
        self.inside.discard(request)
        self.suspects.forget(request)
        self.deadlines.drop(request)
        self.tenants.leave(request, self._now_s)
        by_itself = reason in (Reason.STOP, Reason.LENGTH)
        if by_itself:
            self.policies.memory.learn(request)
        self.policies.order.left(request, by_itself)
        request.reason, request.error = reason, error
        del self.requests[request.id]
        kept_ttft, kept_itl = self._kept(request)
        events.finished.append(
            Finished(
                request.id,
                reason,
                request.outputs,
                request.preemptions,
                request.cached_tokens,
                stop_token,
                error,
                request.promise.name,
                kept_ttft,
                kept_itl,
            )
        )

    def _kept(self, request: Request) -> tuple[bool | None, bool | None]:
        """Whether its promises were kept: the first token's, and the others' on average. None: there was none."""
        promise, first_s, gaps = request.promise, request.first_s, request.outputs - 1
        if request.reason is Reason.ABORT:
            return None, None
        ttft = None if promise.ttft_s == math.inf else first_s - request.arrived_s <= promise.ttft_s  # NaN: not kept
        if promise.itl_s == math.inf or gaps < 1 or math.isnan(first_s):
            return ttft, None
        return ttft, (self._now_s - first_s) / gaps <= promise.itl_s

    def _leave_row(self, request: Request) -> None:
        self.places = None
        self.grammars -= request.grammar is not None
        self.rows.give_back(request.row, request.last_step)
        request.row = request.generation = -1
        request.blocks_sent = 0

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        if (
            result.step != plan.step
            or not np.array_equal(result.rows, plan.rows[plan.draws > 0])
            or not np.array_equal(result.generations, plan.generations[plan.draws > 0])
        ):
            raise EngineError(f"asked for pass {plan.step}, the executor answered {result.step} or other rows")

    def _seal(self, events: PassEvents, now_s: float) -> PassEvents:
        """Add what happened between passes and the gauges."""
        between, self._between = self._between, PassEvents(step=-1)
        events.add(between)
        if not self.inside and (self._held_back.owners or self._held_back.finished):  # the group has ended
            held, self._held_back = self._held_back, PassEvents(step=-1)
            events.add(held)
        if events.finished:
            self.admission.pace.note(len(events.finished), now_s)
        events.committed_s = now_s
        events.running, events.waiting = len(self.running), len(self.waiting)
        pool = self.kv.pool
        events.blocks_held, events.blocks_cached, events.blocks_total = pool.held, pool.cached, pool.total
        return events

    def check(self) -> None:
        """Every invariant that must hold between two calls."""
        check(self)
