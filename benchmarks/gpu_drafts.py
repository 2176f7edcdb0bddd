"""Speculation on a GPU, from single kernels to the whole engine: where the time of a pass with drafts goes.

    python benchmarks/gpu_drafts.py [device] [kernels] [engine]

Random weights in the shape of Llama-8B, bfloat16, greedy. Needs a CUDA device; reads no model; takes about two minutes.

    device    a pass by rows × positions without the host: its graphs, replayed one after the other; with other choices
              of linear kernels beside those that are used
    kernels   the same, by kernel
    engine    output tok/s, off and with synthetic drafts, of 1, 8, 32 and 256 requests; tokens of a row and pass; how
              long the device computes a pass, and how long it waits for the next
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpu_verification import BLOCK, KIND, LLAMA_8B, check, plan_for

from shoal import kernels
from shoal.bench.throughput import run_throughput
from shoal.build import assemble, load
from shoal.config.engine import EngineConfig
from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.plan import RowStart
from shoal.kernels.triton import skinny
from shoal.models import Model, make_model, spec_from_config
from shoal.runner.cuda import CudaExecutor, head_lines
from shoal.runner.draws import draws_of
from shoal.runner.kvstore import KVStore
from shoal.runner.loader import dummy_weights
from shoal.runner.runner import Runner
from shoal.workload.lengths import Lengths, random_prompts

SHAPES = ((1, 1), (1, 5), (8, 1), (8, 5), (32, 1), (32, 5), (256, 1), (256, 2))
PROFILED = ((1, 1), (1, 5), (8, 1), (8, 5))
CONTEXT, REPLAYS, DRAFTS = 300, 30, 4
RUNS = ((1, 512, 6), (8, 256, 3), (32, 256, 2), (256, 128, 2))  # requests, output tokens, rounds
ShapeFor = Callable[[int, int, int], skinny.Shape | None]


# ---- passes without the host ----------------------------------------------------------------------------------------


class Device:
    """An executor whose rows have some past, so that a pass can be repeated."""

    def __init__(self, model: Model, most: int) -> None:
        each = -(-(CONTEXT + 32) // BLOCK)
        store = KVStore(model.spec, most * each, BLOCK, KIND, "cuda")
        self.executor = CudaExecutor(Runner(model, store, most, CONTEXT + 32, "cuda"), 2048, DRAFTS)
        greedy = SamplingParams(temperature=0.0)
        self._starting = tuple(
            RowStart(row, 1, (1,), 1, greedy, row, 0, frozenset(), tuple(range(row * each, (row + 1) * each)), False)
            for row in range(most)
        )

    def replays(self, rows: int, positions: int) -> Callable[[], None]:
        """Compute such a pass until its graphs are recorded; returns what replays them."""
        executor, plan = self.executor, plan_for(rows, positions, CONTEXT, self._starting)
        self._starting = ()
        for _ in range(3):
            executor.forward(plan)
            executor.sample(None)
            executor.result()
            plan = plan_for(rows, positions, CONTEXT, ())
        draws = draws_of(plan)
        shape, _ = executor._shape(plan, draws)
        head = ("head", head_lines(draws), None)

        def replay() -> None:
            for key in (shape, head):
                assert executor.graphs.run(key, missing)

        return replay

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self.executor.stream):
            yield

    def ms(self, rows: int, positions: int) -> float:
        replay, times = self.replays(rows, positions), []
        with self.on_stream():
            for _ in range(5):
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                for _ in range(REPLAYS):
                    replay()
                after.record()
                after.synchronize()
                times.append(before.elapsed_time(after) / REPLAYS)
        return statistics.median(times)


def missing() -> None:
    raise AssertionError("a graph was not recorded")


def always_blas(rows: int, inputs: int, outputs: int) -> skinny.Shape | None:
    return None if rows > 1 else USED(rows, inputs, outputs)


def always_triton(rows: int, inputs: int, outputs: int) -> skinny.Shape | None:
    """Of few rows: every kernel may then be launched before the one before it ends, which cuBLAS's are not."""
    used = USED(rows, inputs, outputs)
    return skinny.Shape(16, 32, 128, 1, 4, 5) if used is None and rows <= 16 else used


def wide_triton(rows: int, inputs: int, outputs: int) -> skinny.Shape | None:
    """Also of as many rows as eight requests with four drafts have."""
    used = always_triton(rows, inputs, outputs)
    return skinny.Shape(64, 64, 64, 1, 4, 4) if used is None and rows <= 64 else used


