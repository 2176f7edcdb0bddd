"""How kernels follow each other. From Hopper on, a kernel may be brought onto the card while the one before it ends;
it then waits, on the card, until that one's results are there. That hides most of the gap between two small kernels.

Every kernel that is launched with overlap() must call settle() before it reads or writes anything that another kernel
writes or reads; weights alone may be read before. Knows no kernel.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def settle(OVERLAP: tl.constexpr):
    """Wait for the kernel before, and let the one behind come."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap() -> dict[str, Any]:
    """Arguments of a launch."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9  # interpreted: there is none
    return {"OVERLAP": able, "launch_pdl": able}
