"""Committer: takes what came of a pass.

Appends the accepted tokens, publishes full blocks, ends requests and completes the pass's record. A pass planned before
an earlier one was committed counted on all of that one's draft tokens being accepted; the commit corrects it by what
was rejected since:

    pass 7   starts 11, draws 4   ──► accepts 3, rejects 1         computed to 14, planned − 1
    pass 8   starts 15, ends 16, planned before 7 was committed    ──► really 14 … 15

Results that come too late (their request has ended) are dropped. Tokens of a request that was preempted meanwhile are
still appended: they are right, only their KV is gone. Owns nothing; knows no torch and no clock.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Reason, Request, State
from shoal.errors import BadGrammar, EngineError
from shoal.sched.endings import Endings
from shoal.sched.flight import Flight
from shoal.sched.steady import Steady
from shoal.sched.tables import Blocks, SharedTables


class Committer:
    """Commits passes, in the order they were planned."""

    def __init__(self, tables: SharedTables, endings: Endings) -> None:
        self._tables = tables
        self._endings = endings
        self._learns = tables.policies.learns

    def commit(self, result: StepResult, now_s: float) -> PassEvents:
        """Take what came of the oldest pass in flight, and return its record."""
        tables, policies = self._tables, self._tables.policies
        flight = tables.flights.popleft()
        check_result(flight.plan, result)
        tables.advance(now_s)
        events = flight.events
        events.padded_tokens, events.busy_s = result.padded, result.busy_s
        if self._learns:
            self._learn(flight, result)
        if result.copies_done or result.copies_failed:
            self._note_copies(result, events)
        out = tables.groups.record_of_pass(events)
        for index, first, values in result.prompt_logprobs:
            if flight.requests[index].state is not State.FINISHED:
                out.note_prompt(flight.requests[index].id, first, values)
        got, accepted = self._take_tokens(flight, result, out)
        if policies.order.counts:
            drawing = [request for request, draws in zip(flight.requests, flight.draws, strict=True) if draws]
            for request, tokens in zip(drawing, got, strict=True):
                policies.order.generated(request, tokens)
        if policies.drafts.on:
            busy_s = 0.0 if result.cold else result.busy_s
            policies.drafts.committed(flight, accepted, sum(got), busy_s, now_s, bool(tables.running))
        tables.rows.committed(flight.plan.step)
        if tables.suspects:
            tables.suspects.clear()
        if tables.kv.host is not None:
            tables.kv.spill_cold()
        return self.seal(events, now_s)

    def _take_tokens(
        self, flight: Flight, result: StepResult, out: PassEvents
    ) -> tuple[Sequence[int], Mapping[Request, int]]:
        """Commit what each request computed. Returns how many tokens each drawing row got, and how many draft tokens of
        each request that has some were accepted."""
        if flight.rejected is not None or result.failures:
            return self._commit_rows(flight, result, out)
        if flight.steady is None or result.logprobs:
            self._commit_single_draws(flight, result, result.tokens.tolist(), out)
        else:
            self._commit_steady(flight.steady, flight, result, out)
        return [1] * len(result.rows), {}

    def _commit_steady(self, steady: Steady, flight: Flight, result: StepResult, out: PassEvents) -> None:
        """As _commit_single_draws, where most rows go on to decode: only the odd ones are looked at."""
        kv, tokens, first = self._tables.kv, result.tokens.tolist(), 0
        odd = steady.odd(flight.ends, tokens, self._tables.departures != flight.departures)
        for index in [*odd, len(steady)]:
            if first < index:
                for request, end in steady.append(first, index, flight.ends, tokens, out, kv.block_size):
                    kv.publish(request.holding, request.tokens, end)
            last = index + 1 if index < len(steady) else len(flight.ends)  # behind them: prompts
            if index < last:
                self._commit_single_draws(flight, result, tokens, out, index, last)
            first = last

    def _commit_single_draws(
        self,
        flight: Flight,
        result: StepResult,
        drawn: list[int],
        out: PassEvents,
        first: int = 0,
        behind: int | None = None,
    ) -> None:
        """As _commit_rows, where no request has draft tokens and none has failed. Of rows `first` to `behind`; those
        before them draw one token each."""
        kv, size, finished = self._tables.kv, self._tables.kv.block_size, State.FINISHED
        owners, tokens, indexes = out.owners, out.tokens, out.indexes
        logprobs = dict(result.logprobs)
        prompts, index, some = flight.events.computed_tokens > len(flight.requests), first - 1, slice(first, behind)
        for request, generation, end, draws in zip(
            flight.requests[some],
            flight.rows.generation_list[some],
            flight.ends[some],
            flight.draws[some],
            strict=True,
        ):
            index += draws
            if request.state is finished:
                flight.events.late_ids.append(request.id)
                continue
            alive = request.generation == generation
            if alive:
                request.computed = end
            if draws:
                request.pending -= 1
                token, ids = drawn[index], request.tokens
                outputs = len(ids) - request.prompt_len
                if logprobs and index in logprobs:
                    out.logprobs[request.id, outputs] = logprobs[index]
                last = outputs + 1 >= request.max_tokens or token in request.stop_ids
                if last or not outputs or request.grammar is not None:
                    self._append(request, token, out)
                else:  # as _append, without the call
                    owners.append(request.id)
                    tokens.append(token)
                    indexes.append(outputs)
                    ids.append(token)
            if alive and (prompts or end % size == 0):
                holding = request.holding  # None if it has just ended
                if holding is not None and end // size > holding.published:
                    kv.publish(holding, request.tokens, end)

    def _commit_rows(
        self, flight: Flight, result: StepResult, out: PassEvents
    ) -> tuple[Sequence[int], Mapping[Request, int]]:
        """What each request computed, and the tokens that were accepted for it."""
        got: list[int] = []
        right: dict[Request, int] = {}
        failed, logprobs = dict(result.failures), dict(result.logprobs)
        accepted, drawn = result.accepted.tolist(), result.tokens.tolist()
        then = flight.rejected or [0] * len(flight.requests)
        row, index = -1, 0  # of the drawing row, and of its first token
        for request, generation, end, draws, rejected in zip(
            flight.requests, flight.rows.generation_list, flight.ends, flight.draws, then, strict=True
        ):
            first, taken = index, 0
            if draws:
                row += 1
                taken = accepted[row]
                index += taken
                got.append(0)
            if request.state is State.FINISHED:
                flight.events.late_ids.append(request.id)
                continue
            alive = request.generation == generation
            if flight.rejected is not None:
                end = self._reject(request, draws - taken, end - (request.rejected - rejected), alive)
            if alive:
                request.computed = end
            request.pending -= draws
            if draws and row in failed:
                why = request.grammar.error if request.grammar is not None else ""
                kind = BadGrammar if why else None
                self._endings.end(request, Reason.ERROR, out, error=why or failed[row], kind=kind)
                continue
            known = len(request.tokens)
            for number in range(first, first + taken):
                if number in logprobs:
                    out.logprobs[request.id, request.outputs] = logprobs[number]
                if not self._append(request, drawn[number], out):
                    break  # what was drawn after the end is dropped
            if draws:
                got[-1] = len(request.tokens) - known
            if request in flight.drafts:
                right[request] = min(taken - 1, got[-1])
            if alive and request.holding is not None:
                self._tables.kv.publish(request.holding, request.tokens, end)
        return got, right

    def _reject(self, request: Request, rejected: int, end: int, alive: bool) -> int:
        """Take back what was counted on before so many of its draft tokens were rejected; returns its real end."""
        if alive and rejected:
            request.planned -= rejected
            request.rejected += rejected
            self._tables.steady = None
        elif rejected:  # preempted meanwhile: computing the positions of rejected tokens is no second time
            request.furthest = min(request.furthest, len(request.tokens) + request.pending - rejected - 1)
        return end - rejected

    def _append(self, request: Request, token: int, events: PassEvents) -> bool:
        """Commit one token. False if the request has ended."""
        grammar = request.grammar
        if grammar is not None and not grammar.accept(token):
            self._endings.end(request, Reason.ERROR, events, error=grammar.error)
            return False
        outputs = len(request.tokens) - request.prompt_len
        if not outputs:
            request.first_s = self._tables.now_s
        events.owners.append(request.id)
        events.tokens.append(token)
        events.indexes.append(outputs)
        request.tokens.append(token)
        outputs += 1
        if token in request.stop_ids and (outputs > request.params.min_tokens or grammar is not None):
            self._endings.end(request, Reason.STOP, events, stop_token=token)
        elif grammar is not None and grammar.ended:
            self._endings.end(request, Reason.STOP, events)
        elif outputs >= request.max_tokens:
            self._endings.end(request, Reason.HANDED if request.leaves else Reason.LENGTH, events)
        else:
            return True
        return False

    def _learn(self, flight: Flight, result: StepResult) -> None:
        read = sum(flight.ends)
        computed = flight.events.computed_tokens
        prompts = computed - flight.drafted > len(flight.requests)
        self._tables.policies.steps.learn(computed + result.padded, read, result.busy_s, prompts)

    def _note_copies(self, result: StepResult, events: PassEvents) -> None:
        """Blocks have arrived in host memory, or on the device."""
        kv, copies = self._tables.kv, self._tables.policies.copies
        for number, seconds in result.copies_done:
            transfer = kv.transfers[number]
            blocks = kv.copied(number)
            if transfer.peer:
                events.blocks_arrived += blocks
                continue
            copies.learn(transfer.out, blocks, seconds)
            if transfer.out:
                events.blocks_out += blocks
            else:
                events.blocks_in += blocks
        for number in result.copies_failed:
            from_peer = bool(kv.transfers[number].peer)
            blocks = kv.copied(number, failed=True)
            events.blocks_lost += blocks * from_peer

    def fail(self, error: str, now_s: float) -> PassEvents:
        """The executor raised. All requests of the passes in flight become suspects, to be tried again apart from the
        others; one that breaks a pass alone ends with this error.
        """
        tables = self._tables
        events = PassEvents(-1, faults=1)
        accused: dict[Request, None] = {}
        while tables.flights:
            flight = tables.flights.popleft()
            events.step = flight.plan.step
            events.admitted += flight.events.admitted
            events.preempted += flight.events.preempted
            accused |= dict.fromkeys(request for request in flight.requests if request.state is not State.FINISHED)
            tables.rows.committed(flight.plan.step)
        for request in accused:
            request.pending = 0
            if request.state is State.RUNNING:
                tables.vacate(request, State.WAITING, Blocks.DISCARD)
                tables.enqueue(request)
        guilty = tables.suspects.accuse(list(accused))
        if guilty is not None:
            self._endings.end(guilty, Reason.ERROR, events, error=error)
        return self.seal(events, now_s)

    def seal(self, events: PassEvents, now_s: float) -> PassEvents:
        """Complete a record: add what happened between passes, what was held back, and the gauges."""
        tables, pool = self._tables, self._tables.kv.pool
        if tables.between.told:
            events.add(tables.between)
            tables.between = PassEvents(step=-1)
        tables.groups.release(events)
        if events.finished:
            tables.admission.pace.note(len(events.finished), now_s)
        events.committed_s = now_s
        events.running, events.waiting = len(tables.running), len(tables.waiting)
        events.blocks_held, events.blocks_cached, events.blocks_total = pool.held, pool.cached, pool.total
        return events


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Raise EngineError if this is not the result of this plan."""
    same = result.rows is plan.rows and result.generations is plan.generations
    if same and result.step == plan.step and (plan.draws is plan.counts or plan.draws.all()):
        return  # the very same rows, and all of them draw
    drawing = np.flatnonzero(plan.draws)
    if (
        result.step != plan.step
        or result.rows.tobytes() != plan.rows[drawing].tobytes()
        or result.generations.tobytes() != plan.generations[drawing].tobytes()
    ):
        raise EngineError(f"asked for pass {plan.step}, the executor answered {result.step} or other rows")
