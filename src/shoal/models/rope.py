"""Rotary position embedding: the frequencies of each kind, and a table of cos and sin by position.

Knows tensors. Does not know families, files, sequences or block ids.
"""

import math

import torch
from torch import Tensor

from shoal.errors import UnsupportedModel
from shoal.models.spec import RopeSpec

FIRST_POSITIONS = 4096


class RopeTable:
    """cos and sin of every position requested so far, float32, grown by doubling."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.frequencies = checked_frequencies(spec, head_dim).to(device)
        self.amplitude = rope_amplitude(spec)
        self.cos = self.sin = self.frequencies.new_empty((0, head_dim // 2))

    def reserve(self, count: int) -> None:
        """Hold positions 0..count-1."""
        have = self.cos.shape[0]
        if count <= have:
            return
        count = max(count, 2 * have, FIRST_POSITIONS)
        positions = torch.arange(count, device=self.frequencies.device, dtype=torch.float32)
        angles = positions[:, None] * self.frequencies
        self.cos, self.sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude

    def rows(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, head_dim / 2]; all positions are below `longest`, a host number: no sync."""
        self.reserve(longest)
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def checked_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """The frequencies; UnsupportedModel if the spec's numbers give none."""
    try:
        found = rope_frequencies(spec, head_dim)
    except (ArithmeticError, ValueError):
        found = torch.full((1,), math.nan)
    if not bool(torch.isfinite(found).all()):
        raise UnsupportedModel("the rope parameters give no finite frequencies; correct them in config.json")
    return found


def rope_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position for each half-pair, float32 [head_dim / 2]."""
    wavelengths = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / wavelengths
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3_frequencies(spec, plain)
    if spec.kind == "yarn":
        stretched = 1.0 / (spec.factor * wavelengths)
        keep = 1 - _yarn_ramp(spec, head_dim)
        return stretched * (1 - keep) + plain * keep
    return plain


def rope_amplitude(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by; other than 1 only for yarn."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _yarn_scale(spec.factor, spec.mscale) / _yarn_scale(spec.factor, spec.mscale_all_dim)
    return _yarn_scale(spec.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3_frequencies(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Short waves stay; waves longer than the old context are stretched; those between are interpolated."""
    rotations = spec.original_max_position * plain / (2 * math.pi)  # full rotations within the old context
    mix = ((rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - mix) * plain / spec.factor + mix * plain


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> Tensor:
    """0 for a frequency that is kept, 1 for one that is stretched by the whole factor."""

    def pair_rotating(rotations: float) -> float:
        """Index (in values, not pairs) of the frequency that rotates this many times in the old context."""
        return head_dim * math.log(spec.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_rotating(spec.beta_fast), pair_rotating(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
