"""Integrity: every invariant that must hold between two calls of the scheduler. Reads everything, changes nothing."""

from shoal.core.request import Request, State
from shoal.sched.tables import SharedTables


def check(tables: SharedTables) -> None:
    """Every invariant that must hold between two calls."""
    assert len(tables.running) <= tables.limits.max_num_seqs, "more requests run than there are slots"
    known = set(tables.running) | set(tables.waiting)
    assert set(tables.requests.values()) == known, "a request is lost or in two tables"
    holdings = [request.holding for request in tables.running] + [request.fetching for request in tables.fetching]
    tables.kv.check(holdings)
    assert all(request.state is State.WAITING for request in tables.fetching), "a request fetches and does not wait"
    tables.rows.check([request.row for request in tables.running])
    tables.waiting.check()
    assert all(request in known for request in tables.suspects), "a request that has ended is suspected"
    tables.deadlines.check(tables.requests.values())
    tables.policies.drafts.check(tables.running)
    if not tables.policies.drafts.drafter.ahead:
        assert not any(flight.drafts for flight in list(tables.flights)[:-1]), "a pass was planned on top of drafts"
    under_way: dict[Request, int] = {}
    for flight in tables.flights:
        for request, draws in zip(flight.requests, flight.draws, strict=True):
            under_way[request] = under_way.get(request, 0) + draws
    for request in tables.requests.values():
        check_request(request, under_way.get(request, 0), tables)


def check_request(request: Request, under_way: int, tables: SharedTables) -> None:
    """One request that has not ended, for which passes in flight draw so many tokens."""
    runs = request in tables.running
    assert (request.state is State.RUNNING) == runs, f"{request} is in the wrong table"
    assert (request.fetching is not None) == (request in tables.fetching), f"{request} fetches, or not"
    assert not runs or not request.parked, f"{request} runs, and the host keeps its blocks"
    assert (request.holding is not None) == runs, f"{request} holds blocks but does not run, or the reverse"
    assert request.pending == under_way, f"{request} waits for tokens that no pass will bring"
    assert 0 <= request.computed <= request.planned <= request.end, f"{request} is ahead of itself"
    assert request.planned <= len(request.tokens) + request.pending, f"{request} computes tokens that are not drawn"
    assert request.outputs < request.max_tokens, f"{request} should have ended"
    if runs:
        pinned = request.preemptions >= tables.max_preemptions
        assert not pinned or request.holding.capacity >= request.end, f"{request} is at its limit and may run short"
        assert request.planned <= request.holding.capacity, f"{request} writes beyond its blocks"
        published = request.holding.published * tables.kv.block_size
        assert published <= request.computed, f"{request} publishes what is not committed"
