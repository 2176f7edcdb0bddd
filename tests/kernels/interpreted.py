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
    """Triton 3.6 converts arrays of one element to integers, which numpy 2.4 refuses; and where rounding to fp8 carries
    into the exponent, it halves the number."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def converted(values: Any, kind: Any, other: Any, rounding: Any) -> Any:
        if (kind, other) != (tl.float32, tl.float8e4nv):
            return convert(values, kind, other, rounding)
        return torch.from_numpy(values.copy()).view(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor, interpreter._convert_float = mended, converted


def triton_ops(ordered: bool = False) -> Any:
    """TritonOps or OrderedOps, on DEVICE."""
    from shoal.kernels.triton import TritonOps
    from shoal.kernels.triton.ordered import OrderedOps

    made = OrderedOps() if ordered else TritonOps()
    if DEVICE == "cpu":
        _arrived = torch.zeros(2**15, dtype=torch.int32)
        made._processors, made._arrived = PROCESSORS, _arrived
    return made


if DEVICE == "cpu":
    _mend_interpreter()
