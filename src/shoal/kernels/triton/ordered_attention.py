"""Attention whose every sum has one order: the same bits for a query alone, in any batch, in any chunk of its prompt,
among drafts, and however the work is split.

    past      0 ········ SPAN ········ 2 SPAN ···· query        spans: borders that a position alone decides
              └─ span 0 ─┘└── span 1 ──┘└─ span 2 ─┘            each in tiles from left to right
    result    ((nothing + span 0) + span 1) + span 2

One kernel serves decodes and prompt chunks, with tiles of one width. A program takes all spans of its queries in turn,
or one of them; then the program that finishes last adds them up, in the same order. All sums are matrix products, those
of the weights too, because the order of any other sum depends on the number of queries and warps; of a product it does
not (tests/gpu/test_ordered.py). Tiles that a query does not see change no bit of it. Knows tensors, not batches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.fp8 import FP8
from shoal.kernels.triton.attention import FEW, LOG2_E, LONG, PARTS, exponents_of, queries_per_block, scales_at, sizes
from shoal.kernels.triton.launch import overlap, settle

SPAN = 1024  # tokens
LEAST = 16  # lines of a matrix of queries
LEAST_FP8 = 64  # over an fp8 cache: with fewer, the bits were others on an H200


@triton.jit
def _tile(
    top, total, mixed, query, k_cache, v_cache, k_exponents, v_exponents, table, token, there, position, head, d,
    in_dim, scale, window, c_block, c_token, c_head,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, FROM_FP8: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """A span's state after one tile more. CUT: some queries may not see all of it, which else saves time alone."""
    block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
    at = block * c_block + (token % BLOCK) * c_token + head * c_head
    key = tl.load(k_cache + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0)
    value = tl.load(v_cache + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
    if FROM_FP8:
        k_scale, v_scale = scales_at(k_exponents, v_exponents, block * c_block + head * BLOCK + token % BLOCK, there)
        key, value = key.to(query.dtype), value.to(query.dtype)
    score = tl.dot(query, key, input_precision=PRECISION) * scale
    if FROM_FP8:
        score = score * k_scale[None, :]
    if CUT:
        seen = (token[None, :] <= position[:, None]) & there[None, :]
        if WINDOWED:
            seen = seen & (token[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
    ones = tl.full([weight.shape[1], 16], 1.0, value.dtype)
    total = total * fade + tl.max(tl.dot(weight.to(value.dtype), ones, input_precision=PRECISION), 1)  # all are equal
    if FROM_FP8:
        weight = weight * v_scale[None, :]
    mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
    return higher, total, mixed


@triton.jit
def _nothing(QUERY_ROWS: tl.constexpr, DIM_ROOM: tl.constexpr):
    """The state of a span, or of all spans, before its first tile."""
    top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([QUERY_ROWS], tl.float32), tl.zeros([QUERY_ROWS, DIM_ROOM], tl.float32)


@triton.jit
def _add_span(top, total, mixed, span_top, span_total, span_mixed):
    """The state of all spans so far and one more."""
    higher = tl.maximum(top, span_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(top - base), tl.exp2(span_top - base)
    return higher, total * old + span_total * new, mixed * old[:, None] + span_mixed * new[:, None]


@triton.jit(do_not_specialize=["window", "t_row"])
def _attend(
    q, k_cache, v_cache, k_exponents, v_exponents, tables, rows, begins, counts, firsts, contexts, out, parts, arrived,
    scale, window, q_token, q_head, c_block, c_token, c_head, t_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_ROOM: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, DECODES: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr,
    FROM_FP8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some queries of a sequence, for the heads of one KV head; SPANS > 1: one span of them."""
    settle(OVERLAP)
    head, item, only = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, context = tl.load(rows + item).to(tl.int64), tl.load(contexts + item)
    begin, count, first_query = tl.load(begins + item), tl.load(counts + item), 0
    if not DECODES:
        first_query = tl.load(firsts + item)
    r, d, t = tl.arange(0, QUERY_ROWS), tl.arange(0, DIM_ROOM), tl.arange(0, TILE)
    query_at, heads, in_dim = first_query + r // GROUP, head * GROUP + r % GROUP, d < DIM
    live = (query_at < count) & (r < QUERIES * GROUP)
    past = context - count  # positions before this pass's first
    position = past + query_at
    until = tl.minimum(context, past + first_query + QUERIES)
    since = 0
    if WINDOWED:
        since = tl.maximum(past + first_query + 1 - window, 0) // TILE * TILE
    span, end = since // SPAN, tl.cdiv(until, SPAN)
    spans = end - span
    if SPANS > 1:
        span += only
        end = tl.minimum(end, span + 1)
    if (row >= 0) & (context > 0) & (span < end):
        place = (begin + query_at).to(tl.int64)
        mask = live[:, None] & in_dim[None, :]
        query = tl.load(q + place[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0)
        table = tables + row * t_row
        top, total, mixed = _nothing(QUERY_ROWS, DIM_ROOM)
        span_top, span_total, span_mixed = top, total, mixed
        begun, limit = tl.maximum(span * SPAN, since), tl.minimum(end * SPAN, until)
        border = begun  # every query sees all of the tiles before this
        if not DECODES and not WINDOWED:
            border = tl.minimum(tl.maximum((past + first_query + 1) // TILE * TILE, begun), limit)
        for cut in tl.static_range(DECODES, 2):
            for start in range(border if cut else begun, limit if cut else border, TILE):
                token = start + t
                span_top, span_total, span_mixed = _tile(
                    span_top, span_total, span_mixed, query, k_cache, v_cache, k_exponents, v_exponents, table, token,
                    token < until, position, head, d, in_dim, scale, window, c_block, c_token, c_head,
                    BLOCK, PRECISION, WINDOWED, FROM_FP8, cut == 1,
                )  # fmt: skip
                if (start + TILE) % SPAN == 0:  # in the loop over tiles, so that loads run ahead of a span's border
                    top, total, mixed = _add_span(top, total, mixed, span_top, span_total, span_mixed)
                    span_top, span_total, span_mixed = _nothing(QUERY_ROWS, DIM_ROOM)
        top, total, mixed = _add_span(top, total, mixed, span_top, span_total, span_mixed)  # nothing changes no bit
        last = spans > 0  # it is, unless the spans have a program each
        if SPANS > 1:
            LINE: tl.constexpr = DIM + 2  # a query's mixed values, total and top
            mine = parts + ((item * KV_HEADS + head).to(tl.int64) * SPANS * QUERIES * GROUP + r) * LINE
            if spans > 1:
                at = mine + only * QUERIES * GROUP * LINE
                tl.store(at[:, None] + d[None, :], mixed, mask=mask)
                tl.store(at + DIM, total, mask=live)
                tl.store(at + DIM + 1, top, mask=live)
                tl.debug_barrier()  # all of this program's stores come before its arrival
                before = tl.atomic_add(arrived + item * KV_HEADS + head, 1, sem="acq_rel")
                last = before == spans - 1
                if last:  # all spans are stored
                    tl.store(arrived + item * KV_HEADS + head, 0)
                    top, total, mixed = _nothing(QUERY_ROWS, DIM_ROOM)
                    for one in range(spans):
                        at = mine + one * QUERIES * GROUP * LINE
                        top, total, mixed = _add_span(
                            top, total, mixed,
                            tl.load(at + DIM + 1, mask=live, other=float("-inf"), cache_modifier=".cg"),
                            tl.load(at + DIM, mask=live, other=0.0, cache_modifier=".cg"),
                            tl.load(at[:, None] + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"),
                        )  # fmt: skip
        if last:
            result = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
            to = (place[:, None] * HEADS + heads[:, None]) * DIM + d[None, :]
            tl.store(out + to, result, mask=mask)


def _launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, items: tuple[Tensor, ...], out: Tensor,
    parts: Tensor, arrived: Tensor, scale: float, window: int, queries: int, spans: int, decodes: bool,
) -> None:  # fmt: skip
    """items: row, first query, queries, the first one of this block, context."""
    kv_heads, group = k_cache.shape[2], q.shape[1] // k_cache.shape[2]
    tile, stages = tile_for(q.shape[2], q.dtype == torch.float32, k_cache.dtype == FP8)
    lines = max(LEAST_FP8 if k_cache.dtype == FP8 else LEAST, triton.next_power_of_2(queries * group))
    _attend[(kv_heads, len(items[0]), spans)](
        q, k_cache, v_cache, *exponents_of(k_cache, v_cache), tables, *items, out, parts, arrived, scale * LOG2_E,
        window, **sizes(q, k_cache, tables, window), KV_HEADS=kv_heads, QUERIES=queries,
        QUERY_ROWS=lines, TILE=tile, SPAN=SPAN, SPANS=spans, DECODES=decodes, FROM_FP8=k_cache.dtype == FP8,
        num_warps=warps_for(lines), num_stages=stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip


def warps_for(lines: int) -> int:
    """By the lines of a program's matrix of queries, which changes no order."""
    return 2 if lines <= 32 else 4 if lines <= 64 else 8


def tile_for(dim: int, wide: bool, from_fp8: bool) -> tuple[int, int]:
    """(tokens of a tile, stages), by the model alone."""
    if wide or dim > 128:
        return 32, 1
    return (32, 4) if from_fp8 else (64, 3)


def spans_for(items: int, kv_heads: int, line: int, long: bool, width: int, processors: int) -> int:
    """Programs that the past of a decode is split over; 1: one program takes all spans. All spans or none, since their
    order is fixed. line: numbers of a sequence's queries and a KV head in a span; width: tokens of the longest past."""
    if items * kv_heads > 4 * processors and not long:
        return 1
    spans = triton.cdiv(width if long else min(width, LONG + FEW), SPAN)
    return 1 if items * kv_heads * spans * line * 4 > PARTS else spans


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, decodes: Tensor, out: Tensor, arrived: Tensor,
    scale: float, window: int, long: bool, processors: int, queries: int = 1,
) -> None:  # fmt: skip
    """As attention.decode. `arrived` holds a zero for every sequence and KV head, before and after."""
    row, context, begin, count = decodes
    kv_heads, group, dim = k_cache.shape[2], q.shape[1] // k_cache.shape[2], q.shape[2]
    line = queries * group * (dim + 2)
    spans = spans_for(len(row), kv_heads, line, long, tables.shape[1] * k_cache.shape[1], processors)
    parts = out
    if spans > 1:
        parts = torch.empty((len(row), kv_heads, spans, line), dtype=torch.float32, device=q.device)
    items = row, begin, count, count, context
    _launch(q, k_cache, v_cache, tables, items, out, parts, arrived, scale, window, queries, spans, decodes=True)


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, blocks: Tensor, out: Tensor, scale: float, window: int
) -> None:
    """As attention.prefill."""
    queries = queries_per_block(q.shape[1] // k_cache.shape[2], q.shape[2], q.dtype)
    _launch(q, k_cache, v_cache, tables, tuple(blocks), out, out, tables, scale, window, queries, 1, decodes=False)
