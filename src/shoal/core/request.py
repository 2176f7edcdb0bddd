"""One request on its way through the engine, and the moves it may make.

Owns identity, tokens and progress. Only the scheduler's room writes what stands under "progress".
Knows nothing of blocks beyond the holding it carries, of torch or of clocks.

    Waiting ──► Running ──► Finished
       ▲           │            ▲
       └─preempted─┘            │
    Waiting ────── rejected ────┘        (client gone or error: from anywhere)

A request is `computed` positions catching up with its tokens. Prefill, a chunk of it, decode, and the
resumption after a preemption are all "compute positions a..b"; there is no flag for the phase.

    tokens     0 1 2 3 4 5 6 7 8 | 9 10 |          known on the host: prompt, then output
    pending                               11 12     drawn by passes that have not come back yet
    computed   ███████████                          the KV of these is committed
    planned    █████████████████████████████        … and of these is under way

`planned` and `pending` count on every draft token in flight being accepted. A commit that rejects r of them takes r
back from `planned` and adds it to `rejected`, by which passes planned on top are corrected when they are committed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shoal.core.grammar import Grammar
from shoal.core.params import SamplingParams
from shoal.core.tiers import NO_PROMISE, Tier


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class IllegalMove(AssertionError):
    """A request was moved where it cannot go: a bug, never the user's fault."""


class Reason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"  # the client went away
    ERROR = "error"  # it could not be computed
    TIMEOUT = "timeout"  # its time was over before it was done; what it has is its answer
    REJECTED = "rejected"
    HANDED = "handed"  # its prompt is computed, and another engine goes on from here


class Group:
    """The n samples of one prompt. The first to run computes the prompt; the others wait for its blocks."""

    __slots__ = ("leader", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.leader: Request | None = None

    def must_wait(self, member: "Request", block_size: int) -> bool:
        """Whether another member is computing the full prompt blocks that this one could share."""
        leader = self.leader
        if leader is None or leader is member or leader.state is not State.RUNNING:
            return False
        return leader.computed < (leader.prompt_len - 1) // block_size * block_size


class Request:
    """One sequence of tokens to be continued."""

    __slots__ = (
        "arrived_s",
        "began",
        "blocks_sent",
        "cached_tokens",
        "computed",
        "deadline_s",
        "end",
        "ends_after",
        "error",
        "fetching",
        "first_s",
        "furthest",
        "generation",
        "grammar",
        "group",
        "holding",
        "id",
        "last_step",
        "leaves",
        "max_tokens",
        "names",
        "needs_prompt_logprobs",
        "order",
        "overtaken",
        "params",
        "parked",
        "pending",
        "planned",
        "preemptions",
        "priority",
        "promise",
        "prompt_len",
        "reason",
        "rejected",
        "resumed",
        "row",
        "salt",
        "sample",
        "seed",
        "start_by_s",
        "state",
        "stop_ids",
        "tenant",
        "tier",
        "timeout_s",
        "tokens",
        "waited_s",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        sample: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        group: Group | None = None,
        tenant: str = "",
        salt: str = "",
        ends_after: int = 0,
        output: Sequence[int] = (),
        priority: int = 0,
        tier: str = "",
        timeout_s: float | None = None,
        waited_s: float = 0.0,
        grammar: Grammar | None = None,
    ) -> None:
        self.id = id
        self.params = params
        self.prompt_len = len(prompt)
        self.tokens = [*prompt, *output]  # prompt, then committed output (some, if it ran elsewhere before)
        self.seed = seed
        self.sample = sample  # which of the n samples this is
        self.stop_ids = stop_ids  # ids that end it
        self.group = group
        self.tenant = tenant
        self.salt = salt  # keeps this tenant's prefix cache apart
        self.ends_after = ends_after  # replay: its output has so many tokens, which only the device knows
        self.priority = priority  # lower goes first, where the order policy looks at it
        self.tier = tier  # the name of what it is promised
        self.timeout_s = timeout_s  # from its arrival to its end
        self.waited_s = waited_s  # between its arrival at a front and its submission here
        self.grammar = grammar  # which tokens it may generate; None: all
        self.allow(params.max_tokens or 0)  # 0: filled in at admission
        self.needs_prompt_logprobs = params.prompt_logprobs is not None and sample == 0
        self._begin(bool(output))

    def _begin(self, ran: bool) -> None:
        """Progress: it is new here; it may have run elsewhere."""
        self.state = State.WAITING
        self.began = ran  # it has run, here or elsewhere
        self.resumed = False  # an engine that is gone had accepted it; given at admission
        self.leaves = False  # another engine goes on after its next token; given at admission
        self.order = -1  # arrival number, given at admission
        self.arrived_s = 0.0  # at its front; given at admission
        self.first_s = math.nan  # when its first token was committed
        self.deadline_s = math.inf  # given at admission
        self.promise: Tier = NO_PROMISE  # given at admission
        self.start_by_s = math.inf  # when it is too late to start and keep the promise; given at admission
        self.work = 0.0  # predicted, by the order policy that looks at it and in its own unit
        self.overtaken = 0  # requests that started although it stood ahead of them
        self.computed = 0
        self.planned = 0
        self.pending = 0
        self.rejected = 0  # draft tokens rejected since it got its row
        self.holding: Any = None  # kv.manager.Holding while running
        self.fetching: Any = None  # … while blocks are brought to the device before it starts
        self.parked: list[bytes] = []  # digests of its blocks that the host memory keeps for it
        self.blocks_sent = 0  # how many of its blocks the runner knows
        self.row = -1
        self.generation = -1  # of the row; -1 while it has none
        self.last_step = -1  # the last pass that names the row
        self.preemptions = 0
        self.furthest = 0  # positions below this were planned before a preemption: computing them again is waste
        self.names: list[bytes] = []  # digests of its full blocks, for the prefix cache
        self.cached_tokens = 0  # prompt tokens found in the prefix cache when it first ran
        self.reason: Reason | None = None
        self.error = ""

    @property
    def outputs(self) -> int:
        """How many output tokens are committed."""
        return len(self.tokens) - self.prompt_len

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def ids(self, start: int, end: int) -> list[int]:
        """The token ids of these positions. A simulated request has none, and plans are made without them."""
        return self.tokens[start:end]

    @property
    def newcomer(self) -> bool:
        """Whether it takes one of the places for requests that wait to start."""
        return not self.preemptions and not self.resumed

    @property
    def queued_s(self) -> float:
        """When the wait began that limits on waiting count: its arrival, or its submission here if it was resumed."""
        return self.arrived_s + self.waited_s if self.resumed else self.arrived_s

    def allow(self, max_tokens: int) -> None:
        """Set how many output tokens it may have."""
        self.max_tokens = max_tokens
        self.end = self.prompt_len + max_tokens - 1  # positions that can ever be computed: the last token never is

    def need(self) -> int:
        """Positions that could be computed now."""
        visible = len(self.tokens) + self.pending
        return (visible if visible < self.end else self.end) - self.planned

    def move(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise IllegalMove(f"request {self.id} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.state.value} {self.computed}/{self.planned}/{len(self.tokens)}+{self.pending}>"
        )


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob and rank of one token, and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]
