"""Decodes over an fp8 KV cache: the decode kernel of attention.py, with keys and values read as pairs of bytes.

Matrix units take operands of 16 bits in an order in which bytes cannot be loaded, but pairs of bytes can: so a tile is
loaded as numbers of 16 bits, and each becomes one float16 of an even dimension and one of an odd. Sums over the
dimensions are done for even and odd ones apart. Tokens are the rows of the products and queries their columns, of which
eight are enough: with queries as rows there would be sixteen.

    pairs [tokens, d/2]  ─► even [tokens, d/2], odd [tokens, d/2]     k·q = k_even·q_even + k_odd·q_odd

Queries are scaled by a power of two to fit float16. The scale of a key multiplies its scores. The scale of a value is
added to the exponent of its weight, and the largest of these sums is what weights are relative to, so that they fit
float16 as well, however small the values are. Single bytes cannot be copied ahead as tiles are, so the scales of a tile
are read while the tile before it is computed. Knows tensors, not batches.
"""

import triton
import triton.language as tl

from shoal.kernels.triton.launch import settle
from shoal.kernels.triton.parts import merge_group, split_of
from shoal.kernels.triton.rows8 import exponent_for, power

LEAST = tl.constexpr(67)  # exponent field of a value's scale: where all values are zero, weights must not overflow


