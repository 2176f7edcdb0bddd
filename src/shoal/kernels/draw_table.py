"""What every line of scores wants of a draw, as a table of int32 that kernels read from device memory.

Owns the columns' order, not what fills them. Fractions are stored as their bits.
"""

from dataclasses import dataclass

ROW, KEY, SECOND_KEY, TEMPERATURE, MIN_P, TOP_K, TOP_P = range(7)  # a line each; a row below 0 is nobody
COLUMNS = 7


@dataclass(frozen=True)
class Filters:
    """Which filters some line needs; the others cost nothing."""

    top_k: bool
    top_p: bool
