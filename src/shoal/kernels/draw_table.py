"""Per-row sampling parameters: arrays that the host keeps, and an int32 table of one pass for kernels.

Owns which parameters there are, the order of the table's columns, and how a pass fills them. A parameter is declared
in PARAMETERS and as a field of SamplingState; its meaning is in ref.py. Knows neither requests nor scores.

    SamplingState   one entry per row of the runner      read by the host, by C and by torch
    draw table      [COLUMNS, lines of scores]           read by kernels from device memory; floats as their bits
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shoal.core.plan import Ints
from shoal.kernels.noise import draw_keys

Floats: TypeAlias = npt.NDArray[np.float32]

# what a draw is filtered by, named as in SamplingParams, in the order of the table's columns
PARAMETERS: dict[str, Any] = {"temperature": np.float32, "min_p": np.float32, "top_k": np.int64, "top_p": np.float32}

ROW, KEY, SECOND_KEY = range(3)  # a row below 0 is padding
TEMPERATURE, MIN_P, TOP_K, TOP_P = range(3, 3 + len(PARAMETERS))
COLUMNS = 3 + len(PARAMETERS)


@dataclass(frozen=True)
class Filters:
    """Which filters by rank some line needs; a kernel skips the search for the others."""

    top_k: bool
    top_p: bool


@dataclass(frozen=True, eq=False)
class SamplingState:
    """All that choosing a token reads about rows: one entry per row, unless noted otherwise.

    The fields are in the order of the C struct. Rows that start write into the arrays; an array that must grow is
    replaced, and then there is another SamplingState.
    """

    temperature: Floats
    """0 takes the likeliest token."""
    top_p: Floats
    min_p: Floats
    top_k: Ints
    """0 keeps all."""
    seed: Ints
    sample: Ints
    first_free_end: Ints
    """The first position that may hold one of the row's end tokens."""
    bias_first: Ints
    """With bias_count: the row's stretch of bias_ids and bias_amounts."""
    bias_count: Ints
    ends_first: Ints
    """With ends_count: the row's stretch of ends_ids."""
    ends_count: Ints
    penalty_slot: Ints
    """The row's entry in `seen` and `counts`; -1: it has no penalties."""
    repetition: Floats
    frequency: Floats
    presence: Floats
    bias_ids: Ints
    """Of all rows."""
    ends_ids: Ints
    """Of all rows."""
    bias_amounts: Floats
    """Of all rows."""
    seen: Tensor
    """bool [slots, vocabulary], on the device: the token is in the row's prompt or output."""
    counts: Tensor
    """float32 [slots, vocabulary], on the device: how often the token is in the row's output."""


def stretches(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Of several stretches of an array, all entries: (number of its stretch, index in the array) of each.

    >>> [part.tolist() for part in stretches(np.array([7, 2]), np.array([2, 3]))]
    [[0, 0, 1, 1, 1], [7, 8, 2, 3, 4]]
    """
    owners = np.repeat(np.arange(len(first)), counts)
    before = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) + np.repeat(first - before, counts)


def filters_of(state: SamplingState, rows: Ints) -> Filters | None:
    """The filters that drawing these rows needs; None: they all take the likeliest token."""
    drawn = rows[state.temperature[rows] > 0]
    if not drawn.size:
        return None
    return Filters(bool((state.top_k[drawn] > 0).any()), bool((state.top_p[drawn] < 1).any()))


def fill(table: npt.NDArray[np.int32], state: SamplingState, rows: Ints, positions: Ints) -> None:
    """Write one line of the table for each of these rows, whose tokens will have these positions; pad with row -1."""
    count = len(rows)
    table[ROW, :count], table[ROW, count:] = rows, -1
    temperature = state.temperature[rows]
    if not temperature.any():
        return  # then nothing else is read
    table[KEY : SECOND_KEY + 1, :count] = draw_keys(state.seed[rows], state.sample[rows], positions).T
    for column, (name, dtype) in enumerate(PARAMETERS.items(), start=TEMPERATURE):
        values = getattr(state, name)[rows]
        table[column, :count] = values.view(np.int32) if dtype is np.float32 else values
    table[TEMPERATURE, count:] = 0
