"""The C library's structs as ctypes classes, and a check that both sides agree on them.

Owns the mirrors; their fields are in the order of linear.c, layers.c and choose.c, SamplingState's own for the sampling
struct. Knows nothing of the fields' meaning. A library whose structs have other sizes is not used: it would read the
wrong fields without an error.
"""

import ctypes
from dataclasses import fields
from typing import Any

from shoal.kernels.draw_table import SamplingState

__all__ = ["ChoiceStruct", "LayerStruct", "MatrixStruct", "PassStruct", "SamplingStruct", "size_mismatch"]


def _structure(name: str, fields: dict[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _several(names: str, kind: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

MatrixStruct = _structure(
    "MatrixStruct",
    _several("weight bias scales offsets", _POINTER)
    | _several("inputs padded outputs group", _LONG)
    | _several("type bias_type tiled scale_type offset_type", _INT),
)
LayerStruct = _structure(
    "LayerStruct",
    _several("qkv out gate_up down", MatrixStruct)
    | _several("attention_norm mlp_norm q_norm k_norm keys values", _POINTER)
    | _several("heads kv_heads dim window", _LONG)
    | _several("eps scale", _FLOAT)
    | _several("norm_type cache_type", _INT),
)
PassStruct = _structure(
    "PassStruct",
    _several("residual normed qkv mixed gate_up inner cos sin slots tables starts contexts", _POINTER)
    | _several("tokens rope_stride table_width sequences block_size", _LONG)
    | {"threads": _INT},
)
SamplingStruct = _structure("SamplingStruct", {field.name: _POINTER for field in fields(SamplingState)})
ChoiceStruct = _structure(
    "ChoiceStruct", _several("state scores rows positions mask_of masks expected tokens best", _POINTER) | {"n": _LONG}
)
MIRRORED = (MatrixStruct, LayerStruct, PassStruct, SamplingStruct, ChoiceStruct)  # in the order of shoal_struct_size


def size_mismatch(calls: Any) -> str | None:
    """What differs between the library's structs and these; None: nothing."""
    for which, struct in enumerate(MIRRORED):
        here, there = ctypes.sizeof(struct), int(calls.shoal_struct_size(which))
        if here != there:
            return f"{struct.__name__} has {here} bytes in Python and {there} in C"
    more = int(calls.shoal_struct_size(len(MIRRORED)))
    return f"the library has a struct of {more} bytes that Python does not mirror" if more else None
