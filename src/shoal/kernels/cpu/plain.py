"""Plain torch, arranged to be fast on CPUs.

Owns how a ragged pass is split into few large calls. Same meaning as ref, within rounding. Does not know models.

Decode (one query per sequence): each context is split into pieces of PIECE_TOKENS, and all pieces of equal block count,
of any sequence, are attended in one call; then each sequence's pieces are merged by their log-sum-exp. Lengths may all
differ, nothing is padded, and the number of calls does not grow with the number of sequences.

    seq 0  ████ ████ ██        full pieces:  ████ ████ ████ ████   one call
    seq 1  ████ ██             tails of 2:   ██ ██                 one call
    seq 2  ████ █              tails of 1:   █                     one call

Several queries of one sequence (prefill, a chunk of it, a draft): one call per sequence.
"""

import platform
import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from shoal.core.plan import Ints
from shoal.core.ports import LateMasks
from shoal.kernels import torch_choose
from shoal.kernels.cpu.compiled import cpu_features
from shoal.kernels.cpu.huge_pages import HugePages
from shoal.kernels.draw_table import SamplingState
from shoal.kernels.ops import Batch
from shoal.kernels.padded import padded_attention
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import Weight, matrix

PIECE_TOKENS = 64
IS_ARM = platform.machine() in ("aarch64", "arm64")
SWAPPED_ROWS = range(9, 65)  # on ARM the BLAS is 5 to 25 % faster if x and W are swapped

_attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@cache
def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this type at a useful speed; if not, float32 is used.

    On ARM, float16 products exist, but they are slower than float32 ones and sum in float16.
    """
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if name is None or not hasattr(torch.ops.mkldnn, name):
        return False
    if dtype == torch.float16 and IS_ARM:
        return False
    return bool(getattr(torch.ops.mkldnn, name)())


@cache
def has_bfloat16_products() -> bool:
    """Whether the CPU has dot products or tiles for bfloat16, so that 16-bit weights halve the memory traffic."""
    if not computes_natively(torch.bfloat16):
        return False
    asked: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    wanted = {"bf16", "sve_bf16", "svebf16", "avx512_bf16", "amx_bf16"}
    return bool(wanted & (cpu_features() | {name for name, has in asked.items() if has is True}))


class CpuOps(RefOps):
    """Ops for CPUs; an op that is not here is ref's. Remembers how the attention of the last pass was split."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Batch], dict[int, _Split]] | None = None
        self._memory = HugePages()

    def prepare(self, weight: Weight) -> Weight:
        """In huge pages."""
        return self._memory.moved(weight)

    def choose(
        self,
        scores: Tensor,
        rows: Ints,
        positions: Ints,
        state: SamplingState,
        masks: LateMasks | None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All lines at once, in torch."""
        return torch_choose.choose(scores, rows, positions, state, masks, expected)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, in x's type; computed in float32 if the types differ or this CPU multiplies them slowly."""
        values = matrix(weight, x.dtype)
        if x.dtype == values.dtype and computes_natively(values.dtype):
            return _linear(x, values, None if bias is None else bias.to(x.dtype))
        return _linear(x.float(), values.float(), None if bias is None else bias.float()).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / √(mean of x² + eps), then times weight."""
        if x.dtype == torch.float32:
            return rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(left half) × right half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Each pair (i, i + d/2) rotated by its angle, in float32: x·cos + (x with halves exchanged)·(∓sin)."""
        half = q.shape[-1] // 2
        cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
        both_cos, both_sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

        def rotated(x: Tensor) -> Tensor:
            wide = x.float()
            return torch.addcmul(wide * both_cos, wide.roll(half, -1), both_sin).to(x.dtype)

        return rotated(q), rotated(k)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """One row of the flattened cache per token."""
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k.to(k_cache.dtype))
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v.to(v_cache.dtype))

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """All decode rows together, then each stretch of several queries by itself."""
        if batch.width:
            return padded_attention(q, k_cache, v_cache, batch, scale, window)
        split = self._split_for(batch, window)
        if not split.stretches and len(split.decode_rows) == q.shape[0]:
            return _attend_pieces(q, k_cache, v_cache, split, scale).to(q.dtype)
        out = torch.zeros_like(q)
        if len(split.decode_rows):
            decoded = _attend_pieces(q.index_select(0, split.decode_rows), k_cache, v_cache, split, scale)
            out.index_copy_(0, split.decode_rows, decoded.to(q.dtype))
        for stretch in split.stretches:
            rows = slice(stretch.first, stretch.end)
            out[rows] = _attend_stretch(q[rows], k_cache, v_cache, stretch, scale)
        return out

    def _split_for(self, batch: Batch, window: int) -> "_Split":
        """All layers of a pass are split alike, so this is computed once per pass and window."""
        last = self._last
        if last is None or last[0]() is not batch:
            last = self._last = (weakref.ref(batch), {})
        if window not in last[1]:
            last[1][window] = _split(batch, window)
        return last[1][window]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not IS_ARM or x.shape[0] not in SWAPPED_ROWS:
        return linear(x, weight, bias)
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


