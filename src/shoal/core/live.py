"""What the live page is made of: requests and passes as numbers, without tokens and text.

Owns the records and the port that takes them. An engine numbers its requests, so that a pass of a thousand rows is a
thousand small numbers, and a pass with the same decodes as the one before is none at all. Knows nothing of how records
travel and of what is drawn.
"""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that has arrived at an engine. Its number is the engine's own."""

    number: int
    id: str
    at_s: float
    tenant: str = ""
    tier: str = ""
    prompt: int = 0
    outputs: int = 0  # tokens that it brings from an engine where it ran before
    most: int = 0  # max_tokens
    ttft_s: float | None = None  # promised
    itl_s: float | None = None
    resumed: bool = False  # another engine, or an earlier start of this one, had accepted it


@dataclass(slots=True)
class LivePass:
    """One pass, or what happened between two (step -1). Requests are named by their numbers."""

    step: int
    begun_s: float
    ended_s: float
    rows: list[int] | None = None  # None: one position each of the same requests as in the pass before
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    yields: dict[int, int] | None = None  # with drafts: how many tokens each request got
    computed: int = 0
    recomputed: int = 0
    padded: int = 0
    budget: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0  # KV blocks
    cached: int = 0
    total: int = 0
    host: int = 0
    mfu: float | None = None  # shares of the device's peak, where they are known
    mbu: float | None = None
    admitted: list[tuple[int, float, int, bool]] = field(default_factory=list)  # waited_s, cached tokens, resumed
    preempted: list[tuple[int, int, str]] = field(default_factory=list)  # lost tokens, how
    first: list[int] = field(default_factory=list)  # got their first token
    ended: list[tuple[int, str, int, bool | None, bool | None]] = field(
        default_factory=list
    )  # reason, outputs, whether the promises of TTFT and gaps were kept
    refused: list[str] = field(default_factory=list)  # kinds of refusals


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """Passes of about a tenth of a second. The first of them names its rows."""

    sent_s: float  # by the engine's clock
    came: list[LiveRequest]
    gone: list[int]  # requests that later batches do not name
    packed: bytes  # a list of LivePass, unpacked only if a page or a recording needs it


class LiveSink(Protocol):
    """Takes what engines do, on a front's event loop; must be quick."""

    on: bool

    def up(self, engine: int, epoch: int) -> None: ...

    def down(self, engine: int) -> None: ...

    def batch(self, engine: int, epoch: int, batch: LiveBatch) -> None: ...


class NoLive:
    """Takes nothing, and engines are not asked for it."""

    on = False

    def up(self, engine: int, epoch: int) -> None: ...

    def down(self, engine: int) -> None: ...

    def batch(self, engine: int, epoch: int, batch: LiveBatch) -> None: ...
