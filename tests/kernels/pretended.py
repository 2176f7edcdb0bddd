"""C kernels whose 16-bit products are computed in plain C: their logic can be tested on any machine with a compiler."""

from functools import cache

from shoal.kernels.cpu import Library, NativeOps, compiled

FLAGS = {"tiles": "-DSHOAL_PRETEND_TILES", "pairs": "-DSHOAL_PRETEND_PAIRS"}


@cache
def pretended() -> list[tuple[str, NativeOps]]:
    """(name, kernels) of each kind of product; none without a compiler."""
    compiler = compiled._compiler()
    if compiler is None:
        return []
    found = []
    for name, flag in FLAGS.items():
        path = compiled._compiled(compiler, (flag,))
        library = Library(compiled._opened(path), f"pretended {name}", (flag,), compiler, path)
        found.append((library.level, NativeOps(library)))
    return found
