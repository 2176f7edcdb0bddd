"""C kernels of other CPUs, as far as this one can run them: 16-bit products that are computed in plain C, whose logic
can be tested on any machine with a compiler, and this CPU's levels without the features that not all such CPUs have.
"""

from functools import cache

from shoal.kernels.cpu import Library, NativeOps, compiled

FLAGS = {"tiles": "-DSHOAL_PRETEND_TILES", "pairs": "-DSHOAL_PRETEND_PAIRS"}
HAS = compiled.cpu_features()


@cache
def pretended() -> list[tuple[str, NativeOps]]:
    """16-bit products in plain C; empty without a compiler."""
    return _loaded({f"pretended {name}": (flag,) for name, flag in FLAGS.items()})


@cache
def older() -> list[tuple[str, NativeOps]]:
    """Each level that uses more here than it needs, without that: AVX-512 without VNNI, NEON without dot products."""
    levels = [level for level in compiled.usable_levels(HAS) if HAS & compiled.EXTRAS.get(level, {}).keys()]
    needed = {level: frozenset(compiled.NEEDS[level]) for level in levels}
    return _loaded({f"{level} without extras": compiled.flags_for(level, needed[level]) for level in levels})


def _loaded(kinds: dict[str, tuple[str, ...]]) -> list[tuple[str, NativeOps]]:
    """Name → flags of the compiler."""
    compiler = compiled._compiler()
    if compiler is None:
        return []
    found = []
    for name, flags in kinds.items():
        path = compiled._compiled(compiler, flags)
        library = Library(compiled._opened(path), name, flags, compiler, path)
        found.append((library.level, NativeOps(library)))
    return found
