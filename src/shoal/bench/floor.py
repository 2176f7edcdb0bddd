"""The floor: a lower bound on any engine's time on this machine, from rates measured on it in the same run.

    floor = linear FLOP of the prompts, and their attention, over the matrix rate
          + for each of the fewest possible decode passes: weight bytes over bandwidth, or its FLOP where that is longer
          + every KV byte read once by every token that needs it, over bandwidth

The fewest passes are the longest output, or all output tokens over the slots, whichever is more. Prompts and decodes
are added up; an engine that overlaps weight reads with the prompts' products could be a little faster. Knows lengths
and sizes, no engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from shoal.core.work import DeviceRates
from shoal.kernels.rates import moving, multiplying, seconds
from shoal.models.spec import ModelSpec
from shoal.workload.lengths import Lengths


@dataclass(frozen=True)
class Machine:
    """Measured rates of this machine."""

    bandwidth_gb_s: float
    matrix_gflop_s: float

    @property
    def rates(self) -> DeviceRates:
        return DeviceRates(self.matrix_gflop_s * 1e9, self.bandwidth_gb_s * 1e9)


@dataclass(frozen=True)
class Floor:
    """Seconds by cause."""

    prompt_s: float
    weights_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        return self.prompt_s + self.weights_s + self.kv_s

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "total_s": self.total_s}


def measure(dtype: torch.dtype, device: str = "cpu", weight_bytes: int = 2**28) -> Machine:
    """Best of a few runs. A CPU reads a buffer as large as the weights; a GPU, which needs more work to reach its
    rates, copies 2 GiB (read and written) and multiplies larger matrices."""
    cpu = device == "cpu"
    moved, move = moving(device, max(weight_bytes, 2**26) if cpu else 2**31)
    move_s = _best(move, device, times=1 if cpu else 10)
    del move
    flop, multiply = multiplying(dtype, device, 1024 if cpu else 8192)
    multiply_s = _best(multiply, device, times=1 if cpu else 10)
    return Machine(moved / move_s / 1e9, flop / multiply_s / 1e9)


def _best(work: Callable[[], object], device: str, times: int, runs: int = 5) -> float:
    """Seconds for one call, of which `times` are made in a row."""
    return min([seconds(work, device, times, time.perf_counter) for _ in range(runs + 1)][1:])


def read_weights(spec: ModelSpec) -> int:
    """Weights that a pass must read; no pass reads all embeddings."""
    return (spec.linear_flop_per_token + spec.head_flop) // 2


def prompt_flop(lengths: Sequence[Lengths], spec: ModelSpec) -> int:
    """Linear layers and attention of all prompts, and the logits of their last positions."""
    prompts = sum(one.prompt for one in lengths)
    attention = sum(2 * one.prompt**2 for one in lengths) * spec.layers * spec.heads * spec.head_dim
    return prompts * spec.linear_flop_per_token + len(lengths) * spec.head_flop + attention


def prompts_s(lengths: Sequence[Lengths], spec: ModelSpec, itemsize: int, machine: Machine) -> float:
    """The least time until these prompts have their first tokens."""
    read_s = read_weights(spec) * itemsize / (machine.bandwidth_gb_s * 1e9)
    return max(prompt_flop(lengths, spec) / (machine.matrix_gflop_s * 1e9), read_s)


def decode_pass_s(batch: int, context: int, spec: ModelSpec, itemsize: int, machine: Machine) -> float:
    """The least time of one pass that decodes a token for each of `batch` sequences."""
    rate, bandwidth = machine.matrix_gflop_s * 1e9, machine.bandwidth_gb_s * 1e9
    multiply_s = batch * (spec.linear_flop_per_token + spec.head_flop) / rate
    weights_s = max(read_weights(spec) * itemsize / bandwidth, multiply_s)
    return weights_s + batch * context * spec.kv_values_per_token * itemsize / bandwidth


def floor(lengths: Sequence[Lengths], spec: ModelSpec, dtype: torch.dtype, slots: int, machine: Machine) -> Floor:
    """The floor for these requests, all present from the start."""
    rate, bandwidth = machine.matrix_gflop_s * 1e9, machine.bandwidth_gb_s * 1e9
    outputs = sum(one.output for one in lengths)
    passes = max(max(one.output for one in lengths) - 1, -(-(outputs - len(lengths)) // slots))
    decode_flop = (outputs - len(lengths)) * (spec.linear_flop_per_token + spec.head_flop)
    weight_bytes = read_weights(spec) * dtype.itemsize
    kv_tokens = sum((one.output - 1) * one.prompt + one.output * (one.output - 1) // 2 for one in lengths)
    kv_bytes = kv_tokens * spec.kv_values_per_token * dtype.itemsize
    return Floor(
        prompt_s=prompt_flop(lengths, spec) / rate,
        weights_s=max(passes * weight_bytes / bandwidth, decode_flop / rate),
        kv_s=kv_bytes / bandwidth,
    )
