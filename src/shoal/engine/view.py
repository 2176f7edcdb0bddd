"""What an engine is doing, for people: one entry per request, and why those that wait do so.

Reads the scheduler's tables and changes nothing. Owns the words. Shows no tokens, texts or salts: permission to read
this is not permission to read the requests. Knows no HTTP and no terminal.
"""

import math
from typing import Any

from shoal.core.request import Request, State
from shoal.sched.scheduler import Scheduler

MOST = 1000  # requests that are listed


def requests(scheduler: Scheduler, now_s: float, most: int = MOST) -> list[dict[str, Any]]:
    """Running requests first, then waiting ones in the order of the queue."""
    waiting = list(scheduler.waiting.in_order())
    listed: list[tuple[Request, int | None]] = [(request, None) for request in scheduler.running]
    listed += [(request, place) for place, request in enumerate(waiting)]
    return [entry(request, place, scheduler, now_s) for request, place in listed[:most]]


def entry(request: Request, place: int | None, scheduler: Scheduler, now_s: float) -> dict[str, Any]:
    """`place` in the waiting queue, from 0; None for a running request."""
    holding = request.holding
    shown = {
        "id": request.id,
        "state": request.state.value,
        "why": why_waiting(request, place, scheduler) if place is not None else what_runs(request),
        "tenant": request.tenant,
        "tier": request.promise.name,
        "priority": request.priority,
        "prompt_tokens": request.prompt_len,
        "output_tokens": request.outputs,
        "max_tokens": request.max_tokens,
        "computed": request.computed,
        "cached_tokens": request.cached_tokens,
        "blocks": len(holding.blocks) if holding is not None else 0,
        "preemptions": request.preemptions,
        "age_s": round(now_s - request.arrived_s, 3),
    }
    if place is not None:
        shown["place"] = place
    drafts = scheduler.policies.drafts
    if drafts.on:
        shown["draft_tokens"], shown["draft_tokens_accepted"] = drafts.counts(request)
    for name, value in (
        ("time_left_s", request.deadline_s - now_s),
        ("promise_s", promise_s(request)),
        ("slack_s", slack_s(request, now_s)),
    ):
        if value is not None and math.isfinite(value):
            shown[name] = round(value, 3)
    return shown


def what_runs(request: Request) -> str:
    return "prompt" if request.computed < request.prompt_len else "output"


def why_waiting(request: Request, place: int, scheduler: Scheduler) -> str:
    """The first reason that holds; the request at the head of the queue is not overtaken."""
    most, running = scheduler.limits.max_num_seqs, len(scheduler.running)
    if request.pending:
        return "its last token is on the way"
    if running >= most:
        return f"all {most} places are taken"
    if request.group is not None and request.group.must_wait(request, scheduler.kv.block_size):
        return "another sample of its prompt computes what they share"
    if place > 0:
        return f"{place} wait before it"
    if scheduler.policies.batching.grouped and scheduler.running:
        return "the group that runs must end first"
    if request.fetching is not None:
        return "its blocks are on their way from host memory"
    need, free = scheduler.kv.blocks_for(len(request.tokens)), scheduler.kv.pool.free
    if need > free:
        return f"needs {need} KV blocks, {free} are free"
    return "lost its blocks, and comes back soon" if request.preemptions else "comes with the next pass"


# ---- promises -------------------------------------------------------------------------------------------------------


def promise_s(request: Request) -> float:
    """How soon its next token was promised: after its arrival for the first, after the one before for the others."""
    return request.promise.itl_s if request.outputs else request.promise.ttft_s


def slack_s(request: Request, now_s: float) -> float | None:
    """How much time is left of that; below zero it is late. Known while its first token has not come."""
    if request.outputs or request.state is State.FINISHED:
        return None
    return request.arrived_s + promise_s(request) - now_s
