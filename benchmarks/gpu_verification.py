"""What rows that verify drafts cost on a GPU: attention of few queries, linear layers of few lines, whole passes.

    python benchmarks/gpu_verification.py [attention] [linear] [passes]

Random weights in the shape of Llama-8B, bfloat16. Times are those of CUDA graphs over data that no cache holds; `try`
after a part also times other shapes of its kernels. Needs a CUDA device; reads no model.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from shoal import kernels
from shoal.core.params import SamplingParams
from shoal.core.plan import RowStart, StepPlan
from shoal.kernels.triton import attention, skinny
from shoal.kernels.triton.attention import DecodeShape
from shoal.models import make_model, spec_from_config
from shoal.runner.cuda import CudaExecutor
from shoal.runner.kvstore import KVStore
from shoal.runner.loader import dummy_weights
from shoal.runner.runner import Runner

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
KIND, HEADS, KV_HEADS, DIM, BLOCK = torch.bfloat16, 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
COPY_TBS = 4.24  # what copying reaches on an H200, in TB/s
BEYOND_CACHE = 2**28  # bytes that one graph reads, at least
BATCHES, CONTEXTS, POSITIONS = (1, 8, 64, 256), (800, 4000), (1, 2, 4, 5, 8, 9, 16)
LINEARS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
LINES = (1, 2, 5, 8, 9, 16, 24, 40, 64)
PASSES = (
    *((1, positions) for positions in (1, 2, 3, 5, 9, 16)), (8, 1), (8, 2), (8, 5), (32, 1), (32, 2), (32, 5), (64, 1),
    (64, 2), (256, 1), (256, 2),
)  # fmt: skip


def graph_us(launches: list[Callable[[], object]], rounds: int = 15) -> float:
    """Median over some replays of one graph of all launches, per launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        times = []
        for _ in range(rounds):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
    return statistics.median(times) / len(launches) * 1000


# ---- attention ------------------------------------------------------------------------------------------------------


