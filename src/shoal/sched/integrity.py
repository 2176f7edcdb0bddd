"""Integrity: every invariant that must hold between two calls of the scheduler. Reads everything, changes nothing."""

from typing import TYPE_CHECKING

from shoal.core.request import Request, State

if TYPE_CHECKING:
    from shoal.sched.scheduler import Scheduler


def check(scheduler: "Scheduler") -> None:
    """Every invariant that must hold between two calls."""
    assert len(scheduler.running) <= scheduler.limits.max_num_seqs, "more requests run than there are slots"
    everyone = set(scheduler.running) | set(scheduler.waiting)
    assert set(scheduler.requests.values()) == everyone, "a request is lost or in two places"
    holdings = [request.holding for request in scheduler.running] + [request.fetching for request in scheduler.fetching]
    scheduler.kv.check(holdings)
    assert all(request.state is State.WAITING for request in scheduler.fetching), "somebody fetches and does not wait"
    scheduler.rows.check([request.row for request in scheduler.running])
    scheduler.waiting.check()
    assert all(request in everyone for request in scheduler.suspects), "somebody who has ended is suspected"
    scheduler.deadlines.check(scheduler.requests.values())
    scheduler.tenants.check(scheduler.requests.values())
    under_way: dict[Request, int] = {}
    for flight in scheduler.flights:
        for request, sampling in zip(flight.requests, flight.samples, strict=True):
            under_way[request] = under_way.get(request, 0) + sampling
    for request in scheduler.requests.values():
        runs = request in scheduler.running
        assert (request.state is State.RUNNING) == runs, f"{request} is in the wrong place"
        assert (request.fetching is not None) == (request in scheduler.fetching), f"{request} fetches, or not"
        assert not runs or not request.parked, f"{request} runs, and the host keeps its blocks"
        assert (request.holding is not None) == runs, f"{request} holds blocks but does not run, or the reverse"
        assert request.pending == under_way.get(request, 0), f"{request} waits for tokens that no pass will bring"
        assert 0 <= request.computed <= request.planned <= request.end, f"{request} is ahead of itself"
        assert request.planned <= len(request.tokens) + request.pending, f"{request} computes tokens nobody has"
        assert request.outputs < request.max_tokens, f"{request} should have ended"
        if runs:
            pinned = request.preemptions >= scheduler.max_preemptions
            assert not pinned or request.holding.capacity >= request.end, f"{request} is pinned and may run short"
            assert request.planned <= request.holding.capacity, f"{request} writes beyond its blocks"
            published = request.holding.published * scheduler.kv.block_size
            assert published <= request.computed, f"{request} lets others hit what is not committed"
