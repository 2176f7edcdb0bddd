"""Counter-based randomness: noise that is a function of (seed, sample, position, token id) and of nothing else.

So neighbours, preemption, a restart or another machine cannot change what a request draws. A token is chosen as the
largest of score + Gumbel noise (kernels/noise.py), which draws from the softmax of the scores; here are its keys.
Knows no requests and no logits.
"""

import numpy as np

from shoal.core.plan import Ints

_GOLDEN = 0x9E3779B97F4A7C15


def _mix64(x: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    """A bijection of 64-bit numbers that changes half the bits when one is changed."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_keys(seeds: Ints, samples: Ints, positions: Ints) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    """[n, 2] 32-bit keys, one pair for each draw."""
    with np.errstate(over="ignore"):
        key = seeds.astype(np.uint64)
        for part in (samples, positions):
            key = _mix64(key + np.uint64(_GOLDEN)) ^ part.astype(np.uint64)
        key = _mix64(key + np.uint64(_GOLDEN))
    return np.ascontiguousarray(key).view(np.int32).reshape(-1, 2)