class Past:
    """Shuffled blocks for `copies` times `rows` sequences, contexts within ±50% of the mean."""

    def __init__(self, rows: int, mean: int) -> None:
        source = np.random.default_rng(rows)
        self.rows = rows
        self.contexts = source.integers(mean // 2, mean * 3 // 2, rows) if rows > 1 else np.array([mean])
        self.read = int(self.contexts.sum()) * KV_HEADS * DIM * 2 * KIND.itemsize
        self.copies = max(1, -(-BEYOND_CACHE // self.read))
        widest = -(-(mean * 3 // 2 + 32) // BLOCK)
        blocks = self.copies * rows * widest
        tables = torch.randperm(blocks).to(torch.int32).reshape(self.copies, rows, widest)
        self.tables = tables.cuda()
        self.cache = torch.randn(2, blocks, BLOCK, KV_HEADS, DIM, device="cuda", dtype=KIND)
        self.arrived = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device="cuda")

    def launches(self, positions: int, queries: int, shape: DecodeShape) -> list[Callable[[], object]]:
        numbers = np.arange(self.rows)
        decodes = np.stack([numbers, self.contexts, numbers * positions, numbers * 0 + positions])
        decodes = np.pad(decodes, ((0, 0), (0, -self.rows % 4)))
        table = torch.from_numpy(decodes.astype(np.int32)).cuda()[:, : self.rows]
        q = torch.randn(self.rows * positions, HEADS, DIM, device="cuda", dtype=KIND)
        out = torch.empty_like(q)

        def launch(copy: int) -> Callable[[], object]:
            arguments = (q, self.cache[0], self.cache[1], self.tables[copy], table, out, self.arrived, DIM**-0.5, 0)
            return lambda: attention.decode(*arguments, shape, queries)

        return [launch(copy) for copy in range(self.copies)]


def other_shapes(base: DecodeShape) -> Iterator[DecodeShape]:
    for (tile, warps, stages), splits in product(
        ((64, 2, 3), (64, 4, 3), (64, 4, 2), (128, 4, 3), (128, 8, 3), (128, 8, 2)), sorted({1, 8, base.splits})
    ):
        yield DecodeShape(tile, warps, stages, splits, max(1, base.least * base.tile // tile))
    for warps, splits, least in product((2, 4), (8, 16, 32), (1, 2, 4)):  # how finely the past of few rows is split
        yield DecodeShape(64, warps, 3, splits, least)


def named(shape: DecodeShape) -> str:
    return f"{shape.tile}/{shape.warps}/{shape.stages}/{shape.splits}/{shape.least}"


def time_attention(tries: bool) -> None:
    few = attention.few_queries(GROUP, DIM, KIND)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"attention: µs (share of {COPY_TBS} TB/s), shape tile/warps/stages/splits/least; few {few}", flush=True)
    for batch, context in product(BATCHES, CONTEXTS):
        past = Past(batch, context)
        for positions in POSITIONS:
            queries = next(size for size in few if size >= positions)
            base = attention.decode_shape(batch, HEADS, KV_HEADS, DIM, False, False, processors, queries)
            shapes = [base, *other_shapes(base)] if tries and positions in (2, 5, 16) else [base]
            works = [past.launches(positions, queries, shape) for shape in shapes]
            usable = compiled([work[0] for work in works])
            times = [(graph_us(works[at]), at) for at in usable]
            us = times[0][0]
            share = past.read / us / COPY_TBS / 1e6
            text = f"{batch:>4} x {context:>5} {positions:>3} positions {us:8.1f} ({share:4.0%}) {named(base)}"
            if len(times) > 1:
                text += f"; best {min(times)[0]:.1f} {named(shapes[min(times)[1]])}"
            print(text, flush=True)


def compiled(launches: list[Callable[[], object]]) -> list[int]:
    """Compile them side by side; the indexes of those that fit on the device."""

    def attempt(at: int) -> int | None:
        try:
            launches[at]()
        except Exception as error:
            print(f"  left out: {str(error).splitlines()[0][:100]}")
            return None
        return at

    with ThreadPoolExecutor(16) as pool:
        found = [at for at in pool.map(attempt, range(len(launches))) if at is not None]
    torch.cuda.synchronize()
    return found


# ---- linear layers --------------------------------------------------------------------------------------------------


def few_row_shapes(rows: int) -> list[skinny.Shape]:
    room = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return [
        skinny.Shape(room, columns, tile, splits, warps, stages)
        for columns, tile, splits, warps, stages in (
            (16, 128, 1, 2, 6), (32, 128, 4, 4, 5), (32, 256, 1, 4, 4), (32, 128, 1, 4, 5), (64, 128, 1, 4, 4),
            (64, 128, 2, 4, 4), (64, 64, 4, 4, 5),
        )
    ]  # fmt: skip


def time_linear(tries: bool) -> None:
    print("linear: µs as chosen / cuBLAS", flush=True)
    for inputs, outputs in LINEARS:
        copies = max(1, -(-BEYOND_CACHE // (inputs * outputs * 2)))
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=KIND) for _ in range(copies)]
        for rows in LINES:
            x = torch.randn(rows, inputs, device="cuda", dtype=KIND)
            chosen = [lambda w=w, x=x: skinny.linear(x, w, None) for w in weights]
            blas = [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights]
            text = f"{inputs:>6} x {outputs:>6} {rows:>3} lines {graph_us(chosen):7.1f} / {graph_us(blas):7.1f}"
            if tries and rows in (2, 5, 8, 24, 40):
                shapes = [shape for shape in few_row_shapes(rows) if outputs // shape.columns <= skinny.MOST_GROUPS]
                works = [
                    [lambda w=w, x=x, shape=shape: skinny.few_rows(x, w, None, None, shape) for w in weights]
                    for shape in shapes
                ]
                best_us, best = min((graph_us(works[at]), at) for at in compiled([work[0] for work in works]))
                text += f"; best Triton {best_us:.1f} {shapes[best]}"
            print(text, flush=True)


# ---- whole passes ---------------------------------------------------------------------------------------------------


def plan_for(rows: int, positions: int, context: int, starting: tuple[RowStart, ...]) -> StepPlan:
    ones = np.ones(rows, dtype=np.int64)
    return StepPlan(
        0, starting, np.empty((0, 3), dtype=np.int64), np.arange(rows), ones, ones * context, ones * positions,
        ones * positions, np.arange(rows * positions) % 1000,
    )  # fmt: skip


def time_passes(context: int = 800, rounds: int = 40) -> None:
    """The device's time from the first copy to the last, and the host's time with nothing else to do."""
    spec = spec_from_config(LLAMA_8B)
    params, ops = dummy_weights(spec, KIND, "cuda"), kernels.pick("cuda")
    params.convert(ops.prepare)
    most = max(rows for rows, _ in PASSES)
    each = -(-(context + 32) // BLOCK)
    store = KVStore(spec, most * each, BLOCK, KIND, "cuda")
    executor = CudaExecutor(Runner(make_model(spec, params, ops), store, most, context + 32, "cuda"), 2048, 15)
    greedy = SamplingParams(temperature=0.0)
    begun = [
        RowStart(row, 1, (1,), 1, greedy, row, 0, frozenset(), tuple(range(row * each, (row + 1) * each)), False)
        for row in range(most)
    ]
    starting = tuple(begun)
    print("passes: rows x positions, ms on the device, ms for the host (one pass in flight)", flush=True)
    single: dict[int, float] = {}
    for rows, positions in PASSES:
        plan = plan_for(rows, positions, context, starting)
        starting = ()
        device_s, host_s = [], []
        for at in range(rounds):
            if at == 1:
                plan = plan._replace(starting=())
            begun_s = time.perf_counter()
            executor.forward(plan)
            executor.sample(None)
            result = executor.result()
            host_s.append(time.perf_counter() - begun_s)
            device_s.append(result.busy_s)
        ms, host = statistics.median(device_s[5:]) * 1000, statistics.median(host_s[5:]) * 1000
        single.setdefault(rows, ms)
        print(f"{rows:>4} x {positions:>2} {ms:8.3f} {host:8.3f}  {ms / single[rows]:5.2f} of one position", flush=True)
    executor.close()


def check() -> None:
    """The kernel against ref, before anything is timed."""
    from shoal.kernels import Batch
    from shoal.kernels.ref import RefOps

    torch.manual_seed(1)
    for kind, count in ((KIND, 5), (torch.float32, 9), (torch.float16, 16), (KIND, 2)):
        pasts = [0, 3, 63, 64, 700, 3000]
        widest, total = 3100 // BLOCK, len(pasts) * (3100 // BLOCK)
        tables = torch.randperm(total).reshape(len(pasts), widest).cuda()
        cache = torch.randn(2, total, BLOCK, KV_HEADS, DIM, device="cuda").to(kind)
        q = torch.randn(len(pasts) * count, HEADS, DIM, device="cuda").to(kind)
        none: Tensor = torch.empty(0)
        starts = [at * count for at in range(len(pasts) + 1)]
        batch = Batch(none, none, starts, [past + count for past in pasts], tables, BLOCK)
        there = replace(batch, block_tables=tables.to(torch.int32))
        for window in (0, 100):
            wanted = RefOps().attention(q, cache[0], cache[1], batch, DIM**-0.5, window).float()
            found = kernels.pick("cuda").attention(q, cache[0], cache[1], there, DIM**-0.5, window).float()
            error = float((found - wanted).norm() / wanted.norm())
            print(f"check {kind} {count} queries window {window}: {error:.1e}", flush=True)
            assert error < (2e-4 if kind is torch.float32 else 2e-2)


if __name__ == "__main__":
    asked = sys.argv[1:] or ["attention", "linear", "passes"]
    with torch.inference_mode():
        check()
        if "passes" in asked:
            time_passes()
        if "attention" in asked:
            time_attention("try" in asked)
        if "linear" in asked:
            time_linear("try" in asked)
