"""Triton kernels on any machine: compiled where there is a CUDA device, else interpreted on the CPU.

Import this before any kernel. Where Triton is not installed, or was loaded for compiling, the importing tests skip.
"""

import os
import sys
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSORS = 132  # that kernels are shaped for when they are interpreted

if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was loaded before", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="needs Triton")


def _mend_interpreter() -> None:
    """Triton 3.6 converts arrays of one element to integers, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def triton_ops() -> Any:
    """TritonOps, on DEVICE."""
    from shoal.kernels.triton import TritonOps

    made = TritonOps()
    if DEVICE == "cpu":
        _arrived = torch.zeros(2**15, dtype=torch.int32)
        made._processors, made._arrived = PROCESSORS, _arrived
    return made


if DEVICE == "cpu":
    _mend_interpreter()
