"""Ragged paged attention in Triton: decodes split over their past, prompt chunks in blocks of queries.

Both kernels read keys and values through the block table and pack the query heads that share a KV head into the rows
of one matrix product, so that every key is read once per KV head.

    decode    one program for (sequence, KV head, split): the group's heads against a part of the past; parts are merged
    prefill   one program for (block of queries, KV head): tiles wholly in the past unmasked, then the ragged border

Scores are kept in powers of two (exp2 is the hardware's own). Knows tensors, not batches.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
# tokens per tile, warps, stages: the best on an H200 for bf16, head_dim 128 (decode) and per case (prefill)
DECODE = (128, 4, 3)
PREFILL = (64, 4, 3)
ROWS = 128  # of the prefill's query block: queries × heads of a group


@triton.jit
def _decode(
    q, k_cache, v_cache, tables, contexts, places, out, sums, scale, window,
    q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    place = tl.load(places + row).to(tl.int64)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(context - window, 0) // TILE * TILE
    tiles = tl.cdiv(context - begin, TILE)
    share = tl.cdiv(tiles, SPLITS) * TILE
    first = begin + split * share
    last = tl.minimum(first + share, context)
    g, d, t = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
    in_dim, in_group = d < DIM, g < GROUP
    heads = head * GROUP + g
    query = tl.load(
        q + place * q_token + heads[:, None] * q_head + d[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0
    )
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
        score = tl.dot(query, key, input_precision="ieee" if EXACT else "tf32") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
        total = total * fade + tl.sum(weight, 1)
        value = tl.load(v_cache + at[:, None] + d[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(
            weight.to(value.dtype), value, input_precision="ieee" if EXACT else "tf32"
        )
        top = higher
    mask = in_group[:, None] & in_dim[None, :]
    safe = tl.where(total > 0, total, 1.0)
    if SPLITS == 1:
        result = (mixed / safe[:, None]).to(out.dtype.element_ty)
        tl.store(out + (place * HEADS + heads)[:, None] * DIM + d[None, :], result, mask=mask)
    else:
        part = (row * HEADS + heads) * SPLITS + split
        tl.store(out + part[:, None] * DIM + d[None, :], mixed / safe[:, None], mask=mask)
        tl.store(sums + part, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=in_group)


@triton.jit
def _merge(
    parts, sums, places, out, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr, SPLITS: tl.constexpr
):
    """Parts of one head's past, weighed by the mass each saw."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + row).to(tl.int64)
    d, p = tl.arange(0, DIM_ROOM), tl.arange(0, SPLITS)
    first = (row * HEADS + head) * SPLITS
    mass = tl.load(sums + first + p)
    weight = tl.exp2(mass - tl.max(mass, 0))
    weight = weight / tl.sum(weight, 0)
    part = tl.load(parts + (first + p)[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], 0).to(out.dtype.element_ty)
    tl.store(out + (place * HEADS + head) * DIM + d, result, mask=d < DIM)


