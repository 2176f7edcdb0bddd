"""The plain-torch meaning of every kernel. Other implementations are compared with this one.

Owns correctness, not speed: one sequence at a time, float32 inside, masks written out. Runs on any device.
Does not know models or schedules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from shoal.kernels import composed
from shoal.kernels.noise import gumbel
from shoal.kernels.ops import Batch
from shoal.kernels.padded import padded_attention
from shoal.kernels.wants import KEY, MIN_P, ROW, SECOND_KEY, TEMPERATURE, TOP_K, TOP_P
from shoal.kernels.weights import Weight, matrix


class RefOps:
    """Ops, clearly."""

    def prepare(self, weight: Weight) -> Weight:
        """As it is."""
        return weight

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight, in its own type."""
        return weight.rows(ids)

    def fused(self, layers: Sequence[Any]) -> None:
        """Not offered."""

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Value and place."""
        values, places = scores.max(dim=-1)
        return values, places

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, in x's type; on a CPU, 16-bit types and types that differ go through float32."""
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
        k_cache.view(-1, *k.shape[1:])[slots[real]] = k[real].to(k_cache.dtype)
        v_cache.view(-1, *v.shape[1:])[slots[real]] = v[real].to(v_cache.dtype)

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
            k = k_cache[blocks].flatten(0, 1)[:context]
            v = v_cache[blocks].flatten(0, 1)[:context]
            out[first:end] = _attend(q[first:end], k, v, scale, window).to(q.dtype)
        return out


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


def likeliest(scores: Tensor, rows: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
    """Twin of the kernel of that name: the first of the highest of each line; infinity where there is NaN."""
    for line, row in enumerate(rows.tolist()):
        token, top = _highest(scores[line].float())
        _tell(token, row, line, last_token, out)
        best[line] = top


def draw(scores: Tensor, wants: Tensor, last_token: Tensor, out: Tensor, best: Tensor) -> None:
    """Twin of the kernel of that name: one token for each line of scores, as the table of wants.py asks.

    Sorted, and one line at a time. Every filter is a bound on the scores: equal ones are kept or lost together.
    """
    fractions = wants.view(torch.float32)
    for line, row in enumerate(wants[ROW].tolist()):
        given = scores[line].float()
        token, top = _highest(given)
        best[line] = top
        temperature = fractions[TEMPERATURE, line]
        if temperature > 0 and bool(top.isfinite()):
            scaled = (given - top) / temperature
            least = _bound(scaled, int(wants[TOP_K, line]), float(fractions[TOP_P, line]))
            least = torch.maximum(least, torch.log(fractions[MIN_P, line]))
            keys = wants[[KEY, SECOND_KEY], line].unsqueeze(0)
            ids = torch.arange(len(given), dtype=torch.int32, device=given.device)
            noisy = (scaled + gumbel(keys, ids)[0]).masked_fill((scaled < least) & (given < top), -torch.inf)
            token = int(noisy.argmax())
        _tell(token, row, line, last_token, out)


def _highest(scores: Tensor) -> tuple[int, Tensor]:
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return int((scores == scores.max()).nonzero()[0]), scores.max()


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


def _tell(token: int, row: int, line: int, last_token: Tensor, out: Tensor) -> None:
    out[line] = token
    if row >= 0:
        last_token[row] = token