@triton.jit
def halved(at, live, DIM: tl.constexpr, DIM_ROOM: tl.constexpr):
    """The queries at these places, as float16 (float32 stay), and the scale of each row."""
    d = tl.arange(0, DIM_ROOM)
    query = tl.load(at + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    wide = query.to(tl.float32)
    exponent = exponent_for(tl.max(tl.abs(wide), 1))  # the largest becomes at most 448
    scaled = wide * power(254 - exponent)[:, None]
    if query.dtype != tl.float32:
        return scaled.to(tl.float16), power(exponent)
    else:
        return scaled, power(exponent)


@triton.jit
def store_pairs(at, even, odd, mask):
    """at: where the even ones go."""
    tl.store(at, even.to(at.dtype.element_ty), mask=mask)
    tl.store(at + 1, odd.to(at.dtype.element_ty), mask=mask)


@triton.jit
def block_of(table, token, last, BLOCK: tl.constexpr):
    return tl.load(table + token // BLOCK, mask=token < last, other=0).to(tl.int64)


@triton.jit
def exponents_at(k_exponents, v_exponents, block, token, last, head, c_block, BLOCK: tl.constexpr):
    """Of the scales of these tokens' keys and, from bit 8 on, values: together they move between threads at once."""
    at = block * c_block + head * BLOCK + token % BLOCK
    k_exponent = tl.load(k_exponents + at, mask=token < last, other=0).to(tl.int32)
    return k_exponent | tl.load(v_exponents + at, mask=token < last, other=0).to(tl.int32) << 8


@triton.jit
def pairs_of(x, ASSEMBLY: tl.constexpr):
    """(even, odd) of pairs of e4m3 bytes, as float16."""
    if ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 sorted;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",  # two pairs at once: even bytes of both, then odd ones
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # what it means: shifted by one bit under its sign, a byte is the float16 that is 2⁻⁸ times as large
        wide = x.to(tl.int32) & 0xFFFF
        even = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        odd = ((wide & 0x8000) | ((wide & 0x7F00) >> 1)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return even, odd


@triton.jit(do_not_specialize=["window", "least", "t_row"])
def decode8(
    q, k_pairs, v_pairs, k_exponents, v_exponents, tables, rows, contexts, places, counts, out, parts, sums, arrived,
    scale, window, least, q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_ROOM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, WINDOWED: tl.constexpr, ASSEMBLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As _decode. c_block counts bytes, c_token and c_head pairs."""
    settle(OVERLAP)
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + item)
    queries = 1
    if QUERIES > 1:
        queries = tl.load(counts + item)
    begin, tiles, share = split_of(context, queries, window, least, TILE, SPLITS, WINDOWED)
    first = begin + split * share * TILE
    last = tl.minimum(first + share * TILE, context)
    if first < last:  # else this part, or the whole sequence, is empty
        table = tables + tl.load(rows + item).to(tl.int64) * t_row
        place = tl.load(places + item).to(tl.int64)
        r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM // 2), tl.arange(0, TILE)
        in_dim, live, heads = d < DIM // 2, r < GROUP, head * GROUP + r
        if QUERIES > 1:
            live, heads, place = r // GROUP < queries, head * GROUP + r % GROUP, place + r // GROUP
        query, q_scale = halved(q + (place * q_token + heads * q_head)[:, None], live, DIM, DIM_ROOM)
        q_even, q_odd = tl.split(tl.reshape(query, [QUERY_ROWS, DIM_ROOM // 2, 2]))
        q_even, q_odd, q_scale = tl.trans(q_even), tl.trans(q_odd), q_scale * scale
        position = context - queries + r // GROUP
        top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_ROWS], tl.float32)
        even, odd = tl.zeros([DIM_ROOM // 2, QUERY_ROWS], tl.float32), tl.zeros([DIM_ROOM // 2, QUERY_ROWS], tl.float32)
        block, next_block = block_of(table, first + t, last, BLOCK), block_of(table, first + TILE + t, last, BLOCK)
        next_exponents = exponents_at(k_exponents, v_exponents, block, first + t, last, head, c_block, BLOCK)
        for start in range(first, last, TILE):
            token = start + t
            there = token < last
            if WINDOWED:
                there = there & (token > context - queries - window)
            at = block_of(table, token, last, BLOCK) * (c_block // 2) + (token % BLOCK) * c_token + head * c_head
            mask = there[:, None] & in_dim[None, :]
            k_even, k_odd = pairs_of(tl.load(k_pairs + at[:, None] + d[None, :], mask=mask, other=0), ASSEMBLY)
            exponents, after = next_exponents, token + TILE
            next_exponents = exponents_at(k_exponents, v_exponents, next_block, after, last, head, c_block, BLOCK)
            next_block = block_of(table, after + TILE, last, BLOCK)
            score = tl.dot(k_even.to(query.dtype), q_even, input_precision=PRECISION)
            score = tl.dot(k_odd.to(query.dtype), q_odd, score, input_precision=PRECISION)
            score = score * q_scale[None, :] * power(exponents & 255)[:, None]
            seen = there[:, None]
            if QUERIES > 1:
                seen = seen & (token[:, None] <= position[None, :])
                if WINDOWED:
                    seen = seen & (token[:, None] > position[None, :] - window)
            score = tl.where(seen, score, float("-inf"))
            v_exponent = tl.maximum(exponents >> 8, LEAST)
            higher = tl.maximum(top, tl.max(score + (v_exponent - 127).to(tl.float32)[:, None], 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(score - base[None, :])
            total = total * fade + tl.sum(weight, 0)
            weight = (weight * power(v_exponent)[:, None]).to(query.dtype)
            value = tl.load(v_pairs + at[:, None] + d[None, :], mask=mask, other=0)
            v_even, v_odd = pairs_of(tl.trans(value), ASSEMBLY)
            even = tl.dot(v_even.to(query.dtype), weight, even * fade[None, :], input_precision=PRECISION)
            odd = tl.dot(v_odd.to(query.dtype), weight, odd * fade[None, :], input_precision=PRECISION)
            top = higher
        safe, count = tl.where(total > 0, total, 1.0), tl.cdiv(tiles, share)
        even, odd = even / safe[None, :], odd / safe[None, :]
        mask = in_dim[:, None] & live[None, :]
        if SPLITS == 1 or count == 1:
            store_pairs(out + (place * HEADS + heads)[None, :] * DIM + 2 * d[:, None], even, odd, mask)
        else:
            part = ((item * QUERIES + r // GROUP) * HEADS + heads) * SPLITS + split
            store_pairs(parts + part[None, :] * DIM + 2 * d[:, None], even, odd, mask)
            tl.store(sums + part, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=live)
            if QUERIES == 1:
                tl.debug_barrier()  # all of this program's stores come before its arrival
                before = tl.atomic_add(arrived + item * KV_HEADS + head, 1, sem="acq_rel")
                if before == count - 1:  # the last one: all parts are stored
                    tl.store(arrived + item * KV_HEADS + head, 0)
                    merge_group(out, parts, sums, place, item, head, count, HEADS, GROUP, DIM, DIM_ROOM, SPLITS)
