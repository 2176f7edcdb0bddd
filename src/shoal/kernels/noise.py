"""Counter-based randomness: Gumbel noise that is a function of (seed, sample, position, token id) and of nothing else.

So neighbours, preemption, a restart or another machine cannot change what a request draws. A token is chosen as the
largest of score + noise, which draws from the softmax of the scores.

    seed, sample, position ─► draw_keys: two 32-bit keys ─► gumbel: noise of each token id

Every implementation of a draw computes the same noise: torch here, Triton in triton/draw.py, C in cpu/. Only the ids
whose noise is needed are hashed. Knows neither requests nor scores.
"""

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Flags, Ints

_GOLDEN = 0x9E3779B97F4A7C15


def _mix64(x: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    """A bijection of 64-bit numbers that changes half of the bits when one is changed."""
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


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shift(x, 16)


def _uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """float32 numbers between 0 and 1, both excluded; arguments as for gumbel."""
    mixed = _scramble(ids * (0x9E3779B1 - 2**32) + keys[:, :1])
    mixed = _scramble(mixed ^ keys[:, 1:])
    return (_shift(mixed, 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """float32 noise [n, k] for int32 keys [n, 2] and int32 token ids [k] or [n, k]."""
    return -torch.log(-torch.log(_uniform(keys, ids)))


def coins(keys: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", probability: float) -> Flags:
    """For each draw, whether its coin shows heads, which has this probability.

    The coin is the uniform number from which token id -1, which no vocabulary has, would get its noise. In numpy,
    which takes much less time than torch for a few draws.
    """
    parts = keys.view(np.uint32)
    mixed = _scramble_array(_scramble_array(parts[:, 0] - np.uint32(0x9E3779B1)) ^ parts[:, 1])
    numbers = ((mixed >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    heads: Flags = numbers < np.float32(probability)
    return heads


def _scramble_array(
    x: "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]":
    """As _scramble; products of unsigned arrays wrap around without a warning."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
