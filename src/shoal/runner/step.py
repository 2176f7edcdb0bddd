"""One pass as tables of numbers in one buffer, which kernels read from device memory.

Owns the buffer's layout and how a plan fills it. The tables that stay on the device (blocks and last token of every
row) belong to the executor. Knows no model.

    draw table (kernels/draw_table.py) │ id, row, position of tokens │ decodes │ blocks of queries │ sampled tokens
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.plan import Ints, StepPlan
from shoal.runner.draws import PassDraws

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

    @property
    def size(self) -> int:
        """Numbers in all tables but the draw table."""
        tables = 3 * padded(self.tokens) + 3 * padded(self.decodes) + 5 * padded(self.blocks)
        return tables + padded(self.lines)


@dataclass(frozen=True)
class Tables:
    """Views into a buffer, a numpy array or a tensor."""

    tokens: Any  # [3, tokens]: id (FROM_DEVICE: the row's last token), row (or PADDING), position
    decodes: Any  # [3, decodes]: row, context (0: padding), index of the query among the tokens
    blocks: Any  # [5, blocks]: row (PADDING: none), where its queries begin, how many, first of this block, context
    index: Any  # [lines]: which tokens' hidden states are scored


def padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def lay_out(buffer: Any, shape: PassShape, first: int) -> Tables:
    """The tables of a pass in a flat buffer, from number `first` on."""
    views = []
    for lines, size in ((3, shape.tokens), (3, shape.decodes), (5, shape.blocks), (1, shape.lines)):
        wide = padded(size)
        views.append(buffer[first : first + lines * wide].reshape(lines, wide)[:, :size])
        first += lines * wide
    return Tables(views[0], views[1], views[2], views[3][0])


def count_blocks(plan: StepPlan, queries: int) -> int:
    """How many blocks of queries the plan's prompt chunks are split into."""
    long = plan.counts[plan.counts > 1]
    return int((-(-long // queries)).sum())


def fill(tables: Tables, plan: StepPlan, draws: PassDraws, queries: int) -> None:
    """Fill the tables from the plan; pad the rest with row PADDING."""
    counts, count = plan.counts, len(plan.tokens)
    tables.tokens[0, :count] = plan.tokens
    tables.tokens[:, count:] = 0
    tables.tokens[1, count:] = PADDING
    if count == len(counts):  # one position each
        tables.tokens[1, :count] = plan.rows
        tables.tokens[2, :count] = plan.starts
        _fill_decodes(tables.decodes, plan.rows, plan.starts + 1, np.arange(count))
    else:
        begins = np.cumsum(counts) - counts
        tables.tokens[1, :count] = np.repeat(plan.rows, counts)
        tables.tokens[2, :count] = np.arange(count) - np.repeat(begins - plan.starts, counts)
        single = counts == 1
        _fill_decodes(tables.decodes, plan.rows[single], plan.starts[single] + 1, begins[single])
        _fill_blocks(tables.blocks, plan, begins, queries)
    tables.index[: len(draws.last)] = draws.last
    tables.index[len(draws.last) :] = 0


def _fill_decodes(decodes: Any, rows: Ints, contexts: Ints, queries: Ints) -> None:
    count = len(rows)
    decodes[0, :count], decodes[1, :count], decodes[2, :count] = rows, contexts, queries
    decodes[:, count:] = 0


def _fill_blocks(blocks: Any, plan: StepPlan, begins: Ints, queries: int) -> None:
    """The longest contexts first, so that the GPU does not wait for one long block at the end."""
    long = np.flatnonzero(plan.counts > 1)
    each = -(-plan.counts[long] // queries)
    owner = np.repeat(long, each)
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
