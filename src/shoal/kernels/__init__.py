"""Kernels: the operations of a model on a device, and a table device → implementation.

Owns which implementation runs where; ops.py has the contract. Does not know models, requests or schedules.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.kernels.ops import Batch, FusedLayers, Ops, PassOps

__all__ = ["Batch", "FusedLayers", "Ops", "PassOps", "available", "pick", "plain"]


def plain() -> Ops:
    """The plain-torch meaning of every operation, on any device: slow."""
    from shoal.kernels.ref import RefOps

    return RefOps()


def _cpu(level: str) -> Ops:
    from shoal.kernels.cpu import make

    return make(level)


def _triton() -> Ops:
    from shoal.kernels.triton import TritonOps

    return TritonOps()


def _ordered() -> Ops:
    from shoal.kernels.triton.ordered import OrderedOps

    return OrderedOps()


_TABLE: dict[str, Callable[[], Ops]] = {"cuda": _triton}
_ORDERED: dict[str, Callable[[], Ops]] = {"cuda": _ordered}


def pick(device_type: str, cpu_level: str = "auto", batch_invariant: bool = False) -> Ops:
    """The kernels for a torch device type; devices without their own get the plain-torch ones.

    batch_invariant: those whose every sum has an order that the row alone decides, as the C kernels have.
    """
    if device_type == "cpu":
        return _cpu(cpu_level)
    return (_ORDERED if batch_invariant else _TABLE).get(device_type, plain)()


def available() -> list[tuple[str, Ops]]:
    """(name, kernels) of every implementation that runs here, for tests that compare them with ref."""
    from shoal.kernels.cpu import LEVELS, Library, NativeOps, find

    found: list[tuple[str, Ops]] = [("ref", plain()), ("cpu", _cpu("off"))]
    for level in LEVELS:
        library = find(level)
        if isinstance(library, Library) and library.level == level:
            found.append((level, NativeOps(library)))
    return found
