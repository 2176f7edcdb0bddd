"""What a built engine's passes cost, the rates of its device, and what both are, for utilisation and calibration.

Owns how they follow from the model and the device. Knows the engine as build.py made it; measures in idle moments.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

import torch

from shoal.build import Built, whole_memory
from shoal.build_types import kv_dtype, weight_bytes
from shoal.config.engine import EngineConfig
from shoal.core.work import DeviceRates, ModelWork
from shoal.kernels.rates import measuring
from shoal.machine.names import cpu_name
from shoal.models.spec import ModelSpec
from shoal.runner.kvstore import bytes_per_block
from shoal.runner.threads import release_threads


def model_work(spec: ModelSpec, weight_bytes: float, kv_bytes: float) -> ModelWork:
    """`weight_bytes`: of one weight; `kv_bytes`: of one position."""
    return ModelWork(
        flop_position=spec.linear_flop_per_token,
        flop_line=spec.head_flop,
        flop_pair=4 * spec.layers * spec.heads * spec.head_dim,  # scores and sums, two FLOP each
        weight_bytes=(spec.linear_flop_per_token + spec.head_flop) // 2 * weight_bytes,
        kv_bytes=kv_bytes,
    )


def work_of(built: Built) -> ModelWork:
    size, config = built.config.block_size, built.config
    kv_bytes = bytes_per_block(built.spec, size, kv_dtype(config, built.dtype)) / size
    return model_work(built.spec, weight_bytes(config, built.dtype), kv_bytes)


def measure_when_idle(built: Built, tell: Callable[[DeviceRates], None]) -> None:
    """Have the loop measure the device's rates in idle moments, after what it does in them already."""
    ranks = built.ranks.size

    def tell_all(rates: DeviceRates) -> None:
        tell(DeviceRates(rates.flop_s * ranks, rates.bytes_s * ranks))

    built.loop.spare = chain(built.loop.spare or (), _measured(built, tell_all))


def _measured(built: Built, tell: Callable[[DeviceRates], None]) -> Iterator[None]:
    yield from measuring(built.dtype, built.device, time.perf_counter, tell)
    if built.device == "cpu":
        release_threads()  # of this thread, which computes nothing else


def describe(built: Built) -> dict[str, Any]:
    """The model, the device and the settings, as a profile has them; paths and texts are left out."""
    spec, config, size = built.spec, built.config, built.config.block_size
    kv_bytes = bytes_per_block(spec, size, kv_dtype(config, built.dtype)) // size
    default = EngineConfig()
    settings = {
        item.name: getattr(config, item.name)
        for item in fields(EngineConfig)
        if getattr(config, item.name) != getattr(default, item.name) and item.name not in ("model", "chat_template")
    }
    return {
        "model": {
            "name": built.files.name,
            "parameters": spec.parameters,
            "layers": spec.layers,
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "max_model_len": spec.max_position,
            "weight_bytes": spec.parameters * built.dtype.itemsize,
            "kv_token_bytes": kv_bytes,
            "hidden_size": spec.hidden_size,
        },
        "device": cpu_name() if built.device == "cpu" else str(torch.cuda.get_device_name()),
        "kind": built.device,
        "memory_bytes": whole_memory(built.device),
        "dtype": str(built.dtype).removeprefix("torch."),
        "depth": built.loop.depth,
        "kv_tokens": built.kv_blocks * size,
        "places": built.limits.max_num_seqs,
        "budget": built.limits.max_num_batched_tokens,
        "settings": settings,
    }
