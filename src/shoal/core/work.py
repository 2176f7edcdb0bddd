"""What the passes of a model compute and move, and what a device can do: figures for utilisation.

Owns the formula. Knows counts of positions, no plans, no tensors and no clock.

    FLOP   = positions · linear layers + lines · head + (position, earlier position) pairs · attention
    bytes  = the weights, once per pass + KV of the positions read and written

Activations are left out, and windowed attention counts as full: on models with windows the figures are too high.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What one model costs, whatever computes it."""

    flop_position: float  # linear layers, for one position
    flop_line: float  # the head, for one position that is drawn from
    flop_pair: float  # attention of a position to one position, over all layers
    weight_bytes: float  # that a pass reads
    kv_bytes: float  # of one position, over all layers

    def flop(self, positions: float, lines: float, pairs: float) -> float:
        return self.flop_position * positions + self.flop_line * lines + self.flop_pair * pairs

    def moved_bytes(self, passes: float, kv_positions: float) -> float:
        """`kv_positions`: read and written."""
        return self.weight_bytes * passes + self.kv_bytes * kv_positions


NO_WORK = ModelWork(0, 0, 0, 0, 0)  # the model's costs are not known


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device reaches in a measurement: products of matrices of the model's type, and reading memory."""

    flop_s: float
    bytes_s: float