@dataclass(frozen=True)
class _Pieces:
    """Pieces of equal block count."""

    owners: Tensor  # int64 [n]: index among the decode rows
    blocks: Tensor  # int64 [n × blocks each]
    hidden: Tensor | None  # float32 [n, 1, 1, tokens]: −inf where a token is not seen; None: all are
    unseen: Tensor | None  # int64: the same as rows of the gathered tokens


@dataclass(frozen=True)
class _Stretch:
    """Several queries of one sequence."""

    first: int
    end: int
    blocks: Tensor  # int64 [n]: only those that the window reaches
    tokens: int  # number of tokens in these blocks
    seen: Tensor | None  # bool [queries, tokens]; None: causal from the first token on


@dataclass(frozen=True)
class _Split:
    decode_rows: Tensor  # int64: rows of q that are a sequence's only query
    pieces: list[_Pieces]
    owners: Tensor  # int64: the owners of all pieces, concatenated
    stretches: list[_Stretch]


def _split(batch: Batch, window: int) -> _Split:
    """Divide the sequences of a pass into decode rows, whose contexts are split into pieces, and stretches."""
    decoding, stretches = [], []
    for row in range(len(batch.contexts)):
        queries = batch.starts[row + 1] - batch.starts[row]
        if queries == 1:
            decoding.append(row)
        elif queries > 1:
            stretches.append(_stretch_of(batch, row, window))
    pieces = _split_pieces(batch, decoding, window)
    owners = torch.cat([group.owners for group in pieces]) if pieces else torch.empty(0, dtype=torch.int64)
    rows = torch.tensor([batch.starts[row] for row in decoding], dtype=torch.int64)
    return _Split(rows, pieces, owners, stretches)


