"""Tables: what the parts of the scheduler share.

Owns the requests that have not ended, the waiting queue, the running requests with their rows and blocks, and the
passes in flight. A request gets its row and blocks in start() and loses them in vacate(), nowhere else. Knows no
policy's rules: the planner decides what a pass computes, the committer takes what came of it.

                     start()                      ┌─► waiting: preempted, or a suspect
    waiting ─────────────────────► running ─ vacate() ─┤
    (some fetch their blocks)                     └─► finished (endings.py)
"""

from collections import deque
from enum import Enum

from shoal.core.events import PassEvents
from shoal.core.request import Request, State
from shoal.kv.manager import Holding, KVManager
from shoal.sched.admission import Admission, Limits, Rules
from shoal.sched.deadlines import Deadlines
from shoal.sched.flight import Flight
from shoal.sched.policies import Policies
from shoal.sched.rows import RowTable
from shoal.sched.steady import Steady
from shoal.sched.suspects import Suspects


class Blocks(Enum):
    """What becomes of a request's blocks when it is vacated."""

    RELEASE = 1  # the published ones can still be hit
    SWAP = 2  # … and its full blocks are copied to host memory
    DISCARD = 3  # no request may hit them: their content is not to be trusted


class SharedTables:
    """The state of one scheduler."""

    def __init__(self, limits: Limits, kv: KVManager, policies: Policies, rules: Rules) -> None:
        self.limits = limits
        self.kv = kv
        self.policies = policies
        self.max_preemptions = rules.max_preemptions
        self.admission = Admission(limits, kv.pool.total * kv.block_size, rules.max_queue)
        self.deadlines = Deadlines(rules.max_wait_s)
        self.suspects = Suspects()
        self.groups = policies.batching.groups()
        self.rows = RowTable(limits.rows)
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.waiting = policies.order.queue()
        self.running: dict[Request, None] = {}
        self.fetching: dict[Request, None] = {}  # waiting requests that hold blocks, some of which are on their way
        self.flights: deque[Flight] = deque()
        self.between = PassEvents(step=-1)  # events since the last record was handed out
        self.now_s = 0.0  # the latest time that is known
        self.grammars = 0  # running requests that have one
        self.steady: Steady | None = None  # the requests that the last pass decoded, if it had no others but prompts
        self.departures = 0  # how often a request lost its row

    def advance(self, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)

    def enqueue(self, request: Request) -> None:
        self.waiting.push(request, self.policies.order.key(request))

    def dequeue(self, request: Request) -> None:
        self.waiting.remove(request, self.policies.order.key(request))

    def start(self, request: Request, holding: Holding) -> None:
        """Give a waiting request its blocks and a row. It leaves the queue later: that is being read."""
        taken = self.rows.take()
        assert taken is not None, "asked for a row when none was free"
        request.row, request.generation = taken
        request.holding, request.fetching = holding, None
        request.rejected = 0
        self.fetching.pop(request, None)
        self.unpark(request)
        request.move(State.RUNNING)
        self.running[request] = None
        self.grammars += request.grammar is not None
        self.groups.join(request)
        self.policies.layout.started()
        self.policies.drafts.started(request)

    def vacate(self, request: Request, to: State, blocks: Blocks = Blocks.RELEASE) -> None:
        """Take a running request's row and blocks. Its tokens stay, and those on their way will still be appended.

        A request that is to wait again enters the queue later, when that is not being read.
        """
        if blocks is Blocks.SWAP:
            request.parked = self.kv.spill(request.holding, request.tokens, request.computed)
        if blocks is Blocks.DISCARD:
            self.kv.discard(request.holding)
        else:
            self.kv.release(request.holding)
        request.holding = None
        request.furthest = max(request.furthest, request.planned)
        request.computed = request.planned = 0
        del self.running[request]
        self.policies.drafts.stopped(request)
        self.departures += 1
        if self.steady is not None:
            self.steady.leaves(request.generation)
        self.grammars -= request.grammar is not None
        self.rows.give_back(request.row, request.last_step)
        request.row = request.generation = -1
        request.blocks_sent = 0
        request.move(to)

    def stop_fetching(self, request: Request) -> None:
        """Give back the blocks that a waiting request has reserved."""
        self.kv.release(request.fetching)
        request.fetching = None
        del self.fetching[request]

    def unpark(self, request: Request) -> None:
        """Host memory need not keep its blocks any more."""
        if request.parked:
            self.kv.unpin(request.parked)
            request.parked = []
