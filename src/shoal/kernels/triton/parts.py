"""The parts of a past that several programs attend to: how it is split, and how their results are merged.

Used by the decode kernels of attention.py and attention8.py. Knows tensors, not batches.
"""

import triton
import triton.language as tl

from shoal.kernels.triton.launch import settle


@triton.jit
def split_of(context, queries, window, least, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr):
    """(first token that is read, tiles of all parts, tiles of one part) of a sequence."""
    begin = 0
    if WINDOWED:
        begin = tl.maximum(context - window - (queries - 1), 0) // TILE * TILE
    tiles = tl.cdiv(context - begin, TILE)
    share = tiles
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(tiles, SPLITS), least)
    return begin, tiles, share


@triton.jit
def merge_group(
    out, parts, sums, place, line, head, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One query, the heads of one KV head: the sum of its `count` parts, each by its share of the whole."""
    p, d = tl.arange(0, SPLITS), tl.arange(0, DIM_ROOM)
    in_dim = d < DIM
    for member in tl.static_range(GROUP):
        one = (line * HEADS + head * GROUP + member) * SPLITS + p
        mass = tl.load(sums + one, mask=p < count, other=float("-inf"), cache_modifier=".cg")
        share_of = tl.exp2(mass - tl.max(mass, 0))
        share_of = share_of / tl.sum(share_of, 0)
        piece = tl.load(
            parts + one[:, None] * DIM + d[None, :], mask=(p < count)[:, None] & in_dim[None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        merged = tl.sum(piece * share_of[:, None], 0).to(out.dtype.element_ty)
        tl.store(out + (place * HEADS + head * GROUP + member) * DIM + d, merged, mask=in_dim)


@triton.jit(do_not_specialize=["window", "least"])
def merge(
    contexts, places, counts, out, parts, sums, window, least,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The parts of one query of a sequence, for the heads of one KV head."""
    settle(OVERLAP)
    item, head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context, queries = tl.load(contexts + item), tl.load(counts + item)
    _, tiles, share = split_of(context, queries, window, least, TILE, SPLITS, WINDOWED)
    if (query < queries) & (tiles > share):  # else there is one part, which is the result
        place = tl.load(places + item).to(tl.int64) + query
        line = item * QUERIES + query
        merge_group(out, parts, sums, place, line, head, tl.cdiv(tiles, share), HEADS, GROUP, DIM, DIM_ROOM, SPLITS)
