"""Ops through the C library: one call for all layers of a pass, or, where torch does a part, one per operation.

Owns what is handed to C, and when plain torch must stand in (other types, the padded rectangle, odd head sizes). Same
meaning as ref within rounding; unlike plain torch, no result depends on who else is in the pass. Does not know models.

Activations are float32 throughout, whatever type weights and KV have.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Ints
from shoal.core.ports import LateMasks
from shoal.kernels import Batch, Layer
from shoal.kernels.cpu.compiled import Library
from shoal.kernels.cpu.plain import CpuOps
from shoal.kernels.cpu.structs import ChoiceStruct, LayerStruct, MatrixStruct, PassStruct, SamplingStruct
from shoal.kernels.int8 import Int8Weight, Weight
from shoal.kernels.laid import LaidWeight, can_be_laid

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_DIM = 256
INT8 = 3


class SamplingState:
    """How the rows of a sampler choose their tokens: arrays as native.c names them, which must stay where they are."""

    def __init__(self, **arrays: "np.ndarray[tuple[int, ...], np.dtype[Any]]") -> None:
        self.arrays = arrays  # kept: C has their addresses only
        self.struct = SamplingStruct(**{name: _address(array) for name, array in arrays.items()})
        self.address = ctypes.addressof(self.struct)


def _address(array: "np.ndarray[tuple[int, ...], np.dtype[Any]]") -> int:
    assert array.flags.c_contiguous, "C reads arrays from end to end"
    return int(array.__array_interface__["data"][0])


def _values(weight: Tensor | LaidWeight) -> tuple[Tensor, bool]:
    """(where its numbers are, whether they are in tiles)."""
    return (weight, False) if isinstance(weight, Tensor) else (weight.values, True)


class NativeOps(CpuOps):
    """Ops in C. Remembers, for the last pass only, its lengths as C reads them."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self.calls = library.calls
        self.lanes = library.lanes
        self.types = dict(TYPES) if library.has_float16 else {t: n for t, n in TYPES.items() if t != torch.float16}
        self._known: tuple[Sequence[Layer], tuple[Any, ...], Any] | None = None  # layers and places of their KV, for C
        self._room = torch.empty(0)
        self._draw_room = torch.empty(0)
        self._lengths: tuple[weakref.ref[Batch], Tensor, Tensor] | None = None

    def arranged(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Matrices laid in tiles, where they are, if this library multiplies in tiles."""
        if not self.calls.shoal_has_tiles():
            return params
        found = dict(params)
        for name, values in params.items():
            if values.dtype not in (torch.bfloat16, torch.int8) or not can_be_laid(values):
                continue
            row_bytes = values.shape[1] * values.element_size()
            if self.calls.shoal_tile(values.data_ptr(), values.shape[0], row_bytes, torch.get_num_threads()):
                raise MemoryError("no memory to lay the weights in tiles")
            found[f"{name.removesuffix('.weight')}.laid"] = torch.tensor(1)
        return found

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight, in float32."""
        if isinstance(weight, Int8Weight):
            return self._embed8(ids, weight)
        values, laid = _values(weight)
        if values.dtype not in self.types:
            return super().embed(ids, weight).float()
        out = torch.empty(len(ids), values.shape[1])
        failed = self.calls.shoal_embed(
            out.data_ptr(),
            values.data_ptr(),
            self.types[values.dtype],
            laid,
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
            weight.values.data_ptr(),
            weight.laid,
            weight.scales.data_ptr(),
            ids.data_ptr(),
            len(ids),
            weight.inputs,
            weight.values.shape[1],
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for a row of the embedding")
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
        values, laid = _values(weight)
        kind = self.types.get(values.dtype)
        if kind is None or not values.is_contiguous() or (bias is not None and bias.dtype != values.dtype):
            plain = super().linear(x, weight, bias)
            return plain if residual is None else plain + residual
        x = x.contiguous()
        rows, inputs = x.shape
        outputs = values.shape[0]
        out = torch.empty(rows, outputs) if residual is None else residual.contiguous()
        failed = self.calls.shoal_linear(
            out.data_ptr(),
            x.data_ptr(),
            values.data_ptr(),
            kind,
            laid,
            None if bias is None else bias.data_ptr(),
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
        """x becomes bytes too, a row at a time."""
        x = x.contiguous()
        rows, outputs = x.shape[0], weight.shape[0]
        out = torch.empty(rows, outputs) if residual is None else residual.contiguous()
        failed = self.calls.shoal_linear8(
            out.data_ptr(),
            x.data_ptr(),
            weight.values.data_ptr(),
            weight.laid,
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

    def layers(
        self,
        layers: Sequence[Layer],
        residual: Tensor,
        turn: tuple[Tensor, Tensor],
        batch: Batch,
        kv: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The whole pass in one call, where all of it can be computed in C."""
        # pointers, not the cache itself: an engine that is gone must not be kept in memory
        places = (kv[0][0].shape, kv[0][0].dtype, *(tensor.data_ptr() for pair in kv for tensor in pair))
        if self._known is None or self._known[0] is not layers or self._known[1] != places:
            self._known = (layers, places, self._structs(layers, kv))
        structs = self._known[2]
        fits = residual.dtype == torch.float32 and residual.is_contiguous() and turn[0].dtype == torch.float32
        if structs is None or batch.width or not fits:
            return super().layers(layers, residual, turn, batch, kv)
        first, tokens = structs[0], len(residual)
        sizes = {
            "normed": residual.shape[1],
            "qkv": first.qkv.outputs,
            "mixed": first.out.inputs,
            "gate_up": first.gate_up.outputs,
            "inner": first.down.inputs,
        }
        needed = tokens * sum(sizes.values())
        if self._room.numel() < needed:
            self._room = torch.empty(needed)
        cos, sin, tables = turn[0].contiguous(), turn[1].contiguous(), batch.block_tables.contiguous()
        starts, contexts = self._lengths_of(batch)
        room = PassStruct(
            residual=residual.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=batch.slots.data_ptr(),
            tables=tables.data_ptr(),
            starts=starts.data_ptr(),
            contexts=contexts.data_ptr(),
            tokens=tokens,
            rope_stride=cos.shape[1],
            table_width=tables.shape[1],
            sequences=len(contexts),
            block_size=batch.block_size,
            threads=torch.get_num_threads(),
        )
        place = self._room.data_ptr()
        for name, size in sizes.items():
            setattr(room, name, place)
            place += 4 * tokens * size
        if self.calls.shoal_layers(structs, len(layers), ctypes.byref(room)):
            raise MemoryError("no memory for a pass")
        return residual

    def _structs(self, layers: Sequence[Layer], kv: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """All layers as C reads them; None where plain torch must do some of it."""
        keys = kv[0][0]
        kv_heads, dim = keys.shape[2:]
        if dim % self.lanes or dim > MOST_DIM or keys.dtype not in self.types:
            return None
        structs = (LayerStruct * len(layers))()
        for struct, layer, (keys, values) in zip(structs, layers, kv, strict=True):
            norms = [layer.attention_norm, layer.mlp_norm, *(n for n in (layer.q_norm, layer.k_norm) if n is not None)]
            matrices = {
                name: self._matrix(getattr(layer, name), getattr(layer, f"{name}_bias"))
                for name in ("qkv", "out", "gate_up", "down")
            }
            known = all(norm.dtype == norms[0].dtype and norm.dtype in self.types for norm in norms)
            if not known or not keys.is_contiguous() or not values.is_contiguous() or None in matrices.values():
                return None
            for name, matrix in matrices.items():
                setattr(struct, name, matrix)
            struct.attention_norm, struct.mlp_norm = layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()
            struct.q_norm = None if layer.q_norm is None else layer.q_norm.data_ptr()
            struct.k_norm = None if layer.k_norm is None else layer.k_norm.data_ptr()
            struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
            struct.heads, struct.kv_heads, struct.dim = struct.out.inputs // dim, kv_heads, dim
            struct.window, struct.eps, struct.scale = layer.window, layer.eps, layer.scale
            struct.norm_type, struct.cache_type = self.types[norms[0].dtype], self.types[keys.dtype]
        return structs

    def _matrix(self, weight: Weight, bias: Tensor | None) -> Any:
        """None: not of a type that C knows."""
        if bias is not None and bias.dtype not in self.types:
            return None
        found = MatrixStruct(bias=None if bias is None else bias.data_ptr())
        found.bias_type = 0 if bias is None else self.types[bias.dtype]
        found.outputs, found.inputs = weight.shape
        if isinstance(weight, Int8Weight):
            found.type, found.padded, found.scales = INT8, weight.values.shape[1], weight.scales.data_ptr()
            found.weight, found.tiled = weight.values.data_ptr(), weight.laid
            return found
        values, found.tiled = _values(weight)
        if values.dtype not in self.types or not values.is_contiguous():
            return None
        if bias is not None and bias.dtype != values.dtype:
            return None
        found.type, found.weight = self.types[values.dtype], values.data_ptr()
        return found

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(largest, its place) of each row."""
        if scores.dtype != torch.float32 or not scores.is_contiguous():
            return super().best(scores)
        rows, n = scores.shape
        best, index = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self.calls.shoal_argmax(index.data_ptr(), best.data_ptr(), scores.data_ptr(), rows, n, torch.get_num_threads())
        return best, index

    def choose(
        self, scores: Tensor, rows: Ints, positions: Ints, state: SamplingState, masks: LateMasks | None
    ) -> tuple[Tensor, Tensor]:
        """A token for each line of scores [n, vocab], and the best score of the line after all that changes it.

        Rows: of the state, whose counts go on with the tokens. Positions: those that the tokens will have.
        """
        scores = scores.float().contiguous()
        count, vocab = scores.shape
        assert state.arrays["seen"].shape[1] == vocab, "the state is that of another vocabulary"
        threads = torch.get_num_threads()
        tokens, best = torch.empty(count, dtype=torch.int64), torch.empty(count)
        rows, positions = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(positions, np.int64)
        choice = ChoiceStruct(
            state=state.address,
            scores=scores.data_ptr(),
            rows=_address(rows),
            positions=_address(positions),
            tokens=tokens.data_ptr(),
            best=best.data_ptr(),
            n=vocab,
        )
        if masks is not None:
            masked = np.isin(rows, masks.rows)
            mask_of = np.where(masked, np.cumsum(masked) - 1, -1)
            allowed = np.ascontiguousarray(masks.allowed)
            assert allowed.shape[1] == -(-vocab // 32), "the masks are those of another vocabulary"
            choice.mask_of, choice.masks = _address(mask_of), _address(allowed)
        self.calls.shoal_draw(ctypes.byref(choice), count, self._room_to_draw(vocab, threads), threads)
        return tokens, best

    def _room_to_draw(self, vocab: int, threads: int) -> int:
        needed = threads * self.calls.shoal_draw_room(vocab)
        if self._draw_room.numel() < needed:
            self._draw_room = torch.empty(needed)
        return self._draw_room.data_ptr()

    def _lengths_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        last = self._lengths
        if last is None or last[0]() is not batch:
            starts, contexts = torch.tensor(batch.starts), torch.tensor(batch.contexts)
            last = self._lengths = (weakref.ref(batch), starts, contexts)
        return last[1], last[2]
