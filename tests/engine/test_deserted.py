"""A client that goes away: its requests are in no later plan, and their blocks are free soon."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.request import Reason, Request, State
from shoal.sched.scheduler import Scheduler
from tests.effort import examples
from tests.engine.traffic import Move, Run, configs, moves, play
from tests.fakes import make_request, make_scheduler


@dataclass
class Deserted(Run):
    """Remembers which requests were aborted, as their clients had gone."""

    gone: dict[Request, int] = field(default_factory=dict)  # how many commits there were before
    places: set[tuple[int, int]] = field(default_factory=set)  # their rows, in that life
    commits: int = 0
    were_held: int = 0

    def desert(self, id: str) -> None:
        request = self.requests[id]
        self.places.add((request.row, request.generation))
        self.were_held += request.state is State.RUNNING
        assert self.scheduler.abort(id)
        self.gone[request] = self.commits

    def begin(self) -> bool:
        before = len(self.scheduler.flights)
        began = super().begin()
        for flight in list(self.scheduler.flights)[before:]:
            named = zip(flight.plan.rows.tolist(), flight.plan.generations.tolist(), strict=True)
            assert not self.places & set(named), "a later plan names the row of an aborted request"
            assert not self.gone.keys() & set(flight.requests), "an aborted request is in a later plan"
        return began

    def finish(self) -> bool:
        finished = super().finish()
        self.commits += finished
        for request, then in self.gone.items():
            if self.commits >= then + 2:
                assert request.holding is None, "an aborted request holds blocks after two commits"
        others = {block for request in self.scheduler.requests.values() for block in _blocks(request)}
        kv = self.scheduler.kv
        others |= {block for copy in kv.transfers.values() for block in (copy.holding or copy).blocks}
        if all(self.commits >= then + 2 for then in self.gone.values()):
            assert kv.pool.held == len(others), "blocks are held for an aborted request"
        return finished


def _blocks(request: Request) -> list[int]:
    holding = request.holding if request.holding is not None else request.fetching
    return holding.blocks if holding is not None else []


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=60))
@examples(100, of=400)
def test_a_client_that_goes_away_is_in_no_later_plan_and_its_blocks_are_free_within_two_commits(
    config: dict[str, object], depth: int, traffic: list[Move]
) -> None:
    run = Deserted(make_scheduler(**config), depth)  # type: ignore[arg-type]
    for number, move in enumerate(traffic):
        alive = list(run.scheduler.requests)
        if move[0] == "abort" and alive:
            run.desert(alive[int(move[1]) % len(alive)])  # type: ignore[call-overload]
        else:
            play(run, [move], drain=False, first=number)
    run.drain()
    run.verify()


class HoldsOn(Scheduler):
    """Breaks the rule: who is in a pass in flight is not ended before it has said all it may."""

    def finish(self, request_id: str, reason: Reason, at_output: int | None = None, error: str = "") -> bool:
        request = self.requests.get(request_id)
        return bool(request and request.pending) or super().finish(request_id, reason, at_output, error)


def deserters(kind: type[Scheduler] = Scheduler) -> Deserted:
    run = Deserted(make_scheduler(kind=kind, max_num_seqs=4), depth=2)
    for number in range(20):
        run.submit(make_request(f"r{number}", [number % 3] * 9, 12, seed=number))
        while run.begin():
            pass
        if number % 3 == 2:
            run.desert(next(iter(run.scheduler.running)).id)
        run.finish()
    run.drain()
    run.verify()
    return run


def test_a_client_that_goes_away_in_the_middle_of_a_pass() -> None:
    assert deserters().were_held >= 6


def test_an_engine_that_holds_on_to_an_aborted_request_is_noticed() -> None:
    with pytest.raises(AssertionError, match="gone"):
        deserters(HoldsOn)
