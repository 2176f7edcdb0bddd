"""Ops through the C library: one call for all layers of a pass (fused.py), or one per operation.

Owns the arguments of every call, and when plain torch is used instead (other types, the padded rectangle, odd head
sizes). Same meaning as ref within rounding; unlike with plain torch, no result depends on the other rows of the pass.
Does not know models.

Activations are float32 throughout, whatever type weights and KV have.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Ints
from shoal.core.ports import LateMasks
from shoal.kernels.block_weight import BlockWeight, PanelWeight, in_panels
from shoal.kernels.cpu.compiled import Library
from shoal.kernels.cpu.fused import INT8, MOST_DIM, NativeLayers, is_fusable, matrix_struct
from shoal.kernels.cpu.plain import CpuOps
from shoal.kernels.cpu.structs import ChoiceStruct, SamplingStruct
from shoal.kernels.draw_table import SamplingState
from shoal.kernels.ops import Batch, FusedLayers
from shoal.kernels.weights import (
    DenseWeight,
    Int8Weight,
    StoredWeight,
    TiledWeight,
    Weight,
    can_be_tiled,
    is_bfloat16,
)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _address(array: "np.ndarray[tuple[int, ...], np.dtype[Any]] | Tensor") -> int:
    if isinstance(array, Tensor):
        assert array.is_contiguous(), "C reads arrays from end to end"
        return array.data_ptr()
    assert array.flags.c_contiguous, "C reads arrays from end to end"
    return int(array.__array_interface__["data"][0])


class NativeOps(CpuOps):
    """Ops in C. Remembers the lengths of the last pass as C reads them."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self.calls = library.calls
        self.lanes = library.lanes
        self.types = dict(TYPES) if library.has_float16 else {t: n for t, n in TYPES.items() if t != torch.float16}
        self.widens = bool(self.calls.shoal_widens(TYPES[torch.bfloat16]))
        self._sampling: tuple[weakref.ref[SamplingState], Any] | None = None  # the state, and the same for C
        self._lengths: tuple[weakref.ref[Batch], Tensor, Tensor] | None = None

    def prepare(self, weight: Weight) -> Weight:
        """In huge pages; and tiled there, if this library reads such weights in tiles and they are whole ones. Blocks
        are put into panels. Numbers of 32 bits that are those of bfloat16 are kept in 16, if this library widens them
        exactly: no bit of a result differs, and half as many bytes are read."""
        if isinstance(weight, BlockWeight):
            weight = in_panels(weight, self.lanes, torch.float16 in self.types)
        if isinstance(weight, DenseWeight) and self.widens and is_bfloat16(weight.values):
            narrow = weight.values.to(torch.bfloat16)
            weight = DenseWeight(narrow) if can_be_tiled(narrow) else weight
        weight = super().prepare(weight)
        if isinstance(weight, Int8Weight) and isinstance(weight.stored, DenseWeight):
            return replace(weight, stored=self._tiled(weight.stored))
        return self._tiled(weight) if isinstance(weight, DenseWeight) else weight

    def _tiled(self, weight: DenseWeight) -> StoredWeight:
        values = weight.values
        kind = INT8 if values.dtype == torch.int8 else self.types.get(values.dtype)
        if kind is None or not self.calls.shoal_reads_tiles(kind) or not can_be_tiled(values):
            return weight
        row_bytes = values.shape[1] * values.element_size()
        if self.calls.shoal_tile(values.data_ptr(), values.shape[0], row_bytes, torch.get_num_threads()):
            raise MemoryError("no memory to tile the weights")
        return TiledWeight(values)

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight, in float32."""
        if isinstance(weight, Int8Weight):
            return self._embed8(ids, weight)
        if not isinstance(weight, StoredWeight) or weight.dtype not in self.types:
            return super().embed(ids, weight).float()
        values = weight.values
        out = torch.empty(len(ids), values.shape[1])
        failed = self.calls.shoal_embed(
            out.data_ptr(),
            values.data_ptr(),
            self.types[values.dtype],
            weight.tiled,
            ids.data_ptr(),
            len(ids),
            values.shape[1],
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for a row of the embedding")
        return out

    def _embed8(self, ids: Tensor, weight: Int8Weight) -> Tensor:
        out = torch.empty(len(ids), weight.inputs)
        failed = self.calls.shoal_embed8(
            out.data_ptr(),
            weight.stored.values.data_ptr(),
            weight.stored.tiled,
            weight.scales.data_ptr(),
            ids.data_ptr(),
            len(ids),
            weight.inputs,
            weight.stored.shape[1],
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for a row of the embedding")
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b."""
        return self._linear(x, weight, bias, None)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        """x Wᵀ + b + residual, in place."""
        return self._linear(x, weight, bias, residual)

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if x.dtype != torch.float32:
            wide = None if residual is None else residual.float()
            return self._linear(x.float(), weight, bias, wide).to(x.dtype)
        if isinstance(weight, Int8Weight):
            return self._linear8(x, weight, bias, residual)
        if isinstance(weight, PanelWeight):
            return self._linear_blocks(x, weight, bias, residual)
        kind, bias_kind = self.types.get(weight.dtype), 0 if bias is None else self.types.get(bias.dtype)
        known = kind is not None and bias_kind is not None
        if not known or not isinstance(weight, StoredWeight) or not weight.values.is_contiguous():
            plain = super().linear(x, weight, bias)
            return plain if residual is None else plain + residual
        x = x.contiguous()
        rows, inputs = x.shape
        outputs = weight.shape[0]
        out = torch.empty(rows, outputs) if residual is None else residual.contiguous()
        failed = self.calls.shoal_linear(
            out.data_ptr(),
            x.data_ptr(),
            weight.values.data_ptr(),
            kind,
            weight.tiled,
            None if bias is None else bias.data_ptr(),
            bias_kind,
            None if residual is None else out.data_ptr(),
            rows,
            inputs,
            outputs,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the inputs of a linear layer")
        return out

    def _linear8(self, x: Tensor, weight: Int8Weight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """x is rounded to 8 bits too, row by row."""
        x = x.contiguous()
        rows, outputs = x.shape[0], weight.shape[0]
        out = torch.empty(rows, outputs) if residual is None else residual.contiguous()
        failed = self.calls.shoal_linear8(
            out.data_ptr(),
            x.data_ptr(),
            weight.stored.values.data_ptr(),
            weight.stored.tiled,
            weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            0 if bias is None else self.types[bias.dtype],
            None if residual is None else out.data_ptr(),
            rows,
            weight.inputs,
            weight.stored.shape[1],
            outputs,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the 8-bit inputs of a linear layer")
        return out

    def _linear_blocks(self, x: Tensor, weight: PanelWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """x is rounded to 8 bits too, block by block."""
        matrix = matrix_struct(weight, bias, self.types)
        if matrix is None:
            plain = super().linear(x, weight, bias)
            return plain if residual is None else plain + residual
        x = x.contiguous()
        out = torch.empty(len(x), weight.shape[0]) if residual is None else residual.contiguous()
        added = None if residual is None else out.data_ptr()
        threads = torch.get_num_threads()
        if self.calls.shoal_linear_blocks(out.data_ptr(), x.data_ptr(), ctypes.byref(matrix), added, len(x), threads):
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
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """Norm, rotate, store; the queries are rotated in place."""
        cos, sin = rope
        keys, values = cache
        fits = qkv.dtype == torch.float32 and qkv.is_contiguous() and keys.dtype in self.types
        fits &= cos.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        fits &= keys.is_contiguous() and values.is_contiguous()
        fits &= norms is None or (norms[0].dtype == norms[1].dtype and norms[0].dtype in self.types)
        if not fits:
            return super().rotate_and_store(qkv, norms, rope, cache, slots)
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
        starts, contexts = self.lengths_of(batch)
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

    def fused(self, layers: Sequence[Any]) -> FusedLayers | None:
        """One call for the whole pass, if C knows the kind of every layer."""
        return NativeLayers(self, layers) if is_fusable(layers) else None

    def choose(
        self,
        scores: Tensor,
        rows: Ints,
        positions: Ints,
        state: SamplingState,
        masks: LateMasks | None,
        expected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All lines in one call."""
        scores = scores.float().contiguous()
        count, vocab = scores.shape
        assert state.seen.shape[1] == vocab, "the state is that of another vocabulary"
        tokens, best = torch.empty(count, dtype=torch.int64), torch.empty(count)
        rows, positions = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(positions, np.int64)
        choice = ChoiceStruct(
            state=self._sampling_of(state),
            scores=scores.data_ptr(),
            rows=_address(rows),
            positions=_address(positions),
            tokens=tokens.data_ptr(),
            best=best.data_ptr(),
            n=vocab,
        )
        if masks is not None:
            mask_of = np.full(count, -1, dtype=np.int64)
            mask_of[masks.lines] = np.arange(len(masks.lines))
            allowed = np.ascontiguousarray(masks.allowed)
            assert allowed.shape[1] == -(-vocab // 32), "the masks are those of another vocabulary"
            choice.mask_of, choice.masks = _address(mask_of), _address(allowed)
        if expected is not None:
            expected = np.ascontiguousarray(expected, np.int64)
            choice.expected = _address(expected)
        if self.calls.shoal_draw(ctypes.byref(choice), count, torch.get_num_threads()):
            raise MemoryError("no memory to choose tokens")
        return tokens, best

    def _sampling_of(self, state: SamplingState) -> int:
        """The address of the state as C reads it; its arrays stay where they are as long as the state exists."""
        last = self._sampling
        if last is None or last[0]() is not state:
            arrays = {field.name: getattr(state, field.name) for field in fields(state)}
            last = self._sampling = (weakref.ref(state), SamplingStruct(**{k: _address(v) for k, v in arrays.items()}))
        return ctypes.addressof(last[1])

    def lengths_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(starts, contexts) of the pass as C reads them."""
        last = self._lengths
        if last is None or last[0]() is not batch:
            starts, contexts = torch.tensor(batch.starts), torch.tensor(batch.contexts)
            last = self._lengths = (weakref.ref(batch), starts, contexts)
        return last[1], last[2]
