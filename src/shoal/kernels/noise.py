"""Gumbel noise as a function of two keys and a token id, and of nothing else.

Every implementation of a draw makes the same: here in torch, in triton/draw.py and in cpu/native.c. Only those ids
whose noise is asked for are hashed. Knows tensors only; where keys come from is runner/draws.py.
"""

import torch
from torch import Tensor


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shift(x, 16)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """float32 noise [n, k] for int32 keys [n, 2] and int32 token ids [k] or [n, k]."""
    mixed = _scramble(ids * (0x9E3779B1 - 2**32) + keys[:, :1])
    mixed = _scramble(mixed ^ keys[:, 1:])
    uniform = (_shift(mixed, 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
