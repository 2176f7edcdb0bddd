"""Ragged paged attention in Triton: decodes split over their past, prompt chunks in blocks of queries.

Both kernels read keys and values through the block table and pack the query heads that share a KV head into the rows
of one matrix product, so that every key is read once per KV head.

    decode    one program for (sequence, KV head, split): the group's heads, of one query or of the few that verify
              drafts, against a part of the past. Of one query, the program that finishes last merges the parts; of
              several, a second kernel does, because that is too much work for one program
    prefill   one program for (block of queries, KV head): tiles wholly in the past unmasked, then the ragged border

Of an fp8 cache, prompts convert keys and values to the queries' type, exactly; the scale of a key multiplies its scores
and the scale of a value its weights. Decodes have a kernel of their own (attention8.py).

Lengths, rows and query indexes are read from device memory, and programs without work exit at once: a launch in a CUDA
graph serves any lengths. Scores are exponents of two (exp2 is a hardware instruction). Knows tensors, not batches.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.fp8 import FP8, exponents_in
from shoal.kernels.triton.attention8 import decode8
from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.parts import merge, merge_group, split_of
from shoal.kernels.triton.rows8 import power

LOG2_E = 1.4426950408889634
ROWS = 128  # of the prefill's query block: queries × heads of a group
LONG = 8192  # tokens of a past that is too long for one program while the others have finished
FEW = 16  # queries of a sequence that the decode kernel computes at most
PARTS = 2**26  # bytes that the parts of a launch may take
PADDING = -1  # the row of an empty block of queries


@dataclass(frozen=True)
class DecodeShape:
    """How decodes are split: tokens per tile, warps, stages, most parts of one past, fewest tiles in a part."""

    tile: int
    warps: int
    stages: int
    splits: int
    least: int


@triton.jit(do_not_specialize=["window", "least", "t_row"])
def _decode(
    q, k_cache, v_cache, tables, rows, contexts, places, counts, out, parts, sums, arrived,
    scale, window, least, q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_ROOM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
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
        r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
        in_dim, live, heads = d < DIM, r < GROUP, head * GROUP + r
        if QUERIES > 1:
            live, heads, place = r // GROUP < queries, head * GROUP + r % GROUP, (place + r // GROUP)[:, None]
        mask = live[:, None] & in_dim[None, :]
        query = tl.load(q + place * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0)
        position = context - queries + r // GROUP
        top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_ROWS], tl.float32)
        mixed = tl.zeros([QUERY_ROWS, DIM_ROOM], tl.float32)
        for start in range(first, last, TILE):
            token = start + t
            there = token < last
            if WINDOWED:
                there = there & (token > context - queries - window)
            block = tl.load(tables + row * t_row + token // BLOCK, mask=there, other=0).to(tl.int64)
            at = block * c_block + (token % BLOCK) * c_token + head * c_head
            key = tl.load(k_cache + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0)
            score = tl.dot(query, key, input_precision=PRECISION) * scale
            seen = there[None, :]
            if QUERIES > 1:
                seen = seen & (token[None, :] <= position[:, None])
                if WINDOWED:
                    seen = seen & (token[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v_cache + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            top = higher
        safe = tl.where(total > 0, total, 1.0)
        count = tl.cdiv(tiles, share)
        whole = (mixed / safe[:, None]).to(out.dtype.element_ty)
        to = out + (place * HEADS + heads[:, None]) * DIM + d[None, :]
        if SPLITS == 1 or count == 1:
            tl.store(to, whole, mask=mask)
        else:
            part = (item * HEADS + heads) * SPLITS + split
            if QUERIES > 1:
                part = ((item * QUERIES + r // GROUP) * HEADS + heads) * SPLITS + split
            tl.store(parts + part[:, None] * DIM + d[None, :], mixed / safe[:, None], mask=mask)
            tl.store(sums + part, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=live)
            if QUERIES == 1:
                tl.debug_barrier()  # all of this program's stores come before its arrival
                before = tl.atomic_add(arrived + item * KV_HEADS + head, 1, sem="acq_rel")
                if before == count - 1:  # the last one: all parts are stored
                    tl.store(arrived + item * KV_HEADS + head, 0)
                    merge_group(out, parts, sums, place, item, head, count, HEADS, GROUP, DIM, DIM_ROOM, SPLITS)


@triton.jit
def scales_at(k_exponents, v_exponents, at, there):
    """Of the keys and values of some tokens; at: where their exponents lie."""
    k_scale = power(tl.load(k_exponents + at, mask=there, other=0).to(tl.int32))
    return k_scale, power(tl.load(v_exponents + at, mask=there, other=0).to(tl.int32))


@triton.jit(do_not_specialize=["window", "t_row"])
def _prefill(
    q, k_cache, v_cache, k_exponents, v_exponents, tables, rows, begins, counts, firsts, contexts, out, scale, window,
    q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr, FROM_FP8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    head, item = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + item).to(tl.int64)
    if row >= 0:
        begin, count = tl.load(begins + item), tl.load(counts + item)
        first_query, context = tl.load(firsts + item), tl.load(contexts + item)
        r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
        query_at, heads = first_query + r // GROUP, head * GROUP + r % GROUP
        in_dim = d < DIM
        live = (query_at < count) & (r < QUERIES * GROUP)
        place = (begin + query_at).to(tl.int64)
        mask = live[:, None] & in_dim[None, :]
        query = tl.load(q + place[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0)
        past = context - count  # positions before this pass's first
        position = past + query_at
        top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_ROWS], tl.float32)
        mixed = tl.zeros([QUERY_ROWS, DIM_ROOM], tl.float32)
        until = tl.minimum(context, past + first_query + QUERIES)
        border = (past + first_query + 1) // TILE * TILE  # every query sees all of the tiles before this
        start_at = 0
        if WINDOWED:
            start_at = tl.maximum(past + first_query + 1 - window, 0) // TILE * TILE
            border = start_at  # every tile may be cut by the window
        for start in range(start_at, border, TILE):
            token = start + t
            block = tl.load(tables + row * t_row + token // BLOCK).to(tl.int64)
            at = block * c_block + (token % BLOCK) * c_token + head * c_head
            key = tl.load(k_cache + at[None, :] + d[:, None], mask=in_dim[:, None], other=0.0)
            if FROM_FP8:
                here = block * c_block + head * BLOCK + token % BLOCK
                k_scale, v_scale = scales_at(k_exponents, v_exponents, here, token >= 0)
                key = key.to(query.dtype)
            score = tl.dot(query, key, input_precision=PRECISION)
            if FROM_FP8:
                score = score * k_scale[None, :]
            higher = tl.maximum(top, tl.max(score, 1) * scale)
            fade, weight = tl.exp2(top - higher), tl.exp2(score * scale - higher[:, None])
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v_cache + at[:, None] + d[None, :], mask=in_dim[None, :], other=0.0)
            if FROM_FP8:
                weight, value = weight * v_scale[None, :], value.to(query.dtype)
            mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
            top = higher
        for start in range(border, until, TILE):
            token = start + t
            there = token < until
            block = tl.load(tables + row * t_row + token // BLOCK, mask=there, other=0).to(tl.int64)
            at = block * c_block + (token % BLOCK) * c_token + head * c_head
            key = tl.load(k_cache + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0)
            if FROM_FP8:
                here = block * c_block + head * BLOCK + token % BLOCK
                k_scale, v_scale = scales_at(k_exponents, v_exponents, here, there)
                key = key.to(query.dtype)
            score = tl.dot(query, key, input_precision=PRECISION)
            if FROM_FP8:
                score = score * k_scale[None, :]
            seen = (token[None, :] <= position[:, None]) & there[None, :]
            if WINDOWED:
                seen = seen & (token[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1) * scale)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(score * scale - base[:, None])
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v_cache + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
            if FROM_FP8:
                weight, value = weight * v_scale[None, :], value.to(query.dtype)
            mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
            top = higher
        result = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        to = (place[:, None] * HEADS + heads[:, None]) * DIM + d[None, :]
        tl.store(out + to, result, mask=mask)


def queries_per_block(group: int, dim: int, dtype: torch.dtype) -> int:
    """How many queries of a prompt one program computes."""
    rows = ROWS if dim * dtype.itemsize <= 512 else ROWS // 2  # as many as shared memory holds
    return max(1, rows // group)


def few_queries(group: int, dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of queries of a sequence that the decode kernel is compiled for: 1, then as many as fit into a matrix
    of 16 rows, of 32, of 64 and, if they are short, of 128."""
    most = ROWS if dim * dtype.itemsize <= 256 else ROWS // 2
    sizes = {min(FEW, rows // group) for rows in (16, 32, 64, 128) if rows <= most}
    return (1, *sorted(size for size in sizes if size > 1))


def decode_shape(
    sequences: int, heads: int, kv_heads: int, dim: int, wide: bool, long: bool, processors: int, queries: int = 1,
    from_fp8: bool = False,
) -> DecodeShape:  # fmt: skip
    """From the number of sequences and whether a past is long: the exact lengths are known only on the device, where
    short pasts use fewer parts.

    The tables in docs/lab/gpu.md show how these were found.
    """
    if from_fp8 and queries == 1 and not wide and dim <= 128:
        return _shape_of_one_fp8(sequences * kv_heads, long, processors)
    shape = _shape_of_one(sequences * kv_heads, dim, wide, long, processors)
    if queries == 1:
        return shape
    rows = triton.next_power_of_2(queries * heads // kv_heads)
    if rows > 32:
        tile = min(shape.tile, 64)
        warps = 4 if rows <= 64 else 8  # else registers spill
        shape = replace(shape, tile=tile, warps=warps, least=shape.least * shape.tile // tile)
    splits = shape.splits
    while splits > 1 and sequences * queries * heads * splits * dim * 4 > PARTS:
        splits //= 2
    return replace(shape, splits=splits)


def _shape_of_one(programs: int, dim: int, wide: bool, long: bool, processors: int) -> DecodeShape:
    """For one query per sequence; programs: of a launch without parts."""
    if wide or dim > 128:
        return DecodeShape(32, 4, 2, 8 if long or programs <= 2 * processors else 1, 4)
    if programs <= 16:
        return DecodeShape(64, 2, 3, 32, 1)
    if programs <= 64:
        return DecodeShape(64, 2, 3, 16, 2)
    if programs <= 4 * processors:
        return DecodeShape(128, 4, 3, 8, 4 if programs <= processors else 8)
    return DecodeShape(128, 4, 3, 8, 16) if long else DecodeShape(128, 4, 3, 1, 1)


def _shape_of_one_fp8(programs: int, long: bool, processors: int) -> DecodeShape:
    """Tiles of a single warp have no barriers, which count for more here: half the bytes are to be waited for."""
    if programs <= 16:
        return DecodeShape(64, 2, 3, 32 if long else 16, 1)
    if programs <= 64:
        return DecodeShape(32, 1, 3, 16, 2)
    if programs <= processors:
        return DecodeShape(32, 1, 3, 8, 2)
    if programs <= 4 * processors:
        return DecodeShape(32, 1, 3, 8 if long else 4, 2)
    return DecodeShape(128, 4, 4, 8, 16) if long else DecodeShape(128, 4, 4, 1, 1)


def prefill_shape(dim: int, wide: bool, from_fp8: bool = False) -> tuple[int, int, int]:
    """(tokens per tile, warps, stages)."""
    if wide or dim > 128:
        return 32, 4, 1
    return (32, 4, 4) if from_fp8 else (64, 4, 3)


def sizes(q: Tensor, k_cache: Tensor, tables: Tensor, window: int) -> dict[str, Any]:
    heads, dim = q.shape[1], q.shape[2]
    return {
        "q_token": q.stride(0), "q_head": q.stride(1), "c_block": k_cache.stride(0), "c_token": k_cache.stride(1),
        "c_head": k_cache.stride(2), "t_row": tables.stride(0), "HEADS": heads, "GROUP": heads // k_cache.shape[2],
        "DIM": dim, "DIM_ROOM": triton.next_power_of_2(dim), "BLOCK": k_cache.shape[1],
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32", "WINDOWED": window > 0,
    }  # fmt: skip


def exponents_of(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Of an fp8 cache; else anything, which is not read."""
    if k_cache.dtype != FP8:
        return k_cache, v_cache
    return exponents_in(k_cache), exponents_in(v_cache)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, decodes: Tensor, out: Tensor, arrived: Tensor,
    scale: float, window: int, shape: DecodeShape, queries: int = 1,
) -> None:  # fmt: skip
    """Sequences with few queries each. decodes [4, n]: row of the table, context with the queries (0: padding), index
    of the first query, how many, at most `queries`.

    `arrived` holds a zero for every sequence and KV head, before and after.
    """
    items, heads, dim = decodes.shape[1], q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[2]
    parts, sums = out, out
    if shape.splits > 1:
        parts = torch.empty((items * queries, heads, shape.splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((items * queries, heads, shape.splits), dtype=torch.float32, device=q.device)
    given = sizes(q, k_cache, tables, window)
    grid, behind = (items, kv_heads, shape.splits), (tables, *decodes, out, parts, sums, arrived)
    options = {
        "KV_HEADS": kv_heads, "QUERIES": queries, "TILE": shape.tile, "SPLITS": shape.splits,
        "QUERY_ROWS": max(16, triton.next_power_of_2(queries * heads // kv_heads)), "num_warps": shape.warps,
        "num_stages": shape.stages, **given, **overlap(),
    }  # fmt: skip
    numbers = scale * LOG2_E, window, shape.least
    if k_cache.dtype == FP8:
        pairs = [cache.view(torch.int16) for cache in (k_cache, v_cache)]
        options |= {"c_token": pairs[0].stride(1), "c_head": pairs[0].stride(2), "ASSEMBLY": q.is_cuda}
        options["QUERY_ROWS"] = max(8, triton.next_power_of_2(queries * heads // kv_heads))
        options["DIM_ROOM"] = max(32, given["DIM_ROOM"])  # a product sums over 16 numbers at least
        decode8[grid](q, *pairs, *exponents_of(k_cache, v_cache), *behind, *numbers, **options)
    else:
        _decode[grid](q, k_cache, v_cache, *behind, *numbers, **options)
    if queries > 1 and shape.splits > 1:
        merge[(items, kv_heads, queries)](
            decodes[1], decodes[2], decodes[3], out, parts, sums, window, shape.least, HEADS=heads,
            GROUP=heads // kv_heads, QUERIES=queries, DIM=dim, DIM_ROOM=given["DIM_ROOM"], TILE=shape.tile,
            SPLITS=shape.splits, WINDOWED=window > 0, num_warps=4, **overlap(),
        )  # fmt: skip


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, blocks: Tensor, out: Tensor, scale: float, window: int,
    shape: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    """Blocks of queries. blocks [5, n]: row of the table (PADDING: none), index of the row's first query in q, how many
    queries it has, the first one of this block, and the row's context."""
    group = q.shape[1] // k_cache.shape[2]
    queries = queries_per_block(group, q.shape[2], q.dtype)
    tile, warps, stages = shape or prefill_shape(q.shape[2], q.dtype == torch.float32, k_cache.dtype == FP8)
    _prefill[(k_cache.shape[2], blocks.shape[1])](
        q, k_cache, v_cache, *exponents_of(k_cache, v_cache), tables, blocks[0], blocks[1], blocks[2], blocks[3],
        blocks[4], out, scale * LOG2_E, window, **sizes(q, k_cache, tables, window), QUERIES=queries,
        QUERY_ROWS=max(16, triton.next_power_of_2(queries * group)), TILE=tile, FROM_FP8=k_cache.dtype == FP8,
        num_warps=warps, num_stages=stages, **overlap(),
    )  # fmt: skip
