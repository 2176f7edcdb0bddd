"""Rates of a device, measured: products of large matrices, and bytes moved.

Owns what is run to find out. Used by the floor (bench) and by a server, which measures in idle moments: each piece is
short. Knows torch; no model, no engine and no clock of its own.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from shoal.core.work import DeviceRates
from shoal.kernels.cpu import computes_natively

Work = Callable[[], object]
# of a measurement beside a server: larger than caches, and small beside the memory that a KV cache leaves
SMALL_BYTES = {"cpu": 2**26, "cuda": 2**28}
SMALL_SIDE = {"cpu": 768, "cuda": 4096}
TIMES = {"cpu": 1, "cuda": 10}  # calls in a row, so that launching them does not count


def moving(device: str, size: int) -> tuple[int, Work]:
    """(bytes moved, what moves them): a CPU reads a buffer, a GPU copies one."""
    values = torch.ones(size // 4, dtype=torch.float32, device=device)
    if device == "cpu":
        return values.numel() * 4, lambda: values.sum()
    target = torch.empty_like(values)
    return 2 * values.numel() * 4, lambda: target.copy_(values)


def multiplying(dtype: torch.dtype, device: str, side: int) -> tuple[int, Work]:
    """(FLOP, what computes them): a product of two square matrices, in the type that the device computes with."""
    if device == "cpu" and not computes_natively(dtype):
        dtype = torch.float32
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3, lambda: left @ right


def seconds(work: Work, device: str, times: int, now_s: Callable[[], float]) -> float:
    """For one call, of which `times` are made in a row."""
    begun_s = now_s()
    for _ in range(times):
        work()
    if device != "cpu":
        torch.cuda.synchronize()
    return (now_s() - begun_s) / times


def measuring(
    dtype: torch.dtype,
    device: str,
    now_s: Callable[[], float],
    tell: Callable[[DeviceRates], None],
    runs: int = 5,
) -> Iterator[None]:
    """Measures in pieces of some milliseconds, and tells what it found at the end; first runs are left out."""
    found = []
    makers: tuple[Callable[[], tuple[int, Work]], ...] = (
        partial(multiplying, dtype, device, SMALL_SIDE[device]),
        partial(moving, device, SMALL_BYTES[device]),
    )
    for make in makers:
        amount, work = make()
        took_s = []
        for _ in range(runs + 1):
            took_s.append(seconds(work, device, TIMES[device], now_s))
            yield
        found.append(amount / min(took_s[1:]))
        del work
    tell(DeviceRates(*found))
