"""What happened: one record per pass.

Metrics, traces, the live page and the benchmarks are all readers of these records; the engine writes nothing else.
Per-token facts are parallel lists, not objects: there may be a thousand of them in every pass.
"""

from dataclasses import dataclass, field

from shoal.core.request import Logprobs, Reason, Request


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request was refused when it was submitted, or its time was over before its first token.

    In the second case it had arrived, so it is in `finished`, too, as every request that arrived.
    """

    id: str
    kind: str  # name of the error's class
    message: str
    retry_after_s: float | None = None
    tier: str = ""  # its tier, if it was refused at submission because the tier's promise could not be kept


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a row."""

    id: str
    waited_s: float
    cached_tokens: int  # positions it did not have to compute
    resumed: bool  # it had been preempted before
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request lost its blocks to another."""

    id: str
    lost_tokens: int  # computed positions given up (some may come back from the prefix cache or the host)
    how: str = "recompute"  # … swap or drop


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended; no later record names it."""

    id: str
    reason: Reason
    outputs: int
    preemptions: int
    cached_tokens: int
    stop_token: int | None = None
    error: str = ""
    tier: str = ""
    kept_ttft: bool | None = None  # whether its first token came as soon as promised; None: nothing was promised
    kept_itl: bool | None = None  # … and the others, on average
    kind: str = ""  # of its error: a class in shoal.errors, where the engine is not to blame


@dataclass(slots=True)
class PassEvents:
    """Everything about one pass, from its plan to its commit. step is -1 for what happened between passes."""

    step: int
    planned_s: float = 0.0
    committed_s: float = 0.0
    # since the last record
    arrived: list[str] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)  # when, in the same order
    requests: list[Request] = field(default_factory=list)  # the same, as the engine has them: some may have ended
    rejected: list[Rejection] = field(default_factory=list)
    # from the plan
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    scheduled_ids: list[str] = field(default_factory=list)
    scheduled_starts: list[int] = field(default_factory=list)
    scheduled_counts: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # of those, computed before and lost to a preemption
    kv_reads: int = 0  # KV positions that its rows read
    pairs: int = 0  # (position, position up to it) pairs that attention computes
    lines: int = 0  # positions that tokens are drawn from
    budget_tokens: int = 0
    dead_rows: int = 0
    # from the commit
    proposed: dict[str, int] = field(default_factory=dict)  # draft tokens that were verified, by drafter
    accepted: dict[str, int] = field(default_factory=dict)  # … and of those, accepted
    row_tokens: list[int] = field(default_factory=list)  # how many tokens each row with draft tokens yielded
    late_ids: list[str] = field(default_factory=list)  # requests that had ended already: their rows were in vain
    saved_s: float = 0.0  # how much longer its tokens would have taken without drafts, by the model of passes
    padded_tokens: int = 0  # padding, as counted where it was computed
    blocks_out: int = 0  # KV blocks that have arrived in host memory
    blocks_in: int = 0  # … and back on the device
    blocks_arrived: int = 0  # KV blocks that have come from another engine
    blocks_lost: int = 0  # … and whose copy failed
    faults: int = 0  # passes that raised
    busy_s: float = 0.0
    owners: list[str] = field(default_factory=list)  # owners[i] got tokens[i] as its output number indexes[i]
    tokens: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    logprobs: dict[tuple[str, int], Logprobs] = field(default_factory=dict)  # by owner and index
    prompt_logprobs: dict[str, tuple[int, tuple[Logprobs, ...]]] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    # gauges at the commit
    running: int = 0
    waiting: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0

    @property
    def vain_tokens(self) -> int:
        """Positions that no answer needed: rows of requests that had ended, and draft tokens that were rejected."""
        if not self.late_ids and not self.proposed:
            return 0
        rejected = sum(self.proposed.values()) - sum(self.accepted.values())
        late = set(self.late_ids)
        rows = zip(self.scheduled_ids, self.scheduled_counts, strict=True) if late else ()
        positions = rejected + sum(count for id, count in rows if id in late)
        return max(0, min(positions, self.computed_tokens - self.recomputed_tokens))

    @property
    def told(self) -> bool:
        """Whether it reports anything about requests, besides what a pass computed."""
        return bool(
            self.arrived
            or self.rejected
            or self.preempted
            or self.owners
            or self.logprobs
            or self.prompt_logprobs
            or self.finished
        )

    def add(self, other: "PassEvents") -> None:
        """Add what another record reports about requests."""
        self.arrived += other.arrived
        self.arrived_s += other.arrived_s
        self.requests += other.requests
        self.rejected += other.rejected
        self.preempted += other.preempted
        self.owners += other.owners
        self.tokens += other.tokens
        self.indexes += other.indexes
        self.logprobs |= other.logprobs
        for id, (first, values) in other.prompt_logprobs.items():
            self.note_prompt(id, first, values)
        self.finished += other.finished

    def note_prompt(self, id: str, first: int, values: tuple[Logprobs, ...]) -> None:
        """Prompt logprobs from position `first` on; what is known already (after a preemption) is not doubled."""
        begin, known = self.prompt_logprobs.get(id, (first, ()))
        self.prompt_logprobs[id] = (begin, known + values[max(0, begin + len(known) - first) :])
