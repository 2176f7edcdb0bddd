"""Random weights in blocks, and inputs that kernels do not round."""

import torch
from torch import Tensor

from shoal.kernels.block_weight import BLOCK, BlockWeight, packed


def a_weight(
    outputs: int, inputs: int, bits: int = 4, group: int = BLOCK, dtype: torch.dtype = torch.float16
) -> BlockWeight:
    groups = -(-inputs // group)
    scales = (torch.rand(outputs, groups) + 0.5).to(dtype)
    if bits == 8:
        values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        return BlockWeight(values, scales / 100, None, inputs, group, group)
    offsets = (torch.randn(outputs, groups) * 4 - 8).to(dtype)
    return BlockWeight(packed(torch.randint(16, (outputs, inputs))), scales, offsets, inputs, group, group)


def on_grid(rows: int, inputs: int) -> Tensor:
    """Inputs that rounding to 8 bits does not change."""
    x = torch.randint(-127, 128, (rows, inputs)).float()
    x[:, ::BLOCK] = 127
    return x / 64
