"""One token for every line of scores: temperature, top_k, top_p and min_p, without sorting and without the host.

A filter keeps the tokens whose score is at least some bound, so equal scores are kept or lost together. The bound is
searched among the bit patterns of the scores' own type, in the order of their values: each round counts, for four
bounds at once, how many tokens, or how much of the mass, reach them; the highest bound that enough of them reach gives
two bits more. Pieces whose best is below the bound so far are not read again.

    best of pieces, of line ─► rounds for top_k ─► rounds for top_p ─► best of pieces with noise, of line

Noise is that of kernels/noise.py: a function of a line's two keys and of the token. A line of temperature 0 takes the
likeliest. The order of a line's sums depends on that line alone. The meaning is `draw` of kernels/ref.py. Knows tensors
only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from shoal.kernels import draw_table
from shoal.kernels.draw_table import Filters
from shoal.kernels.triton.launch import overlap, settle
from shoal.kernels.triton.step import PIECE, best_of_line, best_of_pieces

BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}  # of a float32 that values of a type can differ in
TILE = 1024
# columns of the draw table, as kernels read them
FIRST_KEY, SECOND_KEY = tl.constexpr(draw_table.KEY), tl.constexpr(draw_table.SECOND_KEY)
TEMPERATURE, MIN_P = tl.constexpr(draw_table.TEMPERATURE), tl.constexpr(draw_table.MIN_P)
TOP_K, TOP_P = tl.constexpr(draw_table.TOP_K), tl.constexpr(draw_table.TOP_P)


@triton.jit
def _key(score, BITS: tl.constexpr):
    """Whole numbers in the order of the scores."""
    score = tl.where(score == 0, 0.0, score)  # -0 is as likely as 0
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> (32 - BITS)
    return bits.to(tl.int64) if BITS == 32 else bits.to(tl.int32)


@triton.jit
def _parameters(table, t_row, line):
    """(temperature, min_p, top_k, top_p) of a line."""
    temperature = tl.load(table + TEMPERATURE * t_row + line).to(tl.float32, bitcast=True)
    min_p = tl.load(table + MIN_P * t_row + line).to(tl.float32, bitcast=True)
    top_p = tl.load(table + TOP_P * t_row + line).to(tl.float32, bitcast=True)
    return temperature, min_p, tl.load(table + TOP_K * t_row + line), top_p


@triton.jit(do_not_specialize=["shift"])
def _narrow(
    scores, bests, tops, table, t_row, lows, sums, s_row, size, pieces, shift,
    BY_MASS: tl.constexpr, BITS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """How many tokens, or how much mass, of one piece reach each of the four bounds of this round."""
    settle(OVERLAP)
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _, top_k, top_p = _parameters(table, t_row, line)
    filtered = (top_p < 1) if BY_MASS else (top_k > 0)
    if (temperature > 0) & filtered:
        least = tl.load(lows + 2 * line)  # of top_k: 0 as long as nothing is known
        low = least
        if BY_MASS:
            low = tl.load(lows + 2 * line + 1)
        step = tl.full([], 1, low.dtype) << shift
        first = tl.zeros([TILE], tl.float32)
        second = tl.zeros([TILE], tl.float32)
        third = tl.zeros([TILE], tl.float32)
        fourth = tl.zeros([TILE], tl.float32)
        if _key(tl.load(bests + line * pieces + piece), BITS) >= low:
            top = tl.load(tops + line)
            for start in range(0, PIECE, TILE):
                i = piece * PIECE + start + tl.arange(0, TILE)
                score = tl.load(scores + line * s_row + i, mask=i < size, other=float("-inf")).to(tl.float32)
                key = _key(score, BITS)
                weight = tl.where(i < size, 1.0, 0.0)
                if BY_MASS:
                    weight = tl.exp(tl.div_rn(score - top, temperature))
                    weight = tl.where((i < size) & (key >= least), weight, 0.0)
                first += tl.where(key >= low, weight, 0.0)
                second += tl.where(key >= low + step, weight, 0.0)
                third += tl.where(key >= low + 2 * step, weight, 0.0)
                fourth += tl.where(key >= low + 3 * step, weight, 0.0)
        at = sums + (line * pieces + piece) * 4
        tl.store(at, tl.sum(first, 0))
        tl.store(at + 1, tl.sum(second, 0))
        tl.store(at + 2, tl.sum(third, 0))
        tl.store(at + 3, tl.sum(fourth, 0))


@triton.jit(do_not_specialize=["shift"])
def _raise_bound(
    table, t_row, lows, sums, masses, size, pieces, shift,
    BY_MASS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The highest of the four bounds that enough tokens, or enough of the mass, reach."""
    settle(OVERLAP)
    line = tl.program_id(0).to(tl.int64)
    temperature, _, top_k, top_p = _parameters(table, t_row, line)
    filtered = (top_p < 1) if BY_MASS else (top_k > 0)
    if (temperature > 0) & filtered:
        p, j = tl.arange(0, WIDTH), tl.arange(0, 4)
        part = tl.load(sums + (line * pieces + p)[:, None] * 4 + j[None, :], mask=(p < pieces)[:, None], other=0.0)
        reach = tl.sum(part, 0)
        at = lows + 2 * line
        if BY_MASS:
            at += 1
            if shift == BITS - 2:  # the first round: everything reaches its lowest bound
                tl.store(masses + line, tl.max(reach, 0))
                enough = reach >= top_p * tl.max(reach, 0)
            else:
                enough = reach >= top_p * tl.load(masses + line)
        else:
            enough = reach >= tl.minimum(top_k, size).to(tl.float32)
        digit = tl.max(tl.where(enough, j, 0), 0).to(lows.dtype.element_ty)
        tl.store(at, tl.load(at) + (digit << shift))


