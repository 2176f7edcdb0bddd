"""Attention of a single token, with everything between its projection and the output: norms of heads, rotation, and
the new key and value, which go into the cache on the way.

What was written before the preceding kernel began may be read before settle() (launch.py): all but the projection. So
the first tile of the past is on its way while the projection is still computed. The last program of a past takes the
new key and value from the projection, not from the cache. Else as attention.py's decodes. Knows tensors, not batches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.triton.attention import LOG2_E, DecodeShape
from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.parts import merge_group, split_of

DIMS = (64, 128)  # of a head
IN_16_BITS = (torch.float16, torch.bfloat16)
SHAPE = DecodeShape(tile=64, warps=4, stages=1, splits=32, least=1)  # the fastest found on an H200, for 8 KV heads
MANY = DecodeShape(tile=64, warps=4, stages=1, splits=16, least=2)  # not measured; as many parts as decodes have
AT_ONCE = tl.constexpr(2**14)  # numbers of parts that a program merges at once


@triton.jit
def _rotated(left, right, w_left, w_right, c, s, eps, DIM: tl.constexpr, NORMED: tl.constexpr):
    """Heads [n, DIM // 2] twice, normed and rotated."""
    kind = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    if NORMED:
        factor = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)[:, None]
        left = ((left * factor).to(kind) * w_left).to(tl.float32)
        right = ((right * factor).to(kind) * w_right).to(tl.float32)
    return (left * c - right * s).to(kind), (right * c + left * s).to(kind)


