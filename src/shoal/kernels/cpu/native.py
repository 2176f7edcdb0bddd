"""Ops through the C library: one call per operation for the whole ragged batch.

Owns what is handed to C, and when plain torch must stand in (other types, the padded rectangle, odd head sizes). Same
meaning as ref within rounding; unlike plain torch, no result depends on who else is in the pass. Does not know models.

Activations are float32 throughout, whatever type weights and KV have.
"""

import weakref

import torch
from torch import Tensor

from shoal.kernels import Batch
from shoal.kernels.cpu.compiled import Library
from shoal.kernels.cpu.plain import CpuOps
from shoal.kernels.int8 import Int8Weight, Weight

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_DIM = 256


class NativeOps(CpuOps):
    """Ops in C. Remembers, for the last pass only, its lengths as C reads them."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self.calls = library.calls
        self.lanes = library.lanes
        self.types = dict(TYPES) if library.has_float16 else {t: n for t, n in TYPES.items() if t != torch.float16}
        self._lengths: tuple[weakref.ref[Batch], Tensor, Tensor] | None = None

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight, in float32."""
        if isinstance(weight, Int8Weight):
            return weight.rows(ids)
        if weight.dtype not in self.types:
            return super().embed(ids, weight).float()
        out = torch.empty(len(ids), weight.shape[1])
        kind = self.types[weight.dtype]
        self.calls.shoal_embed(out.data_ptr(), weight.data_ptr(), kind, ids.data_ptr(), len(ids), weight.shape[1])
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b."""
        return self._linear(x, weight, bias, None)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        """x Wᵀ + b + residual, in the residual's place."""
        return self._linear(x, weight, bias, residual)

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if x.dtype != torch.float32:
            wide = None if residual is None else residual.float()
            return self._linear(x.float(), weight, bias, wide).to(x.dtype)
        if isinstance(weight, Int8Weight):
            return self._linear8(x, weight, bias, residual)
        kind = self.types.get(weight.dtype)
        if kind is None or not weight.is_contiguous() or (bias is not None and bias.dtype != weight.dtype):
            plain = super().linear(x, weight, bias)
            return plain if residual is None else plain + residual
        x = x.contiguous()
        rows, inputs = x.shape
        outputs = weight.shape[0]
        out = torch.empty(rows, outputs) if residual is None else residual.contiguous()
        self.calls.shoal_linear(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            kind,
            None if bias is None else bias.data_ptr(),
            None if residual is None else out.data_ptr(),
            rows,
            inputs,
            outputs,
            torch.get_num_threads(),
        )
        return out

    def _linear8(self, x: Tensor, weight: Int8Weight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """x becomes bytes too, a row at a time."""
        x = x.contiguous()
        rows, outputs = x.shape[0], weight.shape[0]
        out = torch.empty(rows, outputs) if residual is None else residual.contiguous()
        failed = self.calls.shoal_linear8(
            out.data_ptr(),
            x.data_ptr(),
            weight.values.data_ptr(),
            weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            0 if bias is None else self.types[bias.dtype],
            None if residual is None else out.data_ptr(),
            rows,
            weight.inputs,
            weight.values.shape[1],
            outputs,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the 8-bit inputs of a linear layer")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / √(mean of x² + eps), then times weight."""
        if x.dtype != torch.float32 or weight.dtype not in self.types:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        n = x.shape[-1]
        kind, threads = self.types[weight.dtype], torch.get_num_threads()
        self.calls.shoal_rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), kind, x.numel() // n, n, eps, threads
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(left half) × right half."""
        if gate_up.dtype != torch.float32:
            return super().silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = torch.empty(rows, both // 2)
        self.calls.shoal_silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, both // 2, torch.get_num_threads())
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        turn: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """Norm, turn, store; the queries stay where they are."""
        cos, sin = turn
        keys, values = cache
        fits = qkv.dtype == torch.float32 and qkv.is_contiguous() and keys.dtype in self.types
        fits &= cos.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        fits &= keys.is_contiguous() and values.is_contiguous()
        fits &= norms is None or (norms[0].dtype == norms[1].dtype and norms[0].dtype in self.types)
        if not fits:
            return super().rotate_and_store(qkv, norms, turn, cache, slots)
        tokens, width = qkv.shape
        kv_heads, dim = keys.shape[2:]
        heads = width // dim - 2 * kv_heads
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        self.calls.shoal_rotate_store(
            qkv.data_ptr(),
            tokens,
            heads,
            kv_heads,
            dim,
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            0 if q_norm is None else self.types[q_norm.dtype],
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            keys.data_ptr(),
            values.data_ptr(),
            self.types[keys.dtype],
            slots.data_ptr(),
            torch.get_num_threads(),
        )
        return qkv[:, : heads * dim].view(tokens, heads, dim)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
        """The whole pass in one call."""
        if batch.width:
            return super().attention(q.to(k_cache.dtype), k_cache, v_cache, batch, scale, window).to(q.dtype)
        tokens, heads, dim = q.shape
        kv_heads = k_cache.shape[2]
        if dim % self.lanes or dim > MOST_DIM or k_cache.dtype not in self.types:
            return super().attention(q, k_cache, v_cache, batch, scale, window)
        if q.dtype != torch.float32:
            return self.attention(q.float(), k_cache, v_cache, batch, scale, window).to(q.dtype)
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        starts, contexts = self._lengths_of(batch)
        tables = batch.block_tables.contiguous()
        out = torch.empty(tokens, heads, dim)
        failed = self.calls.shoal_attention(
            out.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            self.types[k_cache.dtype],
            tables.data_ptr(),
            tables.shape[1],
            starts.data_ptr(),
            contexts.data_ptr(),
            len(contexts),
            heads,
            kv_heads,
            dim,
            batch.block_size,
            scale,
            window,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the partial results of attention")
        return out

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(largest, its place) of each row."""
        if scores.dtype != torch.float32 or not scores.is_contiguous():
            return super().best(scores)
        rows, n = scores.shape
        best, index = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self.calls.shoal_argmax(index.data_ptr(), best.data_ptr(), scores.data_ptr(), rows, n, torch.get_num_threads())
        return best, index

    def _lengths_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        last = self._lengths
        if last is None or last[0]() is not batch:
            starts, contexts = torch.tensor(batch.starts), torch.tensor(batch.contexts)
            last = self._lengths = (weakref.ref(batch), starts, contexts)
        return last[1], last[2]
