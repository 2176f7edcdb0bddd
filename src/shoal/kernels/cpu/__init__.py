"""Kernels for CPUs: a small C library where a compiler is found, plain torch otherwise.

Owns the choice between the two. native.c says what the library computes, compiled.py how it comes to be, native.py how
it is called, plain.py what stands in for it.
"""

from shoal.kernels.cpu.compiled import LEVELS, VARIABLE, Library, NoLibrary, find, keep_in
from shoal.kernels.cpu.native import NativeOps
from shoal.kernels.cpu.plain import CpuOps, computes_natively, has_bfloat16_products

__all__ = [
    "LEVELS",
    "VARIABLE",
    "CpuOps",
    "Library",
    "NativeOps",
    "NoLibrary",
    "computes_natively",
    "find",
    "has_bfloat16_products",
    "keep_in",
    "make",
]


def make(level: str = "auto") -> CpuOps:
    """The fastest kernels this machine can run, at most of the given level."""
    found = find(level)
    return NativeOps(found) if isinstance(found, Library) else CpuOps()
