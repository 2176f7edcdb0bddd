"""From plan to tensors: the tables that persist between passes, and the batch of one pass, ragged or padded.

Owns every row's block table and last token; a plan holds only their changes. Knows no model and no sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import FROM_DEVICE, Ints, StepPlan
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
    """Block table and last token of every row."""

    def __init__(
        self,
        rows: int,
        blocks_per_row: int,
        block_size: int,
        scratch: int,
        device: torch.device | str,
        agreed: Callable[[Tensor], Tensor] = lambda ids: ids,
    ) -> None:
        """agreed: the ids of the rank that samples, from this one's."""
        self._agreed = agreed
        self.block_size = block_size
        self.scratch = scratch  # the block that padding writes to
        self.device = torch.device(device)
        self.blocks = np.zeros((rows, blocks_per_row), dtype=np.int64)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)

    def note(self, rows: Ints, tokens: Ints) -> None:
        """Keep the last tokens of these rows."""
        if self.device.type == "cpu":  # numpy: caches are cold between two passes, and torch touches more memory
            self.last_token.numpy()[rows] = tokens
        else:
            self.last_token[self._put(rows)] = self._put(tokens)

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
        """Token ids; an id that the host does not know yet is the row's last token."""
        ids = self._put(plan.tokens)
        late = np.flatnonzero(plan.tokens == FROM_DEVICE)
        if late.size:
            ids = ids.clone()
            ids[self._put(late)] = self.last_token[self._put(rows[late])]
            ids = self._agreed(ids)
        return ids

    def _put(self, array: Ints) -> Tensor:
        return to_device(array, self.device)
