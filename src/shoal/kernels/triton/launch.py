"""Overlapping launches. From Hopper on, a kernel may be launched while the previous one finishes; it then waits on the
GPU until that kernel's results are visible. This hides most of the gap between two small kernels.

Every kernel that is launched with overlap() must call settle(), in every program, before it writes anything, and before
it reads what its predecessor writes. settle() first waits and then lets the next kernel start: so when a kernel starts,
all that was launched before its predecessor has ended. Before settle() it may read weights, and what was written before
its predecessor, which must then have called settle(), too, or have been launched without overlap(). Knows no kernel.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def settle(OVERLAP: tl.constexpr):
    """Wait for the previous kernel, and let the next one be launched."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap() -> dict[str, Any]:
    """Keyword arguments of a launch."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9  # interpreted: no GPU
    return {"OVERLAP": able, "launch_pdl": able}
