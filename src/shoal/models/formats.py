"""How a checkpoint stores its matrices, read from config.json's quantization_config.

Owns the meaning of its keys, and refuses what cannot be read. Knows no torch, tensors or files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import UnsupportedModel, shown

PACKED_BITS = 4


@dataclass(frozen=True)
class CheckpointFormat:
    """kind: fp8 (scales beside the matrices), awq or gptq (4-bit integers, eight in a word)."""

    kind: str
    block: tuple[int, int] = (0, 0)
    """fp8: outputs and inputs that share a scale; (0, 0): the shape of the scales tells."""
    group: int = 0
    """awq, gptq: inputs that share a scale; 0: all of them."""
    zeros_from: int = 0
    """awq, gptq: what is added to the zero points in the file."""


def checkpoint_format(config: Mapping[str, Any]) -> CheckpointFormat | None:
    """None: plain numbers.

    >>> checkpoint_format({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    CheckpointFormat(kind='fp8', block=(128, 128), group=0, zeros_from=0)
    """
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    given = config.get(key)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise _refused(f"{shown(given)} ({key})", "")
    method = given.get("quant_method")
    if method in ("awq", "gptq"):
        return _packed(given, str(method))
    if method in ("fp8", "fbgemm_fp8"):
        return CheckpointFormat("fp8", _block(given.get("weight_block_size")))
    if method == "modelopt" and str(given.get("quant_algo")).upper() == "FP8":
        return CheckpointFormat("fp8")
    if method == "compressed-tensors":
        return _compressed(given)
    raise _refused(f"{shown(method)} ({key})", "")


def _packed(given: Mapping[str, Any], method: str) -> CheckpointFormat:
    bits, group = given.get("bits", given.get("w_bit")), given.get("group_size", given.get("q_group_size", 128))
    if bits != PACKED_BITS:
        raise _refused(method, f" with {shown(bits)} bits; 4 bits are known")
    if isinstance(group, bool) or not isinstance(group, int) or not (group == -1 or 0 < group <= 2**20):
        raise _refused(method, f" with group_size {shown(group)}; a whole number is needed")
    version = str(given.get("version") or "gemm").lower()
    if method == "awq" and version != "gemm":
        raise _refused(method, f" version {shown(version)}; gemm is known")
    first = 1 if method == "gptq" and given.get("checkpoint_format") != "gptq_v2" else 0
    return CheckpointFormat(method, group=max(group, 0), zeros_from=first)


def _compressed(given: Mapping[str, Any]) -> CheckpointFormat:
    """All groups must be fp8; their scales may be per tensor, per channel or per block."""
    groups, block = given.get("config_groups"), (0, 0)
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("compressed-tensors", " without config_groups")
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        kind = {} if not isinstance(weights, Mapping) else weights
        if (kind.get("num_bits"), kind.get("type")) != (8, "float"):
            what = f"{shown(kind.get('num_bits'))} bits, {shown(kind.get('type'))}"
            raise _refused("compressed-tensors", f" of {what}; 8 bits, float are known")
        if kind.get("strategy") not in ("tensor", "channel", "block"):
            raise _refused("compressed-tensors", f" with scales per {shown(kind.get('strategy'))}")
        block = _block(kind.get("block_structure")) if kind["strategy"] == "block" else block
    return CheckpointFormat("fp8", block)


def _block(given: Any) -> tuple[int, int]:
    if given is None:
        return 0, 0
    if isinstance(given, str) and given.count("x") == 1:
        given = [int(part) if part.isdigit() else 0 for part in given.split("x")]
    whole = isinstance(given, list | tuple) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)
    if not whole:
        raise _refused("fp8", f" with blocks {shown(given)}; two sizes are needed")
    return given[0], given[1]


def _refused(what: str, detail: str) -> UnsupportedModel:
    known = "use the unquantized weights, FP8, AWQ or GPTQ weights, or a GGUF file"
    return UnsupportedModel(f"quantization {what}{detail} is not supported; {known}")
