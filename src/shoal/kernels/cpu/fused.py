"""All layers of a pass in one call of the C library.

Owns which layers C can compute and how they are passed to it. C knows one kind of layer: grouped-query attention, full
or windowed, then a gated MLP. Layers are recognised by KINDS and read by name, so that no model needs to be known here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.kernels.block_weight import PanelWeight
from shoal.kernels.cpu.structs import LayerStruct, MatrixStruct, PassStruct
from shoal.kernels.ops import Batch
from shoal.kernels.weights import Int8Weight, StoredWeight, Weight

KINDS = ("gqa", "gated")  # of attention and MLP
INT8, BLOCKS = 3, {4: 4, 8: 5}  # beside the types of NativeOps; blocks: of so many bits
MOST_DIM = 256  # of a head


class Native(Protocol):
    """What is needed of NativeOps."""

    calls: Any
    lanes: int
    types: dict[torch.dtype, int]

    def lengths_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(starts, contexts) as C reads them."""


class Projection(Protocol):
    """x Wᵀ + b."""

    @property
    def weight(self) -> Weight: ...
    @property
    def bias(self) -> Tensor | None: ...


class NativeLayers:
    """The layers of one model. Keeps them as C reads them, together with the addresses of the KV cache last used."""

    def __init__(self, ops: Native, layers: Sequence[Any]) -> None:
        self.ops, self.layers = ops, layers
        self._known: tuple[tuple[Any, ...], Any] | None = None  # addresses of the KV cache, layers as C reads them
        self._scratch = torch.empty(0)

    def __call__(
        self, residual: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """See FusedLayers. None for a padded rectangle, and for head sizes and types that C does not know."""
        # addresses, not the cache itself: an engine that is gone must not be kept in memory
        cache = (kv[0][0].shape, kv[0][0].dtype, *(tensor.data_ptr() for pair in kv for tensor in pair))
        if self._known is None or self._known[0] != cache:
            self._known = (cache, self._structs(kv))
        structs = self._known[1]
        fits = residual.dtype == torch.float32 and residual.is_contiguous() and rope[0].dtype == torch.float32
        if structs is None or batch.width or not fits:
            return None
        tokens = len(residual)
        cos, sin, tables = rope[0].contiguous(), rope[1].contiguous(), batch.block_tables.contiguous()
        starts, contexts = self.ops.lengths_of(batch)
        arguments = PassStruct(
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
        self._add_scratch(arguments, structs[0], tokens, residual.shape[1])
        if self.ops.calls.shoal_layers(structs, len(self.layers), ctypes.byref(arguments)):
            raise MemoryError("no memory for the layers of a pass")
        return residual

    def _add_scratch(self, arguments: Any, first: Any, tokens: int, hidden: int) -> None:
        """Memory for intermediate results: of one layer, since all have the same sizes."""
        sizes = {
            "normed": hidden,
            "qkv": first.qkv.outputs,
            "mixed": first.out.inputs,
            "gate_up": first.gate_up.outputs,
            "inner": first.down.inputs,
        }
        needed = tokens * sum(sizes.values())
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        address = self._scratch.data_ptr()
        for name, size in sizes.items():
            setattr(arguments, name, address)
            address += 4 * tokens * size

    def _structs(self, kv: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """All layers as C reads them; None if C cannot compute one of them."""
        structs = (LayerStruct * len(self.layers))()
        for struct, layer, (keys, values) in zip(structs, self.layers, kv, strict=True):
            if not self._fill(struct, layer, keys, values):
                return None
        return structs

    def _fill(self, struct: Any, layer: Any, keys: Tensor, values: Tensor) -> bool:
        types, attention, mlp = self.ops.types, layer.attention, layer.mlp
        kv_heads, dim = keys.shape[2:]
        if dim % self.ops.lanes or dim > MOST_DIM or keys.dtype not in types:
            return False
        norms = [attention.norm, mlp.norm, *(n for n in (attention.q_norm, attention.k_norm) if n is not None)]
        known = all(norm.dtype == norms[0].dtype and norm.dtype in types for norm in norms)
        if not known or not keys.is_contiguous() or not values.is_contiguous():
            return False
        linears = {"qkv": attention.qkv, "out": attention.out, "gate_up": mlp.gate_up, "down": mlp.out}
        for name, linear in linears.items():
            matrix = matrix_struct(linear.weight, linear.bias, types)
            if matrix is None:
                return False
            setattr(struct, name, matrix)
        struct.attention_norm, struct.mlp_norm = attention.norm.data_ptr(), mlp.norm.data_ptr()
        struct.q_norm, struct.k_norm = address(attention.q_norm), address(attention.k_norm)
        struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
        struct.heads, struct.kv_heads, struct.dim = struct.out.inputs // dim, kv_heads, dim
        struct.window, struct.eps, struct.scale = attention.window, layer.eps, attention.scale
        struct.norm_type, struct.cache_type = types[norms[0].dtype], types[keys.dtype]
        return True


def matrix_struct(weight: Weight, bias: Tensor | None, types: Mapping[torch.dtype, int]) -> Any:
    """A weight and its bias as C reads them. None: not of a format or type that C knows."""
    if bias is not None and bias.dtype not in types:
        return None
    found = MatrixStruct(bias=address(bias), bias_type=0 if bias is None else types[bias.dtype])
    found.outputs, found.inputs = weight.shape
    if isinstance(weight, PanelWeight):
        found.type, found.group, found.weight = BLOCKS[weight.bits], weight.group, weight.values.data_ptr()
        found.scales, found.scale_type = weight.scales.data_ptr(), types[weight.scales.dtype]
        if weight.offsets is not None:
            found.offsets, found.offset_type = weight.offsets.data_ptr(), types[weight.offsets.dtype]
        return found
    if isinstance(weight, Int8Weight):
        found.type, found.padded, found.scales = INT8, weight.stored.shape[1], weight.scales.data_ptr()
        found.weight, found.tiled = weight.stored.values.data_ptr(), weight.stored.tiled
        return found
    if not isinstance(weight, StoredWeight):
        return None
    if weight.dtype not in types or not weight.values.is_contiguous():
        return None
    found.type, found.weight, found.tiled = types[weight.dtype], weight.values.data_ptr(), weight.tiled
    return found


def is_fusable(layers: Sequence[Any]) -> bool:
    """Whether C knows the kind of every layer."""
    return bool(layers) and all((layer.attention.kind, layer.mlp.kind) == KINDS for layer in layers)


def address(tensor: Tensor | None) -> int | None:
    """For C: NULL for None."""
    return None if tensor is None else tensor.data_ptr()
