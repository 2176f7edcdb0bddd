"""What one forward pass must compute, and what came of it.

A StepPlan is a delta over persistent rows, held in arrays: rows that start, blocks that were added to a row,
and which positions of which rows to compute. Everything else the runner already has in its tables.
Both records are tuples, which are made quickly: nothing is filled in later. Knows nothing of requests' states, of
blocks' owners or of torch.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

# token ids that the host does not know yet
FROM_DEVICE = -1  # the row's own last sample
DRAFTED = -2  # its first draft token, left on the device by a draft model; DRAFTED - 1 is the second, and so on
SCRIPTED_END = -(2**31)  # the last token of a replayed request, so that its length is that of the trace


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy KV blocks, beside the passes; StepResult names the id once it is done. Its sources are not written and its
    targets not used until then. "out" may begin at once: what it copies was committed. "in" begins after the passes
    handed over earlier: one of them may still write to its targets for a request that has ended."""

    id: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    direction: str  # "out" (device to host) or "in" (host to device)
    names: tuple[bytes, ...] = ()  # of the blocks' contents, where another process may read or has written them
    peer: str = ""  # "in" from the outbox of another engine, at this address; "": from this engine's own host memory


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row begins, or begins again after a preemption: everything the runner must know about it."""

    row: int
    generation: int
    tokens: tuple[int, ...]  # all known so far: prompt, then output
    prompt_len: int
    params: SamplingParams
    seed: int
    sample: int
    stop_ids: frozenset[int]
    blocks: tuple[int, ...]
    needs_prompt_logprobs: bool
    ends_at: int = 0  # replay: the token at this position is SCRIPTED_END; 0: it ends by itself


class StepPlan(NamedTuple):
    """One pass. The five arrays with one entry per row run in parallel; `tokens` is their concatenation.

    A plan without rows computes nothing: its result comes when all copies handed over so far are done.

    rows         which row                          generations  … and which life of it
    starts       first position to compute          counts       how many positions
    draws        how many tokens the row may yield: one after each of its last `draws` positions
    tokens       ids of all positions, row after row; FROM_DEVICE, DRAFTED and less where the host does not know them
    grown        [k, 3]: (row, index in its block table, block id)
    width        0: ragged; else compute a rectangle with so many columns, padding every row to it
    dead         rows of padding in that rectangle besides
    kept         at least 0: the tokens drawn stay on the device, as draft token number `kept` of their rows in later
                 passes of the model that the executor drafts for

    A row draws nothing in the middle of its prompt, one token at the end of its prompt or when it decodes, and k + 1
    tokens when it verifies k draft tokens, which are the last k of its `tokens`:

        positions   11   12   13   14        starts = 11, counts = 4, draws = 4
        tokens      the   cat  sat  on        "cat sat on" is the draft
        draws       cat   sat  by   –         the third draw differs: 3 tokens are accepted, one position is void

    A pass may be planned while earlier ones are in flight. Then `starts` is the position if every draft token in flight
    is accepted; the runner subtracts what was rejected since.
    """

    step: int
    starting: tuple[RowStart, ...]
    grown: Ints
    rows: Ints
    generations: Ints
    starts: Ints
    counts: Ints
    draws: Ints
    tokens: Ints
    copies: tuple[BlockCopy, ...] = ()
    width: int = 0
    dead: int = 0
    kept: int = -1


class StepResult(NamedTuple):
    """What came of one pass, for each row of the plan that draws, in the plan's order.

    `accepted` is how many tokens a row yields, from 1 to its draws; `tokens` is their concatenation.
    """

    step: int
    rows: Ints
    generations: Ints
    accepted: Ints
    tokens: Ints
    logprobs: tuple[tuple[int, Logprobs], ...] = ()  # (index into tokens, its logprobs)
    # (index into the *plan's* rows, first position, one per position)
    prompt_logprobs: tuple[tuple[int, int, tuple[Logprobs, ...]], ...] = ()
    failures: tuple[tuple[int, str], ...] = ()  # (index into rows, what went wrong); such a row has one void token
    copies_done: tuple[tuple[int, float], ...] = ()  # (id, seconds) of copies completed since the last result
    copies_failed: tuple[int, ...] = ()
    padded: int = 0  # positions of padding that were computed
    busy_s: float = 0.0  # how long the device was busy with it
    cold: bool = False  # it was computed for the first time in its shape: its time says nothing of later passes
