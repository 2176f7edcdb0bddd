"""Decodes over an fp8 KV cache: the decode kernel of attention.py, with keys and values read as pairs of bytes.

An e4m3 byte, shifted by one bit under its sign, is the float16 number that is 2⁻⁸ times as large, exactly, subnormal
ones included. Matrix units take operands of 16 bits in an order in which bytes cannot be loaded, but pairs of bytes
can: so a tile is loaded as numbers of 16 bits, and each becomes one float16 of an even dimension and one of an odd.
Sums over the dimensions are done for even and odd ones apart.

    pairs [tokens, d/2]  ─► even [tokens, d/2], odd [tokens, d/2]     q·k = q_even·k_even + q_odd·k_odd

Queries are scaled by a power of two to fit float16. The scale of a key multiplies its scores. The scale of a value is
added to the exponent of its weight, and the largest of these sums is what weights are relative to, so that they fit
float16 as well, however small the values are. Knows tensors, not batches.
"""

import triton
import triton.language as tl

from shoal.kernels.triton.launch import settle
from shoal.kernels.triton.parts import merge_group, split_of
from shoal.kernels.triton.rows8 import exponent_for, power

HIDDEN = tl.constexpr(8)  # e4m3 bits as float16 are so many powers of two smaller
LEAST = tl.constexpr(-60.0)  # exponent of a value's scale: where all values are zero, sums of weights must not overflow


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
def scales_of(
    k_exponents, v_exponents, tables, start, until, head, c_block, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Of the tokens of a tile: the scales of their keys, and the powers of two of the scales of their values.

    The exponents of four tokens are loaded together, because a copy that runs ahead takes no less than 4 bytes.
    """
    token = start + 4 * tl.arange(0, TILE // 4)
    there = token < until
    block = tl.load(tables + token // BLOCK, mask=there, other=0).to(tl.int64)
    at = block * (c_block // 4) + head * (BLOCK // 4) + token % BLOCK // 4
    shifts = 8 * tl.arange(0, 4)
    k_exponent = (tl.load(k_exponents + at, mask=there, other=0)[:, None] >> shifts[None, :]) & 255
    v_exponent = (tl.load(v_exponents + at, mask=there, other=0)[:, None] >> shifts[None, :]) & 255
    k_exponent, v_exponent = tl.reshape(k_exponent, [TILE]), tl.reshape(v_exponent, [TILE])
    return power(k_exponent), tl.maximum(v_exponent.to(tl.float32) - 127.0, LEAST)


@triton.jit
def pairs_of(x, ASSEMBLY: tl.constexpr):
    """(even, odd) of pairs of e4m3 bytes, as float16 that are 2⁻⁸ as large."""
    if ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $2, 8;
            shr.u32 b, a, 1;
            and.b32 b, b, 0x3F803F80;
            lop3.b32 $0, a, 0x80008000, b, 0xEA;
            shr.u32 b, $2, 1;
            and.b32 b, b, 0x3F803F80;
            lop3.b32 $1, $2, 0x80008000, b, 0xEA;
            }""",  # 0xEA: first & second | third; two numbers of 16 bits at once
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # what it means
        wide = x.to(tl.int32) & 0xFFFF
        even = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        odd = ((wide & 0x8000) | ((wide & 0x7F00) >> 1)).to(tl.int16).to(tl.float16, bitcast=True)
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
        row = tl.load(rows + item).to(tl.int64)
        place = tl.load(places + item).to(tl.int64)
        r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM // 2), tl.arange(0, TILE)
        in_dim, live, heads = d < DIM // 2, r < GROUP, head * GROUP + r
        if QUERIES > 1:
            live, heads, place = r // GROUP < queries, head * GROUP + r % GROUP, (place + r // GROUP)[:, None]
        query, q_scale = halved(q + place * q_token + heads[:, None] * q_head, live, DIM, DIM_ROOM)
        q_even, q_odd = tl.split(tl.reshape(query, [QUERY_ROWS, DIM_ROOM // 2, 2]))
        q_scale = q_scale * scale * 2.0**HIDDEN
        position = context - queries + r // GROUP
        top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_ROWS], tl.float32)
        even, odd = tl.zeros([QUERY_ROWS, DIM_ROOM // 2], tl.float32), tl.zeros([QUERY_ROWS, DIM_ROOM // 2], tl.float32)
        for start in range(first, last, TILE):
            token = start + t
            there = token < last
            if WINDOWED:
                there = there & (token > context - queries - window)
            block = tl.load(tables + row * t_row + token // BLOCK, mask=there, other=0).to(tl.int64)
            at = block * (c_block // 2) + (token % BLOCK) * c_token + head * c_head
            key = tl.load(k_pairs + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0)
            own = tables + row * t_row
            k_scale, v_power = scales_of(k_exponents, v_exponents, own, start, last, head, c_block, BLOCK, TILE)
            k_even, k_odd = pairs_of(key, ASSEMBLY)
            score = tl.dot(q_even, k_even.to(query.dtype), input_precision=PRECISION)
            score = tl.dot(q_odd, k_odd.to(query.dtype), score, input_precision=PRECISION)
            score = score * q_scale[:, None] * k_scale[None, :]
            seen = there[None, :]
            if QUERIES > 1:
                seen = seen & (token[None, :] <= position[:, None])
                if WINDOWED:
                    seen = seen & (token[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            heavy = score + v_power[None, :]
            higher = tl.maximum(top, tl.max(heavy, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(heavy - base[:, None]).to(query.dtype)
            total = total * fade + tl.sum(tl.exp2(score - base[:, None]), 1)
            value = tl.load(v_pairs + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0)
            v_even, v_odd = pairs_of(value, ASSEMBLY)
            even = tl.dot(weight, v_even.to(query.dtype), even * fade[:, None], input_precision=PRECISION)
            odd = tl.dot(weight, v_odd.to(query.dtype), odd * fade[:, None], input_precision=PRECISION)
            top = higher
        safe, count = tl.where(total > 0, total, 1.0), tl.cdiv(tiles, share)
        even, odd = even * 2.0**HIDDEN / safe[:, None], odd * 2.0**HIDDEN / safe[:, None]
        mask = live[:, None] & in_dim[None, :]
        if SPLITS == 1 or count == 1:
            store_pairs(out + (place * HEADS + heads[:, None]) * DIM + 2 * d[None, :], even, odd, mask)
        else:
            part = (item * HEADS + heads) * SPLITS + split
            if QUERIES > 1:
                part = ((item * QUERIES + r // GROUP) * HEADS + heads) * SPLITS + split
            store_pairs(parts + part[:, None] * DIM + 2 * d[None, :], even, odd, mask)
            tl.store(sums + part, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=live)
            if QUERIES == 1:
                tl.debug_barrier()  # all of this program's stores come before its arrival
                before = tl.atomic_add(arrived + item * KV_HEADS + head, 1, sem="acq_rel")
                if before == count - 1:  # the last one: all parts are stored
                    tl.store(arrived + item * KV_HEADS + head, 0)
                    merge_group(out, parts, sums, place, item, head, count, HEADS, GROUP, DIM, DIM_ROOM, SPLITS)
