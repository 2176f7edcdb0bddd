"""Kernels: what a model asks of a device, and a table device → who answers.

Owns the ragged Batch that every kernel reads and the Ops contract. Does not know models, requests or schedules.

    queries of one pass, flat:   | seq 0 | seq 1        | s2 |        starts = [0, 3, 8, 9]
    KV cache of one layer:       two tensors [blocks, block_size, kv_heads, head_dim]
    slot of a token:             block id × block_size + offset in the block
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from shoal.core.plan import Ints
    from shoal.core.ports import LateMasks
    from shoal.kernels.draw_table import Filters, SamplingState
    from shoal.kernels.int8 import Weight

__all__ = ["Batch", "Layer", "Ops", "PassOps", "available", "pick"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Ragged metadata of one forward pass over S sequences and T tokens.

    Query i of sequence s stands at position contexts[s] − (starts[s+1] − starts[s]) + i.
    Compared by identity: kernels may remember what they worked out for the pass.
    """

    positions: Tensor
    """int64 [T]: place of each token in its sequence; every one below the longest context."""
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
    """0: ragged. Else the tokens form a rectangle of block_tables' rows and so many columns, padding included."""
    prepared: object | None = None
    """What the device's kernels would work out from the lists, if that was done before; the lists are then empty."""

    @property
    def longest(self) -> int:
        """The longest context; 0 where only the device knows."""
        return max(self.contexts, default=0)


@dataclass(frozen=True, eq=False)
class Layer:
    """The parameters of a decoder's layer: attention, then a gated pair of products, each adding to the residual."""

    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """Of each head's queries, with k_norm; None: they are not normed."""
    k_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    eps: float
    scale: float
    window: int
    """0: the whole past."""


class Ops(Protocol):
    """Everything a model computes that a device may want to compute in its own way."""

    def arranged(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's parameters, by name, as these operations like to read them; those given are used up."""

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight [vocab, hidden]: the residual stream's beginning, in the type that activations shall have."""

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
        turn: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """What stands between the product that makes queries, keys and values, and attention.

        qkv [T, (heads + 2 kv_heads) d] → queries [T, heads, d]. Queries and keys are normed per head where norms (of
        queries, of keys, eps) are given, and turned: value i with value i + d/2, by turn's cos and sin [T, d/2] or
        [T, d]. Keys and values go into the cache at slots. On a GPU a slot below 0 is padding: nothing is stored.
        What qkv held is lost: the queries may be turned in place.
        """

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """Causal attention of q [T, heads, d] over each sequence's blocks → [T, heads, d].

        window 0 sees the whole past; window w sees the last w positions, the query's own included.
        """

    def layers(
        self,
        layers: Sequence[Layer],
        residual: Tensor,
        turn: tuple[Tensor, Tensor],
        batch: Batch,
        kv: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """All layers of a pass: residual [T, hidden], which is lost, → the same after them. Writes into kv."""

    def choose(
        self, scores: Tensor, rows: Ints, positions: Ints, state: SamplingState, masks: LateMasks | None
    ) -> tuple[Tensor, Tensor]:
        """A token for each line of float32 scores [n, vocab], and the best score of the line: int64 [n], float32 [n].

        Line i belongs to row rows[i] of the state, and its token will have position positions[i]. In this order:
        penalties, biases, and −inf for end tokens that may not come yet (not in masked lines: the grammar decides) and
        for tokens that a mask does not allow; best is the largest score now. At temperature 0 the first of the best is
        chosen, else one draw among the tokens that top_k, top_p and min_p leave. The scores stay as they are; counts
        of rows with penalties go on. Where best is not finite, the token has no meaning.
        """

    @property
    def pass_ops(self) -> PassOps | None:
        """What an executor launches around the layers of recorded passes; None: this device does not record them."""


class PassOps(Protocol):
    """The work around a model's layers on a device that must not wait for the host: all arguments are on the device,
    results go where the caller wants them, and every call can be recorded in a graph."""

    long_context: int
    """A decode with more past positions than this counts as long."""

    def queries_per_block(self, group: int, head_dim: int, kind: dtype) -> int:
        """Queries of a prompt chunk that attention computes at once; group: query heads per KV head."""

    def prepared(self, tables: Tensor, decodes: Tensor, blocks: Tensor, long: bool) -> object:
        """Batch.prepared for the tables of runner/step.py; long: some decode is."""

    def add_blocks(self, new: Tensor, tables: Tensor) -> None:
        """tables[row, index] = block for every (row, index, block) of new, int32 [n, 3]."""

    def place_tokens(
        self, ids: Tensor, rows: Tensor, positions: Tensor, last_token: Tensor, tables: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, positions, slots), int64 [T]. An id below 0 is the row's last token; a row below 0 is padding."""

    def likeliest(self, scores: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
        """`draw` at temperature 0, without a table."""

    def draw(
        self, scores: Tensor, table: Tensor, last_token: Tensor, out: Tensor, best: Tensor, filters: Filters
    ) -> None:
        """`choose` for lines without edits and masks, whose parameters stand in a draw table (draw_table.py).

        Tokens go into out (int32), best scores into best (float32; infinity where a score is NaN), and each token into
        last_token at its row, unless that is below 0.
        """


def _ref() -> Ops:
    from shoal.kernels.ref import RefOps

    return RefOps()


def _cpu(level: str) -> Ops:
    from shoal.kernels.cpu import make

    return make(level)


def _triton() -> Ops:
    from shoal.kernels.triton import TritonOps

    return TritonOps()


_TABLE: dict[str, Callable[[], Ops]] = {"cuda": _triton}


def pick(device_type: str, cpu_level: str = "auto") -> Ops:
    """The kernels for a torch device type; devices without their own get the plain-torch ones."""
    return _cpu(cpu_level) if device_type == "cpu" else _TABLE.get(device_type, _ref)()


def available() -> list[tuple[str, Ops]]:
    """(name, kernels) of every implementation that runs here, for tests that compare them with ref."""
    from shoal.kernels.cpu import LEVELS, Library, NativeOps, find

    found: list[tuple[str, Ops]] = [("ref", _ref()), ("cpu", _cpu("off"))]
    for level in LEVELS:
        library = find(level)
        if isinstance(library, Library) and library.level == level:
            found.append((level, NativeOps(library)))
    return found
