"""Simulated requests: a prompt is a length with the names of its blocks, and has no token ids.

Owns how such requests are made of a trace. The scheduler only counts tokens, and the KV manager only compares the names
of blocks, so both take these requests as they take any other. Two prompts share a block exactly where the trace says
so. Knows no clock, no scheduling and no costs.

    prefix ids of the trace      7            7 9 9 9 9 …            one for each prefix_block tokens
    names of KV blocks           7.0 7.1 … 7.31 | 9.32 9.33 …        chained: a name stands for all tokens up to its end
    … after the shared prefix    own.64 own.65 …                     of this request alone
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import cast

from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.workload.traces import TraceRequest

ORDINARY, END = 0, 1  # the tokens of simulated answers
END_IDS = frozenset({END})
NAME_BYTES = 16  # of a block's name
NUMBERS = [number.to_bytes(4, "little") for number in range(4096)]  # made once, of the first blocks of a request


class SimulatedRequest(Request):
    """One request of a trace. Its answer has the trace's length, which the scheduler does not know."""

    _names: list[bytes]
    __slots__ = ("_block_size", "_names", "_number", "_one", "_prefix", "_prefix_block")

    def __init__(
        self,
        number: int,
        one: TraceRequest,
        params: SamplingParams,
        block_size: int,
        shared: bool = True,
        tier: str = "",
        tenant: str = "",
    ) -> None:
        super().__init__(
            str(number),
            [],
            params,
            seed=number,
            stop_ids=END_IDS,
            ends_after=one.output,
            tier=tier,
            tenant=tenant,
            salt=tenant,
        )
        self.prompt_len = one.prompt
        # one byte for each token: they have a number, and no ids that anything looks at
        self.tokens = cast("list[int]", bytearray(one.prompt))
        self.allow(params.max_tokens or 0)
        self._number, self._one = number, one
        self._block_size = block_size
        self._prefix, self._prefix_block = (one.prefix, one.prefix_block) if shared else ((), 0.0)

    def continued(self, waited_s: float) -> "SimulatedRequest":
        """The same request with its tokens so far, to go on on another engine; it has waited since its arrival."""
        shared = bool(self._prefix)
        new = SimulatedRequest(self._number, self._one, self.params, self._block_size, shared, self.tier, self.tenant)
        new.tokens = cast("list[int]", bytearray(len(self.tokens)))
        new.began, new.waited_s, new.names = True, waited_s, self.names
        return new

    def ids(self, start: int, end: int) -> list[int]:
        return []

    @property
    def names(self) -> list[bytes]:
        """Of all blocks that it may ever fill; made when they are first needed."""
        if not self._names:
            most = (self.prompt_len + self.ends_after) // self._block_size
            shared = self._shared_names(most)
            own = b"own\0" + self._number.to_bytes(8, "little")
            named = [own + number for number in NUMBERS[len(shared) : most]]
            rest = range(max(len(shared), len(NUMBERS)), most)
            self._names = shared + named + [own + number.to_bytes(4, "little") for number in rest]
        return self._names

    @names.setter
    def names(self, names: list[bytes]) -> None:
        self._names = names

    def _shared_names(self, most: int) -> list[bytes]:
        """Of the blocks within the trace's prefix; each stands for all prefix ids up to its end."""
        size, found = self._block_size, list[bytes]()
        chain = self.salt.encode()
        for index, id in enumerate(self._prefix):
            chain = sha256(chain + id.to_bytes(8, "little", signed=True)).digest()[:12]
            end = min(round((index + 1) * self._prefix_block), self.prompt_len)
            last = min(end // size, most)
            found += [chain + number.to_bytes(4, "little") for number in range(len(found), last)]
        return found


class RequestMaker:
    """Makes the requests of a trace, with one max_tokens for all.

    >>> make = RequestMaker(max_tokens=100, block_size=16)
    >>> one = make(0, TraceRequest(0.0, 600, 10, prefix=(7, 8), prefix_block=512))
    >>> other = make(1, TraceRequest(0.0, 600, 10, prefix=(7, 9), prefix_block=512))
    >>> len(one.tokens), len(one.names), one.names[:32] == other.names[:32], one.names[32] == other.names[32]
    (600, 38, True, False)
    """

    def __init__(self, max_tokens: int, block_size: int, shared: bool = True, tiers: Sequence[str] = ("",)) -> None:
        self.max_tokens = max_tokens
        self._block_size = block_size
        self._shared = shared
        self._tiers = tiers
        self._params: dict[int, SamplingParams] = {}

    def __call__(self, number: int, one: TraceRequest) -> SimulatedRequest:
        most = max(self.max_tokens, one.output)
        if most not in self._params:
            self._params[most] = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        tier = self._tiers[number % len(self._tiers)]
        return SimulatedRequest(number, one, self._params[most], self._block_size, self._shared, tier, one.tenant)
