"""From plan to tensors: the tables that persist between passes, and the batch of one pass, ragged or padded.

Owns every row's block table, last token and the draft tokens that are on the device; a plan holds only their changes.
Knows no model and no sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Ints, StepPlan
from shoal.kernels import Batch
from shoal.kernels.transfer import to_device
from shoal.runner.draws import PassDraws


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The model's inputs of one pass, and which of its outputs are scored."""

    ids: Tensor
    batch: Batch
    draws: PassDraws
    scored: Ints  # indexes of the flat positions whose hidden states are scored, one per draw


class RowTables:
    """Block table and tokens on the device of every row. A draft model's tables leave them in those of its model:

    late[0]   last_token: what the row drew last              ids: FROM_DEVICE
    late[1]   drafted[0]: its first draft token  ◄─ keep(0)        DRAFTED
    late[2]   drafted[1]: its second             ◄─ keep(1)        DRAFTED - 1
    """

    def __init__(
        self,
        rows: int,
        blocks_per_row: int,
        block_size: int,
        scratch: int,
        device: torch.device | str,
        agreed: Callable[[Tensor], Tensor] = lambda ids: ids,
        most_drafts: int = 0,
        drafts_for: "RowTables | None" = None,
    ) -> None:
        """agreed: the ids of the rank that samples, from this one's; most_drafts: draft tokens of a row that can be on
        the device; drafts_for: the tables of the model that this one drafts for."""
        self._agreed = agreed
        self._drafts_for = drafts_for
        self.block_size = block_size
        self.scratch = scratch  # the block that padding writes to
        self.device = torch.device(device)
        self.blocks = np.zeros((rows, blocks_per_row), dtype=np.int64)
        self.late = torch.zeros((1 + most_drafts, rows), dtype=torch.int64, device=device)
        self.last_token, self.drafted = self.late[0], self.late[1:]

    def note(self, rows: Ints, tokens: Ints) -> None:
        """Keep the last tokens of these rows."""
        if self.device.type == "cpu":  # numpy: caches are cold between two passes, and torch touches more memory
            self.last_token.numpy()[rows] = tokens
        else:
            self.last_token[self._put(rows)] = self._put(tokens)

    def keep(self, number: int) -> None:
        """Leave the last tokens as draft tokens of this number. Rows that drew none leave one that is not read."""
        assert self._drafts_for is not None, "tokens are kept for another model only"
        self._drafts_for.drafted[number].copy_(self.last_token)

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's changes."""
        for start in plan.starting:
            self.blocks[start.row, : len(start.blocks)] = start.blocks
        if plan.grown.size:
            self.blocks[plan.grown[:, 0], plan.grown[:, 1]] = plan.grown[:, 2]

    def gather(self, plan: StepPlan, draws: PassDraws) -> PassInputs:
        """The batch in the shape that the plan asks for."""
        return self._rectangle(plan, draws) if plan.width else self._ragged(plan, draws)

    def _ragged(self, plan: StepPlan, draws: PassDraws) -> PassInputs:
        """Rows end to end, no padding."""
        counts, size = plan.counts, self.block_size
        offsets = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(plan.rows, counts)
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - plan.starts, counts)
        slots = self.blocks[rows, positions // size] * size + positions % size
        contexts = plan.starts + counts
        widest = -(-int(contexts.max()) // size)
        batch = Batch(
            positions=self._put(positions),
            slots=self._put(slots),
            starts=offsets.tolist(),
            contexts=contexts.tolist(),
            block_tables=self._put(self.blocks[plan.rows, :widest]),
            block_size=size,
        )
        return PassInputs(self._ids(plan, rows), batch, draws, draws.scored)

    def _rectangle(self, plan: StepPlan, draws: PassDraws) -> PassInputs:
        """Every row padded to the width, plus rows of padding; padding reads and writes the scratch block."""
        rows, width, size = len(plan.rows) + plan.dead, plan.width, self.block_size
        ragged = self._ragged(plan, draws)
        at = np.repeat(np.arange(len(plan.rows)) * width - np.array(ragged.batch.starts[:-1]), plan.counts)
        cells = at + np.arange(len(at))  # the cell of the rectangle that holds each real position
        positions = np.zeros(rows * width, dtype=np.int64)
        slots = np.full(rows * width, self.scratch * size, dtype=np.int64)
        positions[cells] = ragged.batch.positions.cpu().numpy()
        slots[cells] = ragged.batch.slots.cpu().numpy()
        ids = torch.zeros(rows * width, dtype=torch.int64, device=self.device)
        ids[self._put(cells)] = ragged.ids
        contexts = plan.starts + plan.counts
        tables = np.full((rows, ragged.batch.block_tables.shape[1]), self.scratch, dtype=np.int64)
        filled = np.arange(tables.shape[1]) < -(-contexts // size)[:, None]
        tables[: len(plan.rows)][filled] = ragged.batch.block_tables.cpu().numpy()[filled]
        batch = Batch(
            positions=self._put(positions),
            slots=self._put(slots),
            starts=list(range(0, rows * width + 1, width)),
            contexts=[*contexts.tolist(), *([1] * plan.dead)],
            block_tables=self._put(tables),
            block_size=size,
            width=width,
        )
        return PassInputs(ids, batch, draws, cells[draws.scored])

    def _ids(self, plan: StepPlan, rows: Ints) -> Tensor:
        """Token ids; one that the host does not know yet is on the device."""
        ids = self._put(plan.tokens)
        late = np.flatnonzero(plan.tokens < 0)
        if late.size:
            ids = ids.clone()
            ids[self._put(late)] = self.late[self._put(-1 - plan.tokens[late]), self._put(rows[late])]
            ids = self._agreed(ids)
        return ids

    def _put(self, array: Ints) -> Tensor:
        return to_device(array, self.device)
