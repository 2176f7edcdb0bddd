"""Ragged paged attention in Triton: decodes split over their past, prompt chunks in blocks of queries.

Both kernels read keys and values through the block table and pack the query heads that share a KV head into the rows
of one matrix product, so that every key is read once per KV head.

    decode    one program for (sequence, KV head, split): the group's heads against a part of the past; the program
              that finishes last merges the parts
    prefill   one program for (block of queries, KV head): tiles wholly in the past unmasked, then the ragged border

Lengths, rows and query indexes are read from device memory, and programs without work exit at once: a launch in a CUDA
graph serves any lengths. Scores are exponents of two (exp2 is a hardware instruction). Knows tensors, not batches.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.triton.launch import overlap, settle

LOG2_E = 1.4426950408889634
ROWS = 128  # of the prefill's query block: queries × heads of a group
LONG = 8192  # tokens of a past that is too long for one program while the others have finished
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
    q, k_cache, v_cache, tables, rows, contexts, places, out, parts, sums, arrived, scale, window, least,
    q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_ROOM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + item)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(context - window, 0) // TILE * TILE
    tiles = tl.cdiv(context - begin, TILE)
    share = tiles
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(tiles, SPLITS), least)
    first = begin + split * share * TILE
    last = tl.minimum(first + share * TILE, context)
    if first < last:  # else this part, or the whole sequence, is empty
        row = tl.load(rows + item).to(tl.int64)
        place = tl.load(places + item).to(tl.int64)
        g, d, t = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
        in_dim, in_group = d < DIM, g < GROUP
        heads = head * GROUP + g
        mask = in_group[:, None] & in_dim[None, :]
        query = tl.load(q + place * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0)
        top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        mixed = tl.zeros([GROUP_ROWS, DIM_ROOM], tl.float32)
        for start in range(first, last, TILE):
            token = start + t
            seen = token < last
            if WINDOWED:
                seen = seen & (token > context - 1 - window)
            block = tl.load(tables + row * t_row + token // BLOCK, mask=seen, other=0).to(tl.int64)
            at = block * c_block + (token % BLOCK) * c_token + head * c_head
            key = tl.load(k_cache + at[None, :] + d[:, None], mask=seen[None, :] & in_dim[:, None], other=0.0)
            score = tl.dot(query, key, input_precision=PRECISION) * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v_cache + at[:, None] + d[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            top = higher
        safe = tl.where(total > 0, total, 1.0)
        count = tl.cdiv(tiles, share)
        whole = (mixed / safe[:, None]).to(out.dtype.element_ty)
        to = out + (place * HEADS + heads)[:, None] * DIM + d[None, :]
        if SPLITS == 1 or count == 1:
            tl.store(to, whole, mask=mask)
        else:
            part = (item * HEADS + heads) * SPLITS + split
            tl.store(parts + part[:, None] * DIM + d[None, :], mixed / safe[:, None], mask=mask)
            tl.store(sums + part, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=in_group)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            before = tl.atomic_add(arrived + item * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:  # the last one: all parts are stored
                tl.store(arrived + item * KV_HEADS + head, 0)
                p = tl.arange(0, SPLITS)
                for member in tl.static_range(GROUP):
                    one = (item * HEADS + head * GROUP + member) * SPLITS + p
                    mass = tl.load(sums + one, mask=p < count, other=float("-inf"), cache_modifier=".cg")
                    share_of = tl.exp2(mass - tl.max(mass, 0))
                    share_of = share_of / tl.sum(share_of, 0)
                    piece = tl.load(
                        parts + one[:, None] * DIM + d[None, :], mask=(p < count)[:, None] & in_dim[None, :],
                        other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    merged = tl.sum(piece * share_of[:, None], 0).to(out.dtype.element_ty)
                    tl.store(out + (place * HEADS + head * GROUP + member) * DIM + d, merged, mask=in_dim)


@triton.jit(do_not_specialize=["window", "t_row"])
def _prefill(
    q, k_cache, v_cache, tables, rows, begins, counts, firsts, contexts, out, scale, window,
    q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    head, item = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + item).to(tl.int64)
    if row >= 0:
        begin, count = tl.load(begins + item), tl.load(counts + item)
        first_query, context = tl.load(firsts + item), tl.load(contexts + item)
        r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
        query_at = first_query + r // GROUP
        heads = head * GROUP + r % GROUP
        in_dim = d < DIM
        live = (query_at < count) & (r < QUERIES * GROUP)
        place = (begin + query_at).to(tl.int64)
        query = tl.load(
            q + place[:, None] * q_token + heads[:, None] * q_head + d[None, :],
            mask=live[:, None] & in_dim[None, :],
            other=0.0,
        )
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
            score = tl.dot(query, key, input_precision=PRECISION)
            higher = tl.maximum(top, tl.max(score, 1) * scale)
            fade, weight = tl.exp2(top - higher), tl.exp2(score * scale - higher[:, None])
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v_cache + at[:, None] + d[None, :], mask=in_dim[None, :], other=0.0)
            mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
            top = higher
        for start in range(border, until, TILE):
            token = start + t
            there = token < until
            block = tl.load(tables + row * t_row + token // BLOCK, mask=there, other=0).to(tl.int64)
            at = block * c_block + (token % BLOCK) * c_token + head * c_head
            key = tl.load(k_cache + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0)
            score = tl.dot(query, key, input_precision=PRECISION)
            seen = (token[None, :] <= position[:, None]) & there[None, :]
            if WINDOWED:
                seen = seen & (token[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1) * scale)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - base), tl.exp2(score * scale - base[:, None])
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v_cache + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
            mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
            top = higher
        result = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        to = (place[:, None] * HEADS + heads[:, None]) * DIM + d[None, :]
        tl.store(out + to, result, mask=live[:, None] & in_dim[None, :])


def queries_per_block(group: int, dim: int, dtype: torch.dtype) -> int:
    """How many queries of a prompt one program computes."""
    rows = ROWS if dim * dtype.itemsize <= 512 else ROWS // 2  # as many as shared memory holds
    return max(1, rows // group)


def decode_shape(sequences: int, kv_heads: int, dim: int, wide: bool, long: bool, processors: int) -> DecodeShape:
    """From the number of sequences and whether a past is long: the exact lengths are known only on the device, where
    short pasts use fewer parts.

    The table in docs/lab/gpu.md shows how these were found.
    """
    programs = sequences * kv_heads
    if wide or dim > 128:
        return DecodeShape(32, 4, 2, 8 if long or programs <= 2 * processors else 1, 4)
    if programs <= 16:
        return DecodeShape(64, 2, 3, 32, 1)
    if programs <= 64:
        return DecodeShape(64, 2, 3, 16, 2)
    if programs <= 4 * processors:
        return DecodeShape(128, 4, 3, 8, 4 if programs <= processors else 8)
    return DecodeShape(128, 4, 3, 8, 16) if long else DecodeShape(128, 4, 3, 1, 1)


def prefill_shape(dim: int, wide: bool) -> tuple[int, int, int]:
    """(tokens per tile, warps, stages)."""
    return (32, 4, 1) if wide or dim > 128 else (64, 4, 3)


def _shapes(q: Tensor, k_cache: Tensor, tables: Tensor, window: int) -> dict[str, Any]:
    heads, dim = q.shape[1], q.shape[2]
    return {
        "q_token": q.stride(0), "q_head": q.stride(1), "c_block": k_cache.stride(0), "c_token": k_cache.stride(1),
        "c_head": k_cache.stride(2), "t_row": tables.stride(0), "HEADS": heads, "GROUP": heads // k_cache.shape[2],
        "DIM": dim, "DIM_ROOM": triton.next_power_of_2(dim), "BLOCK": k_cache.shape[1],
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32", "WINDOWED": window > 0,
    }  # fmt: skip


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, decodes: Tensor, out: Tensor, arrived: Tensor,
    scale: float, window: int, shape: DecodeShape,
) -> None:  # fmt: skip
    """Sequences with one query each. decodes [3, n]: row of the table, context (0: padding), index of the query.

    `arrived` holds a zero for every sequence and KV head, before and after.
    """
    count, heads, dim = decodes.shape[1], q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[2]
    parts, sums = out, out
    if shape.splits > 1:
        parts = torch.empty((count, heads, shape.splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((count, heads, shape.splits), dtype=torch.float32, device=q.device)
    _decode[(count, kv_heads, shape.splits)](
        q, k_cache, v_cache, tables, decodes[0], decodes[1], decodes[2], out, parts, sums, arrived, scale * LOG2_E,
        window, shape.least, **_shapes(q, k_cache, tables, window), KV_HEADS=kv_heads,
        GROUP_ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), TILE=shape.tile, SPLITS=shape.splits,
        num_warps=shape.warps, num_stages=shape.stages, **overlap(),
    )  # fmt: skip


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, blocks: Tensor, out: Tensor, scale: float, window: int,
    shape: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    """Blocks of queries. blocks [5, n]: row of the table (PADDING: none), index of the row's first query in q, how many
    queries it has, the first one of this block, and the row's context."""
    group = q.shape[1] // k_cache.shape[2]
    queries = queries_per_block(group, q.shape[2], q.dtype)
    tile, warps, stages = shape or prefill_shape(q.shape[2], q.dtype == torch.float32)
    _prefill[(k_cache.shape[2], blocks.shape[1])](
        q, k_cache, v_cache, tables, blocks[0], blocks[1], blocks[2], blocks[3], blocks[4], out, scale * LOG2_E, window,
        **_shapes(q, k_cache, tables, window), QUERIES=queries,
        QUERY_ROWS=max(16, triton.next_power_of_2(queries * group)), TILE=tile, num_warps=warps, num_stages=stages,
        **overlap(),
    )  # fmt: skip
