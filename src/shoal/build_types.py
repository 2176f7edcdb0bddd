"""Wiring of types: what weights and KV are kept in, what is computed in, and which kernels do it.

Refuses types that the device, the ranks or the kernels cannot compute. Part of the wiring, as build.py is: knows
configs and formats of checkpoints; does not read files.
"""

import logging
from dataclasses import replace

import torch

from shoal import kernels
from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig
from shoal.kernels.fp8 import FP8
from shoal.kernels.weights import Parameters
from shoal.models.formats import CheckpointFormat
from shoal.runner.int4 import AsInt4, BlockFile, int4_source, to_int4
from shoal.runner.loader import KeptFormat, NoneKept, WeightReader, to_fp8, to_int8
from shoal.runner.quantized import NOT_IN_FP8, AsFp8

log = logging.getLogger(__name__)
BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.625}  # of a weight, scales included


def check_kernels(config: EngineConfig, device: str) -> None:
    """Raise BadConfig if the device has no kernels for what is asked for."""
    check_quantization(config, device)
    check_batch_invariant(config, device)


def check_quantization(config: EngineConfig, device: str) -> None:
    """Raise BadConfig if the weights of the model or of the draft model are to be of a type that the device lacks."""
    for flag, kind in (("quantization", config.quantization), ("draft_quantization", config.draft_quantization)):
        if kind == "int8" and device != "cpu":
            instead = "leave it out" if flag.startswith("draft") else "use --quantization fp8"
            raise BadConfig(f"{flag} int8 works on CPUs only; {instead} on a GPU, or use --device cpu")


def check_batch_invariant(config: EngineConfig, device: str) -> None:
    """Raise BadConfig if the device has no kernels with a fixed order of sums for what is asked for."""
    if config.batch_invariant and config.quantization == "int4" and device != "cpu":
        raise BadConfig(
            "batch_invariant with quantization=int4: on a GPU, products in 4 bits add in an order that depends on the "
            "batch; leave one of them out"
        )
    if config.batch_invariant and device == "cpu" and "fp8" in (config.quantization, config.kv_dtype):
        raise BadConfig(
            "batch_invariant with fp8: a CPU computes that by plain torch, which adds in an order that depends on the "
            "batch; leave one of them out"
        )


def as_stored(config: EngineConfig, form: CheckpointFormat | None, device: str) -> EngineConfig:
    """The config for a checkpoint in this format: on a GPU, matrices in fp8 stay so. CPUs have no kernels for fp8, and
    there they become numbers of the model's type."""
    if form is None or form.kind != "fp8" or device == "cpu":
        return config
    if config.tensor_parallel_size > 1:
        raise BadConfig(
            f"the checkpoint is in FP8, and tensor_parallel_size is {config.tensor_parallel_size}: fp8 kernels do not "
            "add up over ranks; use one process, or the unquantized weights"
        )
    return replace(config, quantization="fp8")


def fitting_fp8(config: EngineConfig, dtype: torch.dtype, device: str) -> torch.dtype:
    """The type to compute in; raises BadConfig if fp8 kernels do not compute in the one that was asked for."""
    if device == "cpu" or "fp8" not in (config.quantization, config.kv_dtype):
        return dtype
    if config.dtype == "auto" and dtype != torch.bfloat16:
        log.info("computing in bfloat16, because fp8 kernels do")
        return torch.bfloat16
    if dtype == torch.float16:  # whose range is too small for sums of products
        flag = "--quantization fp8" if config.quantization == "fp8" else "--kv-dtype fp8"
        raise BadConfig(f"{flag} computes in bfloat16 on a GPU, not in float16; use --dtype bfloat16")
    return dtype


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type that the model's keys and values are kept in; dtype: what it computes in, and what a draft model keeps
    its own in."""
    return FP8 if config.kv_dtype == "fp8" else dtype


def kept_format(
    config: EngineConfig, reader: WeightReader, file: BlockFile | None, model: str, device: str
) -> KeptFormat:
    """Which matrices of a checkpoint are kept in a format of their own; file: if it is one of blocks. Raises BadConfig
    if there are to be some and there are none."""
    if config.quantization == "fp8":
        return AsFp8(reader, device)
    return AsInt4(int4_source(reader, file, model), device) if config.quantization == "int4" else NoneKept()


def quantize_rest(config: EngineConfig, params: Parameters) -> None:
    """Quantise what is not kept as it was stored. In 4 bits only random weights are: rounding real ones to the nearest
    costs more accuracy than files in 4 bits do."""
    if config.quantization == "int8":
        params.convert(to_int8)
    elif config.quantization == "fp8":
        params.convert(to_fp8, but=NOT_IN_FP8)
    elif config.quantization == "int4" and config.load_format == "dummy":
        params.convert(to_int4, but=NOT_IN_FP8)


def weight_bytes(config: EngineConfig, dtype: torch.dtype) -> float:
    """Of one weight, in products."""
    return BYTES.get(config.quantization, dtype.itemsize)


def pick_ops(config: EngineConfig, device: str) -> kernels.Ops:
    """The kernels of the device. There are none for fp8 on CPUs, where its plain meaning is computed instead."""
    if device != "cpu" or "fp8" not in (config.quantization, config.kv_dtype):
        return kernels.pick(device, config.cpu_kernels, config.batch_invariant)
    log.warning("fp8 on a CPU is computed by plain torch, which is good for measuring accuracy only: it is slow; "
                "--quantization int8 is fast on CPUs")  # fmt: skip
    return kernels.plain()