@triton.jit
def _tile(
    k_cache, v_cache, table, start, oldest, end, c_block, c_token,
    BLOCK: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(left, right halves of keys, transposed; values; which of them are seen) of TILE tokens from `start` on."""
    token = start + tl.arange(0, TILE)
    i, d = tl.arange(0, DIM // 2), tl.arange(0, DIM)
    there = (token < end) & (token >= oldest)
    block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
    at = block * c_block + (token % BLOCK) * c_token
    to_key = k_cache + at[None, :] + i[:, None]
    left = tl.load(to_key, mask=there[None, :], other=0.0)
    right = tl.load(to_key + DIM // 2, mask=there[None, :], other=0.0)
    value = tl.load(v_cache + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    return left, right, value, there


@triton.jit
def _keep(k_cache, v_cache, at, left, right, value, DIM: tl.constexpr):
    """A key, in halves [1, DIM // 2], and a value go into the caches."""
    i = tl.arange(0, DIM // 2)
    tl.store(k_cache + at + i[None, :], left)
    tl.store(k_cache + at + DIM // 2 + i[None, :], right)
    tl.store(v_cache + at + tl.arange(0, DIM), value)


@triton.jit
def _merge(out, parts, sums, line, head, count, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """As merge_group, of all heads of the group at once: everything is loaded before anything is computed."""
    g = tl.arange(0, triton.next_power_of_2(GROUP))
    p, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    one = ((line + head * GROUP + g) * SPLITS)[:, None] + p[None, :]
    there = (g < GROUP)[:, None] & (p < count)[None, :]
    mass = tl.load(sums + one, mask=there, other=float("-inf"), cache_modifier=".cg")
    at = parts + one[:, :, None] * DIM + d[None, None, :]
    piece = tl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
    top = tl.max(mass, 1)
    share = tl.exp2(mass - tl.where(top == float("-inf"), 0.0, top)[:, None])
    share = share / tl.maximum(tl.sum(share, 1), 1e-30)[:, None]
    merged = tl.sum(piece * share[:, :, None], 1).to(out.dtype.element_ty)
    tl.store(out + (head * GROUP + g)[:, None] * DIM + d[None, :], merged, mask=(g < GROUP)[:, None])


@triton.jit(do_not_specialize=["window", "least", "t_row"])
def _attend(
    qkv, q_weight, k_weight, cos, sin, slots, k_cache, v_cache, tables, rows, contexts, out, parts, sums, arrived,
    eps, scale, window, least, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, NORMED: tl.constexpr, WINDOWED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + item)
    begin, tiles, share = split_of(context, 1, window, least, TILE, SPLITS, WINDOWED)
    first = begin + split * share * TILE
    last = tl.minimum(first + share * TILE, context)
    end = tl.minimum(last, context - 1)  # the new token is not in the cache yet
    oldest = begin
    if WINDOWED:
        oldest = tl.maximum(begin, context - window)
    table = tables + tl.load(rows + item).to(tl.int64) * t_row
    keys, values = k_cache + head * c_head, v_cache + head * c_head
    left, right, value, there = _tile(keys, values, table, first, oldest, end, c_block, c_token, BLOCK, DIM, TILE)
    r, i, d = tl.arange(0, QUERY_ROWS), tl.arange(0, HALF), tl.arange(0, DIM)
    c, s = tl.load(cos + i).to(tl.float32)[None, :], tl.load(sin + i).to(tl.float32)[None, :]
    slot = tl.load(slots).to(tl.int64)
    qw_left, qw_right, kw_left, kw_right = c, c, c, c
    if NORMED:
        qw_left, qw_right = tl.load(q_weight + i)[None, :], tl.load(q_weight + HALF + i)[None, :]
        kw_left, kw_right = tl.load(k_weight + i)[None, :], tl.load(k_weight + HALF + i)[None, :]
    settle(OVERLAP)
    if first < last:  # else this part, or the whole sequence, is empty
        live, heads = r < GROUP, head * GROUP + r
        to_query = qkv + heads[:, None] * DIM + i[None, :]
        to_key = qkv + (HEADS + head) * DIM + i[None, :]
        q_left = tl.load(to_query, mask=live[:, None], other=0.0)
        q_right = tl.load(to_query + HALF, mask=live[:, None], other=0.0)
        new_left, new_right = tl.load(to_key), tl.load(to_key + HALF)
        new_value = tl.load(qkv + (HEADS + KV_HEADS + head) * DIM + d)
        q_left, q_right = _rotated(q_left, q_right, qw_left, qw_right, c, s, eps, DIM, NORMED)
        top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_ROWS], tl.float32)
        mixed = tl.zeros([QUERY_ROWS, DIM], tl.float32)
        if last == context:
            new_left, new_right = _rotated(new_left, new_right, kw_left, kw_right, c, s, eps, DIM, NORMED)
            if slot >= 0:
                _keep(k_cache, v_cache, (slot * KV_HEADS + head) * DIM, new_left, new_right, new_value, DIM)
            product = q_left.to(tl.float32) * new_left.to(tl.float32)
            product += q_right.to(tl.float32) * new_right.to(tl.float32)
            top = tl.sum(product, 1) * scale
            total += 1.0
            mixed += new_value.to(tl.float32)[None, :]
        for start in range(first, end, TILE):
            next_left, next_right, next_value, next_there = _tile(
                keys, values, table, start + TILE, oldest, end, c_block, c_token, BLOCK, DIM, TILE
            )
            score = tl.dot(q_right, right, tl.dot(q_left, left)) * scale
            score = tl.where(there[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
            total = total * fade + tl.sum(weight, 1)
            mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value)
            top = higher
            left, right, value, there = next_left, next_right, next_value, next_there
        count = tl.cdiv(tiles, share)
        safe = tl.where(total > 0, total, 1.0)
        mask = live[:, None]
        if SPLITS == 1 or count == 1:
            whole = (mixed / safe[:, None]).to(out.dtype.element_ty)
            tl.store(out + heads[:, None] * DIM + d[None, :], whole, mask=mask)
        else:
            part = (item * HEADS + heads) * SPLITS + split
            tl.store(parts + part[:, None] * DIM + d[None, :], mixed / safe[:, None], mask=mask)
            tl.store(sums + part, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=live)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            before = tl.atomic_add(arrived + item * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:  # the last one: all parts are stored
                tl.store(arrived + item * KV_HEADS + head, 0)
                if GROUP * SPLITS * DIM <= AT_ONCE:
                    _merge(out, parts, sums, item * HEADS, head, count, GROUP, DIM, SPLITS)
                else:
                    merge_group(out, parts, sums, 0, item, head, count, HEADS, GROUP, DIM, DIM, SPLITS)


def fits(qkv: Tensor, k_cache: Tensor) -> bool:
    """Whether `attend` is made for these."""
    return qkv.shape[0] == 1 and qkv.dtype in IN_16_BITS and k_cache.dtype == qkv.dtype and k_cache.shape[3] in DIMS


def attend(
    qkv: Tensor, norms: tuple[Tensor, Tensor, float] | None, rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor], slots: Tensor, tables: Tensor, decodes: Tensor, arrived: Tensor, scale: float,
    window: int, shape: DecodeShape | None = None,
) -> Tensor:  # fmt: skip
    """qkv [1, (heads + 2 KV heads) × d] → [1, heads, d]; its key and value go to slots[0], if that is not below 0.

    decodes, arrived: as in attention.decode; at most one of the decodes is not padding. shape: another than measured.
    """
    k_cache, v_cache = cache
    _, block, kv_heads, dim = k_cache.shape
    heads, items = qkv.shape[1] // dim - 2 * kv_heads, decodes.shape[1]
    shape = shape or (SHAPE if kv_heads <= 16 else MANY)
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    out = torch.empty((1, heads, dim), dtype=qkv.dtype, device=qkv.device)
    parts = torch.empty((items, heads, shape.splits, dim), dtype=torch.float32, device=qkv.device)
    sums = torch.empty((items, heads, shape.splits), dtype=torch.float32, device=qkv.device)
    group = heads // kv_heads
    _attend[(items, kv_heads, shape.splits)](
        qkv, q_weight, k_weight, *rope, slots, k_cache, v_cache, tables, decodes[0], decodes[1], out, parts, sums,
        arrived, eps, scale * LOG2_E, window, shape.least, *k_cache.stride()[:3], tables.stride(0), HEADS=heads,
        KV_HEADS=kv_heads, GROUP=group, QUERY_ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK=block,
        TILE=shape.tile, SPLITS=shape.splits, NORMED=norms is not None, WINDOWED=window > 0, num_warps=shape.warps,
        num_stages=shape.stages, **overlap(),
    )  # fmt: skip
    return out
