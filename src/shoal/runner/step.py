"""One pass as tables of numbers in one buffer, which kernels read from device memory.

Owns the buffer's layout and how a plan fills it. The tables that stay on the device (blocks and last token of every
row) belong to the executor. Knows no model. What follows from the rows and their counts alone is remembered, as in
draws.py.

    draw table (kernels/draw_table.py) │ id, row, position of tokens │ decodes │ blocks of queries │ sampled tokens
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shoal.core.plan import Flags, Ints, StepPlan
from shoal.runner.draws import REMEMBERED, PassDraws

PADDING = -1  # the row of padding
ALIGN = 4  # every table begins on a multiple of 16 bytes: loads are faster, and a kernel needs one version only


@dataclass(frozen=True)
class PassShape:
    """How many entries each table has; entries that a plan does not need are padding."""

    tokens: int
    decodes: int
    blocks: int
    lines: int  # hidden states that are scored
    long: bool = False  # whether a decode has a long past
    queries: int = 1  # what a decode is computed for, at most: one of PassOps.few_queries

    @property
    def size(self) -> int:
        """Numbers in all tables but the draw table."""
        tables = 3 * padded(self.tokens) + 4 * padded(self.decodes) + 5 * padded(self.blocks)
        return tables + padded(self.lines)


@dataclass(frozen=True)
class Tables:
    """Views into a buffer, a numpy array or a tensor."""

    tokens: Any  # [3, tokens]: id (FROM_DEVICE: the row's last token), row (or PADDING), position
    decodes: Any  # [4, decodes]: row, context (0: padding), index of its first query among the tokens, its queries
    blocks: Any  # [5, blocks]: row (PADDING: none), where its queries begin, how many, first of this block, context
    index: Any  # [lines]: which tokens' hidden states are scored


def padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def lay_out(buffer: Any, shape: PassShape, first: int) -> Tables:
    """The tables of a pass in a flat buffer, from number `first` on."""
    views = []
    for lines, size in ((3, shape.tokens), (4, shape.decodes), (5, shape.blocks), (1, shape.lines)):
        wide = padded(size)
        views.append(buffer[first : first + lines * wide].reshape(lines, wide)[:, :size])
        first += lines * wide
    return Tables(views[0], views[1], views[2], views[3][0])


class PassLayout(NamedTuple):
    """Where the rows of a plan are among its tokens, and which are decodes: those with one position, and those that
    verify drafts, up to a few positions each."""

    owners: Ints  # of each token: the index of its row
    rows: Ints  # … that row
    offsets: Ints  # … and how many tokens of it come before
    begins: Ints  # of each row: its first token
    decodes: Ints  # indexes of the rows that are decodes
    decode_rows: Ints
    decode_begins: Ints
    decode_counts: Ints
    chunks: Ints  # indexes of the other rows
    most: int  # positions of a decode, at most


def layout_of(plan: StepPlan, few: int) -> PassLayout:
    """few: positions of a decode that verifies drafts, at most."""
    return _layout(plan.rows.tobytes(), plan.counts.tobytes(), plan.draws.tobytes(), few)


@lru_cache(REMEMBERED)
def _layout(row_bytes: bytes, count_bytes: bytes, draw_bytes: bytes, few: int) -> PassLayout:
    """From the bytes of the plan's arrays."""
    rows, counts, draws = (np.frombuffer(one, dtype=np.int64) for one in (row_bytes, count_bytes, draw_bytes))
    begins = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(rows)), counts)
    is_decode: Flags = (counts == 1) | ((counts == draws) & (counts <= few))
    decodes = np.flatnonzero(is_decode)
    return PassLayout(
        owners,
        rows[owners],
        np.arange(len(owners)) - begins[owners],
        begins,
        decodes,
        rows[decodes],
        begins[decodes],
        counts[decodes],
        np.flatnonzero(~is_decode),
        int(counts[decodes].max(initial=1)),
    )


def count_blocks(counts: Ints, queries: int) -> int:
    """How many blocks of queries prompt chunks of these lengths are split into."""
    return int((-(-counts // queries)).sum())


def fill(tables: Tables, plan: StepPlan, draws: PassDraws, queries: int, few: int) -> None:
    """Fill the tables from the plan; pad the rest with row PADDING."""
    layout, count = layout_of(plan, few), len(plan.tokens)
    tokens, decodes, index = tables.tokens, tables.decodes, tables.index
    tokens[0, :count] = plan.tokens
    tokens[1, :count] = layout.rows
    tokens[2, :count] = plan.starts[layout.owners] + layout.offsets
    if count < tokens.shape[1]:
        tokens[:, count:] = 0
        tokens[1, count:] = PADDING
    count = len(layout.decodes)
    decodes[0, :count] = layout.decode_rows
    decodes[1, :count] = plan.starts[layout.decodes] + layout.decode_counts
    decodes[2, :count] = layout.decode_begins
    decodes[3, :count] = layout.decode_counts
    if count < decodes.shape[1]:
        decodes[:, count:] = 0
    if tables.blocks.shape[1]:
        _fill_blocks(tables.blocks, plan, layout.begins, layout.chunks, queries)
    index[: draws.lines] = draws.scored
    if draws.lines < len(index):
        index[draws.lines :] = 0


def _fill_blocks(blocks: Any, plan: StepPlan, begins: Ints, chunks: Ints, queries: int) -> None:
    """chunks: indexes of the rows with prompt chunks. The longest contexts come first, so that the GPU does not wait
    for one long block at the end."""
    each = -(-plan.counts[chunks] // queries)
    owner = np.repeat(chunks, each)
    count = len(owner)
    first = (np.arange(count) - np.repeat(np.cumsum(each) - each, each)) * queries
    order = np.argsort(-(plan.starts[owner] + first), kind="stable")
    owner, first = owner[order], first[order]
    blocks[0, :count] = plan.rows[owner]
    blocks[1, :count] = begins[owner]
    blocks[2, :count] = plan.counts[owner]
    blocks[3, :count] = first
    blocks[4, :count] = plan.starts[owner] + plan.counts[owner]
    blocks[:, count:] = PADDING


def new_blocks(plan: StepPlan) -> Ints:
    """[n, 3]: (row, index, block) of every block that the plan adds to a block table."""
    parts = [plan.grown] if plan.grown.size else []
    for start in plan.starting:
        blocks = np.empty((len(start.blocks), 3), dtype=np.int64)
        blocks[:, 0], blocks[:, 1], blocks[:, 2] = start.row, np.arange(len(start.blocks)), start.blocks
        parts.append(blocks)
    return np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int64)
