"""The rope scaling of a GGUF file, as the `rope_scaling` entry of a Hugging Face config.

Owns linear, yarn and llama3 scaling. A GGUF file does not name llama3 scaling: it stores one factor per frequency. The
parameters are recovered from those, and checked by computing the factors again. Does not know files or models.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UnsupportedModel, shown

SCALING_KEYS = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")


def rope_scaling(
    given: Mapping[str, Any],
    factors: NDArray[np.float32] | None,
    theta: float,
    context: int,
    path: Path,
) -> dict[str, Any] | None:
    """The `rope_scaling` entry; `given` has the file's own `rope.scaling.*` values, None where it has none."""
    if theta <= 1:
        raise UnsupportedModel(
            f"{path}: rope.freq_base is {theta}; a number above 1 is needed: convert the model again"
        )
    if factors is not None and not (np.isfinite(factors).all() and (factors > 0).all()):
        raise UnsupportedModel(f"{path}: rope_freqs.weight holds values that are no factors; convert the model again")
    if factors is not None and not np.allclose(factors, 1.0):
        return _llama3(factors.astype(np.float64), theta, path)
    kind = given["type"] or "none"
    if kind == "none":
        return None
    factor = given["factor"]
    known = kind in ("linear", "yarn") and isinstance(factor, int | float) and not isinstance(factor, bool)
    if not known or not 1e-6 < factor < 1e6:
        raise UnsupportedModel(
            f"{path}: rope scaling {shown(kind)} with factor {shown(factor)}; known: none, linear, yarn, llama3"
        )
    scaling = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        if given.get("attn_factor") not in (None, 1.0):
            raise UnsupportedModel(
                f"{path}: rope.scaling.attn_factor {shown(given['attn_factor'])} is not known; only 1.0 is"
            )
        scaling |= {key: given[f"yarn_{key}"] for key in ("beta_fast", "beta_slow") if given.get(f"yarn_{key}")}
        scaling["original_max_position_embeddings"] = given["original_context_length"] or round(context / factor)
    return scaling


def llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    """The divisor of each frequency: 1 for short waves, `factor` for long ones, a smooth transition between."""
    waves = _wave_lengths(theta, head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth), dtype=np.float64)


def _wave_lengths(theta: float, head_dim: int) -> NDArray[np.float64]:
    return 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)


def _llama3(factors: NDArray[np.float64], theta: float, path: Path) -> dict[str, Any]:
    factor = float(factors.max())
    guesses = [(8192, 4.0)]
    # Inside the transition the smooth weight is a straight line over 1 / wave length. Only the two ratios
    # original / low and original / high matter, so low = 1 loses nothing and the line gives the other two.
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor != 1 else np.zeros_like(factors)
    inside = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if inside.sum() >= 2:
        slope, start = np.polyfit(1 / _wave_lengths(theta, 2 * factors.size)[inside], smooth[inside], 1)
        if start < -1e-6:  # a smaller one would be a ratio without bound
            high = 1 - 1 / float(start)
            guesses.insert(0, (round(float(slope) * (high - 1)), round(high, 3)))
    for original, high in guesses:
        scaling = {
            "rope_type": "llama3",
            "factor": round(factor, 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if high > 1 and np.allclose(llama3_factors(scaling, theta, 2 * factors.size), factors, rtol=1e-3):
            return scaling
    raise UnsupportedModel(
        f"{path}: the factors in rope_freqs.weight are not those of llama3 scaling; known: linear, yarn, llama3"
    )
