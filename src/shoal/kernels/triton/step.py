"""The small work around a forward pass that must not wait for the host: adding new blocks to the block tables, finding
each position's token id and KV slot, and the likeliest token of every line of scores.

Knows tensors, not plans.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.triton.launch import overlap, settle

PIECE = 4096  # scores that one program looks at


@triton.jit(do_not_specialize=["count"])
def _add_blocks(new_blocks, tables, count, t_row, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    settle(OVERLAP)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = i < count
    row = tl.load(new_blocks + 3 * i, mask=mask, other=0).to(tl.int64)
    index = tl.load(new_blocks + 3 * i + 1, mask=mask, other=0)
    tl.store(tables + row * t_row + index, tl.load(new_blocks + 3 * i + 2, mask=mask, other=0), mask=mask)


def add_blocks(new_blocks: Tensor, tables: Tensor) -> None:
    """As PassOps.add_blocks."""
    count = new_blocks.shape[0]
    grid = (triton.cdiv(count, 256),)
    _add_blocks[grid](new_blocks, tables, count, tables.stride(0), TILE=256, num_warps=4, **overlap())


@triton.jit(do_not_specialize=["count", "l_row"])
def _place_tokens(
    ids, rows, positions, late, l_row, tables, t_row, out, count, BLOCK: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = i < count
    id, row = tl.load(ids + i, mask=mask, other=0), tl.load(rows + i, mask=mask, other=-1)
    position = tl.load(positions + i, mask=mask, other=0)
    real = mask & (row >= 0)
    there = tl.load(late + (-1 - id) * l_row + row, mask=real & (id < 0), other=0)
    block = tl.load(tables + row.to(tl.int64) * t_row + position // BLOCK, mask=real, other=0).to(tl.int64)
    tl.store(out + i, tl.where(id < 0, there, id.to(tl.int64)), mask=mask)
    tl.store(out + count + i, position.to(tl.int64), mask=mask)
    tl.store(out + 2 * count + i, tl.where(real, block * BLOCK + position % BLOCK, -1), mask=mask)


def place_tokens(
    ids: Tensor, rows: Tensor, positions: Tensor, late: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As PassOps.place_tokens; the slot of padding is -1."""
    count = ids.shape[0]
    out = torch.empty((3, count), dtype=torch.int64, device=ids.device)
    _place_tokens[(triton.cdiv(count, 256),)](
        ids, rows, positions, late, late.stride(0), tables, tables.stride(0), out, count, BLOCK=block_size, TILE=256,
        num_warps=4, **overlap(),
    )  # fmt: skip
    return out[0], out[1], out[2]


@triton.jit
def _best_of_piece(scores, bests, indexes, s_row, size, PIECE: tl.constexpr, OVERLAP: tl.constexpr):
    settle(OVERLAP)
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = piece * PIECE + tl.arange(0, PIECE)
    score = tl.load(scores + line * s_row + i, mask=i < size, other=float("-inf")).to(tl.float32)
    score = tl.where(score != score, float("inf"), score)  # a NaN must not hide
    best, index = tl.max(score, 0, return_indices=True)
    at = line * tl.num_programs(1) + piece
    tl.store(bests + at, best)
    tl.store(indexes + at, piece * PIECE + index)


@triton.jit
def _best_of_line(
    bests, indexes, rows, last_token, out, best_out, count, WIDTH: tl.constexpr, STORES_BEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    settle(OVERLAP)
    line = tl.program_id(0)
    p = tl.arange(0, WIDTH)
    best = tl.load(bests + line * count + p, mask=p < count, other=float("-inf"))
    top, piece = tl.max(best, 0, return_indices=True)
    token = tl.load(indexes + line * count + piece)
    tl.store(out + line, token)
    if STORES_BEST:
        tl.store(best_out + line, top)
    row = tl.load(rows + line)
    if row >= 0:
        tl.store(last_token + row, token.to(tl.int64))


def best_of_pieces(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(score, index) of the first of the highest in every PIECE of a line; infinity where there is NaN."""
    lines, size = scores.shape
    pieces = triton.cdiv(size, PIECE)
    bests = torch.empty((lines, pieces), dtype=torch.float32, device=scores.device)
    indexes = torch.empty((lines, pieces), dtype=torch.int32, device=scores.device)
    stride = scores.stride(0)
    _best_of_piece[(lines, pieces)](scores, bests, indexes, stride, size, PIECE=PIECE, num_warps=4, **overlap())
    return bests, indexes


def best_of_line(
    bests: Tensor, indexes: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor | None = None
) -> None:
    """The index of the highest of each line's pieces into `out`, and into last_token at the line's row, unless that is
    below 0; its score into `best`, if given."""
    lines, pieces = bests.shape
    _best_of_line[(lines,)](
        bests, indexes, rows, last_token, out, bests if best is None else best, pieces,
        WIDTH=triton.next_power_of_2(pieces), STORES_BEST=best is not None, num_warps=1, **overlap(),
    )  # fmt: skip


def likeliest(scores: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
    """As PassOps.likeliest."""
    bests, indexes = best_of_pieces(scores)
    best_of_line(bests, indexes, rows, last_token, out, best)