def _split_pieces(batch: Batch, decoding: list[int], window: int) -> list[_Pieces]:
    size = batch.block_size
    blocks_each = max(1, PIECE_TOKENS // size)
    found: dict[int, list[tuple[int, Tensor, int, int]]] = defaultdict(list)
    for owner, row in enumerate(decoding):
        context = batch.contexts[row]
        oldest = max(0, context - window) if window else 0
        table, last = batch.block_tables[row], -(-context // size)
        for first in range(oldest // size, last, blocks_each):
            end = min(first + blocks_each, last)
            skipped, known = max(0, oldest - first * size), context - first * size
            found[end - first].append((owner, table[first:end], skipped, known))
    return [_group(pieces, blocks * size) for blocks, pieces in sorted(found.items())]


def _group(pieces: list[tuple[int, Tensor, int, int]], tokens: int) -> _Pieces:
    owners, blocks, skipped, known = zip(*pieces, strict=True)
    hidden = unseen = None
    if max(skipped) > 0 or min(known) < tokens:
        at = torch.arange(tokens)
        outside = (at < torch.tensor(skipped)[:, None]) | (at >= torch.tensor(known)[:, None])
        hidden = torch.zeros(len(pieces), tokens).masked_fill_(outside, float("-inf"))[:, None, None, :]
        unseen = outside.view(-1).nonzero().view(-1)
    return _Pieces(torch.tensor(owners, dtype=torch.int64), torch.cat(blocks), hidden, unseen)


def _gather(cache: Tensor, group: _Pieces) -> Tensor:
    """float32 [pieces, kv_heads, tokens, d]. Old values past a sequence's end may be NaN, which no mask can hide
    (0 × NaN is NaN), so they are overwritten in this copy."""
    _, _, kv_heads, head_dim = cache.shape
    rows = cache.index_select(0, group.blocks).view(-1, kv_heads, head_dim)
    if group.unseen is not None:
        rows.index_fill_(0, group.unseen, 0.0)
    return rows.view(len(group.owners), -1, kv_heads, head_dim).transpose(1, 2).float()


def _attend_pieces(q: Tensor, k_cache: Tensor, v_cache: Tensor, split: _Split, scale: float) -> Tensor:
    """q [rows, heads, d], one query each → float32 of the same shape."""
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    folded = q.float().view(rows, kv_heads, heads // kv_heads, head_dim)  # the heads of a group are its queries
    outs, sizes = [], []
    for group in split.pieces:
        pieces = len(group.owners)
        k, v = _gather(k_cache, group), _gather(v_cache, group)
        mask = None if group.hidden is None else group.hidden.expand(-1, 1, heads // kv_heads, -1)
        mine = folded.index_select(0, group.owners)
        out, lse = _attend_with_lse(mine, k, v, 0.0, False, attn_mask=mask, scale=scale)
        outs.append(out.reshape(pieces, heads, head_dim))
        sizes.append(lse.reshape(pieces, heads))
    return _join(torch.cat(outs), torch.cat(sizes), split.owners, rows)


def _join(outs: Tensor, sizes: Tensor, owners: Tensor, rows: int) -> Tensor:
    """The mean of each owner's pieces, weighted by the exponential of their log-sum-exp."""
    _, heads, head_dim = outs.shape
    largest = sizes.new_full((rows, heads), float("-inf"))
    largest.scatter_reduce_(0, owners[:, None].expand(-1, heads), sizes, "amax")
    weights = (sizes - largest.index_select(0, owners)).exp_()
    total = sizes.new_zeros(rows, heads).index_add_(0, owners, weights)
    mixed = outs.new_zeros(rows, heads, head_dim).index_add_(0, owners, outs * weights[..., None])
    return mixed.div_(total[..., None])


def _stretch_of(batch: Batch, row: int, window: int) -> _Stretch:
    first, end = batch.starts[row], batch.starts[row + 1]
    size, context, queries = batch.block_size, batch.contexts[row], end - first
    oldest = max(0, context - queries + 1 - window) if window else 0
    from_block = oldest // size
    blocks = batch.block_tables[row, from_block : -(-context // size)]
    tokens = context - from_block * size
    if queries == context and (window == 0 or window >= context):
        return _Stretch(first, end, blocks, tokens, None)
    query_at = torch.arange(tokens - queries, tokens)[:, None]
    key_at = torch.arange(tokens)[None, :]
    seen = key_at <= query_at
    if window:
        seen &= key_at > query_at - window
    return _Stretch(first, end, blocks, tokens, seen)


def _attend_stretch(q: Tensor, k_cache: Tensor, v_cache: Tensor, stretch: _Stretch, scale: float) -> Tensor:
    """q [queries, heads, d] → the same shape, in the type it was computed in."""
    compute = q.dtype if computes_natively(q.dtype) else torch.float32
    k = k_cache.index_select(0, stretch.blocks).flatten(0, 1)[: stretch.tokens].to(compute)
    v = v_cache.index_select(0, stretch.blocks).flatten(0, 1)[: stretch.tokens].to(compute)
    out = scaled_dot_product_attention(
        q.to(compute).transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=stretch.seen,
        is_causal=stretch.seen is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