@triton.jit
def _scramble(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(first, second, ids):
    """The noise of kernels/noise.py. The logarithm must be exact near 1, where the noise of the winners comes from."""
    mixed = _scramble(ids.to(tl.uint32) * 0x9E3779B1 + first)
    mixed = _scramble(mixed ^ second)
    uniform = ((mixed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -libdevice.log(-libdevice.log(uniform))


@triton.jit
def _noisy_piece(
    scores, tops, table, t_row, lows, bests, indexes, s_row, size, pieces,
    BITS: tl.constexpr, PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best of one piece, with noise, among those that the filters leave; nothing changes where none is drawn."""
    settle(OVERLAP)
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, min_p, _, _ = _parameters(table, t_row, line)
    if temperature > 0:
        i = piece * PIECE + tl.arange(0, PIECE)
        score = tl.load(scores + line * s_row + i, mask=i < size, other=float("-inf")).to(tl.float32)
        top = tl.load(tops + line)
        scaled = tl.div_rn(score - top, temperature)
        key = _key(score, BITS)
        keep = (key >= tl.load(lows + 2 * line)) & (key >= tl.load(lows + 2 * line + 1))  # 0: no such filter
        keep = keep & (scaled >= libdevice.log(min_p))
        keep = (keep | (score == top)) & (i < size)
        first = tl.load(table + FIRST_KEY * t_row + line).to(tl.uint32, bitcast=True)
        second = tl.load(table + SECOND_KEY * t_row + line).to(tl.uint32, bitcast=True)
        noisy = tl.where(keep, scaled + _noise(first, second, i), float("-inf"))
        noisy = tl.where(noisy != noisy, float("-inf"), noisy)  # else an index beyond the scores might win
        best, index = tl.max(noisy, 0, return_indices=True)
        tl.store(bests + line * pieces + piece, best)
        tl.store(indexes + line * pieces + piece, piece * PIECE + index)


def draw(scores: Tensor, table: Tensor, last_token: Tensor, out: Tensor, best: Tensor, filters: Filters) -> None:
    """As PassOps.draw."""
    lines, size = scores.shape
    pieces = triton.cdiv(size, PIECE)
    bits = BITS[scores.dtype]
    device, s_row, t_row = scores.device, scores.stride(0), table.stride(0)
    bests, indexes = best_of_pieces(scores)
    best_of_line(bests, indexes, table[draw_table.ROW], last_token, out, best)
    lows = torch.zeros((lines, 2), dtype=torch.int64 if bits == 32 else torch.int32, device=device)  # bounds so far
    sums = torch.empty((lines, pieces, 4), dtype=torch.float32, device=device)
    masses = torch.empty(lines, dtype=torch.float32, device=device)
    width = triton.next_power_of_2(pieces)
    grid = (lines, pieces)
    searches = [by_mass for by_mass, needed in ((False, filters.top_k), (True, filters.top_p)) if needed]
    for by_mass in searches:
        for shift in range(bits - 2, -2, -2):
            _narrow[grid](
                scores, bests, best, table, t_row, lows, sums, s_row, size, pieces, shift, BY_MASS=by_mass, BITS=bits,
                PIECE=PIECE, TILE=TILE, num_warps=4, **overlap(),
            )  # fmt: skip
            _raise_bound[(lines,)](
                table, t_row, lows, sums, masses, size, pieces, shift, BY_MASS=by_mass, BITS=bits, WIDTH=width,
                num_warps=4, **overlap(),
            )  # fmt: skip
    _noisy_piece[grid](
        scores, best, table, t_row, lows, bests, indexes, s_row, size, pieces, BITS=bits, PIECE=PIECE, num_warps=4,
        **overlap(),
    )  # fmt: skip
    best_of_line(bests, indexes, table[draw_table.ROW], last_token, out)
