"""What a built engine's passes cost, and the rates of its device, for utilisation.

Owns how both follow from the model and the device. Knows the engine as build.py made it; measures in idle moments.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain

from shoal.build import Built
from shoal.build_types import kv_dtype
from shoal.core.work import DeviceRates, ModelWork
from shoal.kernels.rates import measuring
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
    weight_bytes = 1 if config.quantization != "none" else built.dtype.itemsize
    return model_work(built.spec, weight_bytes, kv_bytes)


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