USED: ShapeFor = skinny.shape_for
CHOICES: dict[str, ShapeFor] = {"used": USED, "blas": always_blas, "triton": always_triton, "wide": wide_triton}


def time_device(model: Model) -> None:
    print(f"device: ms of a pass by rows x positions, context {CONTEXT}, by choice of linear kernels", flush=True)
    print("            " + "".join(f"{name:>9}" for name in CHOICES), flush=True)
    lines = {shape: f"{shape[0]:>5} x {shape[1]:<3} " for shape in SHAPES}
    for name, shape_for in CHOICES.items():
        skinny.shape_for = shape_for
        device = Device(model, max(rows for rows, _ in SHAPES))
        for shape in SHAPES:
            few = shape[0] * shape[1] <= 64
            lines[shape] += f"{device.ms(*shape):9.3f}" if few or name == "used" else f"{'':9}"
        device.executor.close()
    skinny.shape_for = USED
    print("\n".join(lines.values()), flush=True)


def profile_kernels(model: Model) -> None:
    device = Device(model, max(rows for rows, _ in PROFILED))
    for rows, positions in PROFILED:
        replay = device.replays(rows, positions)
        with device.on_stream(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(REPLAYS):
                replay()
            device.executor.stream.synchronize()
        print(f"kernels of {rows} x {positions}: µs of a pass, launches, name", flush=True)
        events = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
        for one in events[:12]:
            print(f"{one.self_device_time_total / REPLAYS:9.1f} {one.count / REPLAYS:5.0f}  {one.key[:80]}", flush=True)
    device.executor.close()


# ---- the engine -----------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """The passes of decodes: how long the device computed, and the time from one commit to the next."""

    rows: int
    busy_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    last_s: float = 0.0

    def see(self, events: PassEvents) -> None:
        if len(events.scheduled_ids) == self.rows and events.computed_tokens <= self.rows * (DRAFTS + 1):
            if self.last_s:
                self.took_s.append(events.committed_s - self.last_s)
                self.busy_s.append(events.busy_s)
                self.tokens.append(len(events.tokens) / self.rows)
            self.last_s = events.committed_s
        else:
            self.last_s = 0.0


def time_engine() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        settings = {
            "model": folder, "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "prefix_caching": False,
            "max_num_seqs": 256, "kv_memory": "16GiB", "draft_tokens": DRAFTS,
        }  # fmt: skip
        loaded = load(EngineConfig.from_mapping(settings))
        table = []
        best: dict[int, float] = {}
        for speculate in ("off", "synthetic:0.7"):
            built = assemble(loaded, EngineConfig.from_mapping({**settings, "speculate": speculate}))
            for rows, output, rounds in RUNS:
                lengths = [Lengths(128, output)] * rows
                prompts = random_prompts(lengths, loaded.spec.vocab_size)
                rates, tokens = [], []
                for number in range(rounds + 1):
                    watch = Watch(rows)
                    run = run_throughput(
                        built.loop, lengths, prompts, False, f"{rows}/{number} ", watch.see, speculate=speculate,
                        first_seed=number * rows,  # other coins in every round
                    )  # fmt: skip
                    if number:  # the first is a warm-up
                        rates.append(run.output_tok_s)
                        tokens.append(statistics.mean(watch.tokens))
                rate = len(rates) / sum(1 / one for one in rates)  # over all rounds together
                ratio = rate / best.setdefault(rows, rate)
                busy, took = statistics.median(watch.busy_s) * 1000, statistics.median(watch.took_s) * 1000
                each = statistics.mean(tokens)
                table.append(
                    f"{rows:>5} {speculate:>14} {rate:>10,.1f} {ratio:6.2f} {each:10.2f} {busy:8.2f} {took:8.2f}"
                )
                print(table[-1], flush=True)
            built.loop.close()
    print("\nengine: requests, speculate, tok/s, ratio, tokens per row and pass, ms busy, ms from commit to commit")
    print("\n".join(table), flush=True)


if __name__ == "__main__":
    asked = sys.argv[1:] or ["device", "kernels", "engine"]
    with torch.inference_mode():
        check()
        if {"device", "kernels"} & set(asked):
            spec = spec_from_config(LLAMA_8B)
            params, ops = dummy_weights(spec, KIND, "cuda"), kernels.pick("cuda")
            params.convert(ops.prepare)
            llama = make_model(spec, params, ops)
            if "device" in asked:
                time_device(llama)
            if "kernels" in asked:
                profile_kernels(llama)
            del llama, params
            torch.cuda.empty_cache()
    if "engine" in asked:
        time_engine()
