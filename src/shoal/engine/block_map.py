"""The KV cache as a map, and the queue with its reasons: what the live page shows beside the passes.

Reads the scheduler's tables when a page asks, and changes nothing. A cache of many blocks is shown in cells of several
blocks each. Knows no HTTP and no drawing.
"""

from itertools import chain
from typing import Any

import numpy as np

from shoal.engine import view
from shoal.kv.host import HostTier
from shoal.kv.pool import BlockPool
from shoal.sched.scheduler import Scheduler

CELLS = 2048  # most cells of a map
QUEUE = 48  # waiting requests that are listed
EVERY_S = 0.5  # between two questions …
EVERY_BLOCK_S = 3e-5  # … and longer where many blocks are held, which takes time to list
FREE, CACHED, HELD, SHARED = range(4)


def live_view(scheduler: Scheduler, now_s: float) -> dict[str, Any]:
    """The answer for a live page."""
    queue = []
    for place, request in enumerate(scheduler.waiting.in_order()):
        if place == QUEUE:
            break
        slack_s = view.slack_s(request, now_s)
        known = slack_s is not None and abs(slack_s) < 1e9
        why = view.why_waiting(request, place, scheduler)
        queue.append([request.id, why, round(slack_s, 3) if known and slack_s is not None else None])
    kv = scheduler.kv
    return {
        "queue": queue,
        "waiting": len(scheduler.waiting),
        "places": scheduler.limits.max_num_seqs,
        "blocks": block_map(scheduler),
        **({} if kv.host is None else {"host_blocks": host_map(scheduler, kv.host)}),
        "host": [0 if kv.host is None else len(kv.host), 0 if kv.host is None else kv.host.total],
        "block_size": kv.block_size,
        "every_s": max(EVERY_S, (kv.pool.held + (0 if kv.host is None else len(kv.host))) * EVERY_BLOCK_S),
    }


def block_map(scheduler: Scheduler) -> dict[str, Any]:
    """Cells in the order of block ids, as runs of [state, owner or -1, cells]; owners are listed by id."""
    pool = scheduler.kv.pool
    held = {one.id: one.holding.blocks for one in list(scheduler.running) if one.holding and one.holding.blocks}
    lengths = [len(blocks) for blocks in held.values()]
    owner = np.full(pool.total, -1, dtype=np.int32)
    blocks = np.fromiter(chain.from_iterable(held.values()), dtype=np.int32, count=sum(lengths))
    owner[blocks] = np.repeat(np.arange(len(held), dtype=np.int32), lengths)
    return in_cells(states(pool), owner, list(held))


def host_map(scheduler: Scheduler, host: HostTier) -> dict[str, Any]:
    """The same of host memory: what waiting requests have there is held, the rest is cached or free."""
    owner = np.full(host.total, -1, dtype=np.int32)
    state = np.full(host.total, FREE, dtype=np.int8)
    state[host.used()] = CACHED
    ids: list[str] = []
    for request in list(scheduler.waiting.in_order()):
        places = [place for name in request.parked if (place := host.place_of(name)) is not None]
        if places:
            owner[places], state[places] = len(ids), HELD
            ids.append(request.id)
    return in_cells(state, owner, ids)


def in_cells(state: Any, owner: Any, ids: list[str]) -> dict[str, Any]:
    total = len(state)
    per_cell = max(1, -(-total // CELLS))
    if per_cell > 1:
        state, owner = condense(state, owner, per_cell)
    return {"total": total, "per_cell": per_cell, "owners": ids, "runs": runs(state, owner)}


def states(pool: BlockPool) -> "np.ndarray[Any, np.dtype[np.int8]]":
    references = np.frombuffer(pool.references, dtype=np.int32)
    found = np.where(references > 1, SHARED, np.where(references == 1, HELD, FREE)).astype(np.int8)
    cached = np.frombuffer(pool.published, dtype=bool) & (references == 0)
    found[cached] = CACHED
    return found


def condense(state: Any, owner: Any, per_cell: int) -> tuple[Any, Any]:
    """One value for several blocks: the most used state, and the owner of the first block that has one.

    >>> condense(np.array([2, 0, 2, 0, 0], dtype=np.int8), np.array([4, -1, 4, -1, -1]), 3)
    (array([2, 0], dtype=int8), array([ 4, -1]))
    """
    cells = -(-len(state) // per_cell)
    cell = np.arange(len(state)) // per_cell
    counts = np.bincount(4 * cell + state, minlength=4 * cells).reshape(cells, 4)
    most = counts.argmax(axis=1).astype(np.int8)
    owned = np.flatnonzero(owner >= 0)[::-1]
    first = np.full(cells, -1, dtype=owner.dtype)
    first[cell[owned]] = owner[owned]  # the first block of a cell is written last
    return most, np.where(most >= HELD, first, -1)


def runs(state: Any, owner: Any) -> list[list[int]]:
    """
    >>> runs(np.array([2, 2, 0]), np.array([1, 1, -1]))
    [[2, 1, 2], [0, -1, 1]]
    """
    if not len(state):
        return []
    edges = np.flatnonzero((np.diff(state) != 0) | (np.diff(owner) != 0)) + 1
    begins = np.concatenate(([0], edges))
    lengths = np.diff(np.concatenate((begins, [len(state)])))
    found: list[list[int]] = np.stack((state[begins], owner[begins], lengths), axis=1).tolist()
    return found