@triton.jit
def _prefill(
    q, k_cache, v_cache, tables, contexts, starts, block_row, block_first, out, scale, window,
    q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    row, head = tl.load(block_row + tl.program_id(0)), tl.program_id(1)
    first_query = tl.load(block_first + tl.program_id(0))
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    context = tl.load(contexts + row)
    r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
    query_at = first_query + r // GROUP
    heads = head * GROUP + r % GROUP
    in_dim = d < DIM
    live = (query_at < end - begin) & (r < QUERIES * GROUP)
    place = (begin + query_at).to(tl.int64)
    query = tl.load(
        q + place[:, None] * q_token + heads[:, None] * q_head + d[None, :],
        mask=live[:, None] & in_dim[None, :],
        other=0.0,
    )
    past = context - (end - begin)  # positions before this pass's first
    position = past + query_at
    top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    mixed = tl.zeros([QUERY_ROWS, DIM_ROOM], tl.float32)
    until = tl.minimum(context, past + first_query + QUERIES)
    border = (past + first_query + 1) // TILE * TILE  # tiles before this are seen whole by every query
    start_at = 0
    if WINDOWED:
        start_at = tl.maximum(past + first_query + 1 - window, 0) // TILE * TILE
        border = start_at  # every tile may be cut by the window
    for start in range(start_at, border, TILE):
        token = start + t
        block = tl.load(tables + row * t_row + token // BLOCK).to(tl.int64)
        at = block * c_block + (token % BLOCK) * c_token + head * c_head
        key = tl.load(k_cache + at[None, :] + d[:, None], mask=in_dim[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee" if EXACT else "tf32") * scale
        higher = tl.maximum(top, tl.max(score, 1))
        fade, weight = tl.exp2(top - higher), tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(weight, 1)
        value = tl.load(v_cache + at[:, None] + d[None, :], mask=in_dim[None, :], other=0.0)
        mixed = tl.dot(
            weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee" if EXACT else "tf32"
        )
        top = higher
    for start in range(border, until, TILE):
        token = start + t
        there = token < until
        block = tl.load(tables + row * t_row + token // BLOCK, mask=there, other=0).to(tl.int64)
        at = block * c_block + (token % BLOCK) * c_token + head * c_head
        key = tl.load(k_cache + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee" if EXACT else "tf32") * scale
        seen = (token[None, :] <= position[:, None]) & there[None, :]
        if WINDOWED:
            seen = seen & (token[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
        total = total * fade + tl.sum(weight, 1)
        value = tl.load(v_cache + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
        mixed = tl.dot(
            weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee" if EXACT else "tf32"
        )
        top = higher
    result = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + (place[:, None] * HEADS + heads[:, None]) * DIM + d[None, :], result, mask=live[:, None] & in_dim[None, :]
    )


def queries_per_block(group: int) -> int:
    """How many queries of a prompt one program takes."""
    return max(1, ROWS // group)


def splits_for(sequences: int, kv_heads: int, longest: int, processors: int) -> int:
    """Into how many parts a decode's past is split: enough programs to fill the card, none shorter than two tiles."""
    programs = sequences * kv_heads
    wanted = triton.next_power_of_2(max(1, -(-2 * processors // programs)))
    most = triton.next_power_of_2(max(1, longest // (2 * DECODE[0])))
    return int(min(wanted, most, 32))


def _shapes(q: Tensor, k_cache: Tensor, tables: Tensor) -> dict[str, Any]:
    heads, dim = q.shape[1], q.shape[2]
    return {
        "q_token": q.stride(0), "q_head": q.stride(1), "c_block": k_cache.stride(0), "c_token": k_cache.stride(1),
        "c_head": k_cache.stride(2), "t_row": tables.stride(0), "HEADS": heads, "GROUP": heads // k_cache.shape[2],
        "DIM": dim, "DIM_ROOM": triton.next_power_of_2(dim), "BLOCK": k_cache.shape[1],
        "EXACT": q.dtype == torch.float32,
    }  # fmt: skip


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, contexts: Tensor, places: Tensor, out: Tensor,
    scale: float, window: int, splits: int,
) -> None:  # fmt: skip
    """Sequences with one query each, which stands at row places[i] of q and of out."""
    rows, heads, dim = tables.shape[0], q.shape[1], q.shape[2]
    group = heads // k_cache.shape[2]
    tile, warps, stages = DECODE if q.dtype != torch.float32 and dim <= 128 else (32, 4, 2)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    _decode[(rows, k_cache.shape[2], splits)](
        q, k_cache, v_cache, tables, contexts, places, parts, sums, scale * LOG2_E, window,
        **_shapes(q, k_cache, tables), GROUP_ROWS=max(16, triton.next_power_of_2(group)), TILE=tile, SPLITS=splits,
        WINDOWED=window > 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        room = triton.next_power_of_2(dim)
        _merge[(rows, heads)](parts, sums, places, out, HEADS=heads, DIM=dim, DIM_ROOM=room, SPLITS=splits, num_warps=1)


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, contexts: Tensor, starts: Tensor,
    block_row: Tensor, block_first: Tensor, out: Tensor, scale: float, window: int,
) -> None:  # fmt: skip
    """Blocks of queries: block i is of row block_row[i] and begins at its query number block_first[i]."""
    group = q.shape[1] // k_cache.shape[2]
    queries = queries_per_block(group)
    tile, warps, stages = PREFILL if q.dtype != torch.float32 and q.shape[2] <= 128 else (32, 4, 1)
    _prefill[(block_row.shape[0], k_cache.shape[2])](
        q, k_cache, v_cache, tables, contexts, starts, block_row, block_first, out, scale * LOG2_E, window,
        **_shapes(q, k_cache, tables), QUERIES=queries, QUERY_ROWS=max(16, triton.next_power_of_2(queries * group)),
        TILE=tile, WINDOWED=window > 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
