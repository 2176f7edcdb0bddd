"""The plain-torch meaning of every kernel. Other implementations are compared with this one.

Owns correctness, not speed: one sequence at a time, float32 inside, masks written out. Runs on any device.
Does not know models or schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from shoal.core.plan import Ints
from shoal.core.ports import LateMasks
from shoal.kernels import composed, fp8
from shoal.kernels.draw_table import KEY, PARAMETERS, ROW, SECOND_KEY, TEMPERATURE, SamplingState
from shoal.kernels.noise import draw_keys, gumbel
from shoal.kernels.ops import Batch, FusedLayers, PassOps
from shoal.kernels.padded import padded_attention
from shoal.kernels.weights import Fp8Weight, Weight, matrix


class RefOps:
    """Ops, written for clarity."""

    def prepare(self, weight: Weight) -> Weight:
        """As it is."""
        return weight

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight, in its own type."""
        return weight.rows(ids)

    def fused(self, layers: Sequence[Any]) -> FusedLayers | None:
        """Not offered."""
        return None

    def choose(
        self,
        scores: Tensor,
        rows: Ints,
        positions: Ints,
        state: SamplingState,
        masks: LateMasks | None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Line by line: edits, mask, draw, count."""
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=scores.device)
        best = torch.zeros(len(rows), device=scores.device)
        masked = {} if masks is None else dict(zip(masks.lines.tolist(), masks.allowed, strict=True))
        drafts: list[int] = []  # of this row, before this line
        for line, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            edited = _edited(scores[line].float(), row, position, state, masked.get(line), drafts)
            keys = torch.from_numpy(draw_keys(state.seed[[row]], state.sample[[row]], positions[[line]]))
            draw = Draw(keys, **{name: getattr(state, name)[row].item() for name in PARAMETERS})
            tokens[line], best[line] = _choose(edited, draw)
            drafts = [*drafts, int(expected[line])] if expected is not None and expected[line] >= 0 else []
        _count(state, rows, tokens, expected)
        return tokens, best

    @property
    def pass_ops(self) -> PassOps | None:
        """Nothing is recorded."""
        return None

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, in x's type; on a CPU, 16-bit types and types that differ are computed in float32.

        For an fp8 weight, x is rounded to fp8 with a scale per row; the products of these bytes are added in float32.
        """
        if isinstance(weight, Fp8Weight):
            return _fp8_linear(x, weight, bias)
        values = matrix(weight, x.dtype)
        if x.device.type == "cpu" and not x.dtype == values.dtype == torch.float32:
            wide_bias = None if bias is None else bias.float()
            return linear(x.float(), values.float(), wide_bias).to(x.dtype)
        return linear(x, values, None if bias is None else bias.to(x.dtype))

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        """x Wᵀ + b, then the residual."""
        return self.linear(x, weight, bias) + residual

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / √(mean of x² + eps), then times weight."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(left half) × right half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Each pair (i, i + d/2) rotated by its angle, in float32."""
        half = q.shape[-1] // 2
        cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()

        def rotated(x: Tensor) -> Tensor:
            left, right = x.float().chunk(2, dim=-1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

        return rotated(q), rotated(k)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """One row of the flattened cache per token; none for a slot below 0."""
        real = slots >= 0
        for x, cache in ((k, k_cache), (v, v_cache)):
            if cache.dtype == fp8.FP8:
                fp8.store(x[real], cache, slots[real])
            else:
                cache.view(-1, *x.shape[1:])[slots[real]] = x[real].to(cache.dtype)

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """Norm, rotate, store."""
        return composed.rotate_and_store(self, qkv, norms, rope, cache, slots)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """Sequence by sequence: gather its blocks, mask, softmax."""
        if batch.width:
            return padded_attention(q, k_cache, v_cache, batch, scale, window)
        out = torch.zeros_like(q)
        for row, context in enumerate(batch.contexts):
            first, end = batch.starts[row], batch.starts[row + 1]
            blocks = batch.block_tables[row, : -(-context // batch.block_size)]
            k = fp8.gathered(k_cache, blocks, torch.float32).flatten(0, 1)[:context]
            v = fp8.gathered(v_cache, blocks, torch.float32).flatten(0, 1)[:context]
            out[first:end] = _attend(q[first:end], k, v, scale, window).to(q.dtype)
        return out


def _fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    values, exponents = fp8.quantize_rows(x)
    out = linear(values.float(), weight.values.float()) * fp8.scales_of(exponents).unsqueeze(-1) * weight.scales
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """q [n, heads, d] are the last n positions of k and v [context, kv_heads, d]."""
    count, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    k = k.float().repeat_interleave(heads // kv_heads, dim=1)
    v = v.float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    query_at = torch.arange(context - count, context, device=q.device)[:, None]
    key_at = torch.arange(context, device=q.device)[None, :]
    seen = key_at <= query_at
    if window:
        seen &= key_at > query_at - window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


# ---- choosing tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One draw: the keys of its noise, and PARAMETERS."""

    keys: Tensor | None  # int32 [1, 2]; not needed at temperature 0
    temperature: float
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def _edited(
    scores: Tensor,
    row: int,
    position: int,
    state: SamplingState,
    allowed: npt.NDArray[np.uint32] | None,
    drafts: Sequence[int],
) -> Tensor:
    """One line of scores [vocab] after penalties, which count these drafts too, biases, forbidden ends and a mask of
    packed bits."""
    edited, slot = scores.clone(), int(state.penalty_slot[row])
    if slot >= 0:
        # tensors: CUDA divides by a Python number as it multiplies by the reciprocal, which rounds differently
        repetition = scores.new_tensor(state.repetition[row])
        seen, counts = state.seen[slot].clone(), state.counts[slot].clone()
        for token in drafts:
            seen[token] = True
            counts[token] += 1
        edited[seen] = torch.where(edited > 0, edited / repetition, edited * repetition)[seen]
        edited = edited - float(state.frequency[row]) * counts - float(state.presence[row]) * (counts > 0)
    bias = slice(state.bias_first[row], state.bias_first[row] + state.bias_count[row])
    for token, amount in zip(state.bias_ids[bias].tolist(), state.bias_amounts[bias].tolist(), strict=True):
        edited[token] += amount
    if allowed is None and position < state.first_free_end[row]:
        ends = slice(state.ends_first[row], state.ends_first[row] + state.ends_count[row])
        edited[state.ends_ids[ends].tolist()] = -torch.inf
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), count=len(scores), bitorder="little").astype(np.bool_)
        edited[torch.from_numpy(~bits).to(scores.device)] = -torch.inf
    return edited


def _count(state: SamplingState, rows: Ints, tokens: Tensor, expected: Ints | None) -> None:
    """Add the chosen tokens to what the rows' penalties count, up to each row's first that is not its draft."""
    rejected = False
    for line, (slot, token) in enumerate(zip(state.penalty_slot[rows].tolist(), tokens.tolist(), strict=True)):
        if slot >= 0 and not rejected:
            state.seen[slot, token] = True
            state.counts[slot, token] += 1
        if expected is not None:
            rejected = bool(expected[line] >= 0) and (rejected or expected[line] != token)


def _choose(scores: Tensor, draw: Draw) -> tuple[int, Tensor]:
    """(token, best score) of one line of edited scores.

    Every filter is a bound on the scores: equal ones are kept or lost together. The best is always kept.
    """
    numbers = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = numbers.max()
    if draw.temperature == 0 or not bool(best.isfinite()):
        return int((numbers == best).nonzero()[0]), best
    assert draw.keys is not None
    scaled = (scores - best) / scores.new_tensor(draw.temperature)
    least = _bound(scaled, draw.top_k, draw.top_p)
    least = torch.maximum(least, torch.log(scores.new_tensor(draw.min_p)))
    ids = torch.arange(len(scores), dtype=torch.int32, device=scores.device)
    noisy = scaled + gumbel(draw.keys.to(scores.device), ids)[0]
    return int(noisy.masked_fill((scaled < least) & (scores < best), -torch.inf).argmax()), best


def _bound(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """The lowest score that top_k and then top_p leave; -infinity where they ask for nothing."""
    ordered = scaled.sort(descending=True).values
    least = ordered.new_tensor(-torch.inf)
    if top_k > 0:
        least = ordered[min(top_k, len(ordered)) - 1]
        ordered = ordered[ordered >= least]
    if top_p < 1:
        reached = ordered.softmax(dim=0).cumsum(dim=0)
        least = ordered[int((reached < top_p).sum().clamp(max=len(ordered) - 1))]
    return least


def likeliest(scores: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
    """As PassOps.likeliest."""
    for line, row in enumerate(rows.tolist()):
        token, best[line] = _choose(scores[line].float(), Draw(None, temperature=0.0))
        _store(token, row, line, last_token, out)


def draw(scores: Tensor, table: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
    """As PassOps.draw."""
    floats = table.view(torch.float32)
    for line, row in enumerate(table[ROW].tolist()):
        parameters: dict[str, Any] = {
            name: (floats if dtype is np.float32 else table)[column, line].item()
            for column, (name, dtype) in enumerate(PARAMETERS.items(), start=TEMPERATURE)
        }
        one = Draw(table[[KEY, SECOND_KEY], line].unsqueeze(0), **parameters)
        token, best[line] = _choose(scores[line].float(), one)
        _store(token, row, line, last_token, out)


def _store(token: int, row: int, line: int, last_token: Tensor, out: Tensor) -> None:
    out[line] = token
    if row >= 0:
        last_token[row] = token
