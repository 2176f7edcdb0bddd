"""Kernels for CPUs: a small C library if a compiler is found, plain torch otherwise.

Owns the choice between the two. native.c is the library, compiled.py compiles and loads it, structs.py mirrors its
structs, native.py and fused.py call it, plain.py replaces it.
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
    """The fastest kernels that this machine can run, up to the given level."""
    found = find(level)
    return NativeOps(found) if isinstance(found, Library) else CpuOps()
