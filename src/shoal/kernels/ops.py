"""The contract between models and devices: what a model computes (Ops), over which tokens (Batch).

Does not know models, requests, schedules or how any device computes.

    queries of one pass, flat:   | seq 0 | seq 1        | s2 |        starts = [0, 3, 8, 9]
    KV cache of one layer:       two tensors [blocks, block_size, kv_heads, head_dim]
    slot of a token:             block id × block_size + offset in the block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from shoal.core.plan import Ints
    from shoal.core.ports import LateMasks
    from shoal.kernels.draw_table import Filters, SamplingState
    from shoal.kernels.weights import Weight


@dataclass(frozen=True, eq=False)
class Batch:
    """Ragged metadata of one forward pass over S sequences and T tokens.

    Query i of sequence s has position contexts[s] − (starts[s+1] − starts[s]) + i.
    Compared by identity: kernels may remember what they derived for the pass.
    """

    positions: Tensor
    """int64 [T]: position of each token in its sequence; all below the longest context."""
    slots: Tensor
    """int64 [T]: where each token's key and value go."""
    starts: list[int]
    """S + 1 offsets into the flat tokens."""
    contexts: list[int]
    """S lengths, each with this pass's tokens included."""
    block_tables: Tensor
    """int64 [S, widest]: each sequence's blocks in order; entries past its context are never read."""
    block_size: int
    """Tokens per block."""
    width: int = 0
    """0: ragged. Else the tokens form a rectangle of block_tables' rows and this many columns, padding included."""
    prepared: object | None = None
    """What the device's kernels would derive from the lists, if that was done before; the lists are then empty."""

    @property
    def longest(self) -> int:
        """The longest context; 0 if only the device knows."""
        return max(self.contexts, default=0)


class FusedLayers(Protocol):
    """All layers of a pass in one call."""

    def __call__(
        self, residual: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """The residual [T, hidden] after all layers, with keys and values written into kv; the one given is used up.

        None: this pass must be computed layer by layer, and nothing has been changed.
        """


class Ops(Protocol):
    """Everything a model computes that a device may compute in its own way."""

    def prepare(self, weight: Weight) -> Weight:
        """The weight in the format that these operations read fastest; the one given is used up."""

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight [vocab, hidden]: the initial residual stream, in the type of the activations."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in] → [T, out]."""

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        """The same plus residual [T, out], which the caller does not use afterwards."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension: float32 inside, back to x's type, then times weight."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2n] → silu of the left half times the right half, [T, n]."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """Everything between the QKV projection and attention.

        qkv [T, (heads + 2 kv_heads) d] → queries [T, heads, d]. Queries and keys are normed per head if norms (of
        queries, of keys, eps) are given, then rotated: value i with value i + d/2, by rope's cos and sin [T, d/2] or
        [T, d]. Keys and values are written into the cache at slots. On a GPU a slot below 0 is padding: nothing is
        stored. qkv is overwritten: the queries may be rotated in place.
        """

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """Causal attention of q [T, heads, d] over each sequence's blocks → [T, heads, d].

        window 0 sees the whole past; window w sees the last w positions, the query's own included.
        """

    def fused(self, layers: Sequence[Any]) -> FusedLayers | None:
        """All of a model's layers in one call; None if this device does not offer that, or not for these layers.

        A device recognises a layer by the `kind` of its attention and MLP and reads their attributes by name.
        """

    def choose(
        self,
        scores: Tensor,
        rows: Ints,
        positions: Ints,
        state: SamplingState,
        masks: LateMasks | None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A token for each line of float32 scores [n, vocab], and the best score of the line: int64 [n], float32 [n].

        Line i belongs to row rows[i] of the state, and its token will have position positions[i]; masks name lines. In
        this order: penalties, biases, and −inf for end tokens that may not come yet (not in masked lines: the grammar
        decides) and for tokens that a mask does not allow; best is the largest score now. At temperature 0 the first of
        the best is chosen, else one draw among the tokens that top_k, top_p and min_p leave. The scores stay as they
        are; counts of rows with penalties go on. Where best is not finite, the token has no meaning.

        expected: the draft token that each line verifies, or -1; after one that does, the next line is of the same row.
        Penalties then count along the draft: a line sees the drafts before it as if they had been drawn, and of each
        row only the tokens up to the first that is not its draft are added to the counts.
        """

    @property
    def pass_ops(self) -> PassOps | None:
        """What an executor launches around the layers of recorded passes; None: this device does not record them."""


class PassOps(Protocol):
    """The work around a model's layers on a device that must not wait for the host: all arguments are on the device,
    results go into tensors of the caller, and every call can be recorded in a graph."""

    long_context: int
    """A decode with more past positions than this counts as long."""

    def queries_per_block(self, group: int, head_dim: int, kind: dtype) -> int:
        """Queries of a prompt chunk that attention computes at once; group: query heads per KV head."""

    def few_queries(self, group: int, head_dim: int, kind: dtype) -> tuple[int, ...]:
        """Numbers of queries of one sequence, ascending from 1, that attention computes as it computes a decode."""

    def prepared(self, tables: Tensor, decodes: Tensor, blocks: Tensor, long: bool, queries: int) -> object:
        """Batch.prepared for the tables of runner/step.py; long: some decode is; queries: the one of few_queries that
        is enough for all decodes."""

    def add_blocks(self, new: Tensor, tables: Tensor) -> None:
        """tables[row, index] = block for every (row, index, block) of new, int32 [n, 3]."""

    def place_tokens(
        self, ids: Tensor, rows: Tensor, positions: Tensor, late: Tensor, tables: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, positions, slots), int64 [T]. An id below 0 stands for late[-1 - id, row]; a row below 0 is padding."""

    def likeliest(self, scores: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
        """`draw` at temperature 0, without a table."""

    def draw(
        self, scores: Tensor, table: Tensor, last_token: Tensor, out: Tensor, best: Tensor, filters: Filters
    ) -> None:
        """`choose` for lines without edits and masks, whose parameters stand in a draw table (draw_table.py).

        Tokens go into out (int32), best scores into best (float32; infinity where a score is NaN), and each token into
        last_token at its row, unless that is below 0.
        """
