"""Are the C kernels right on this CPU, and how fast is each instruction set?

    python benchmarks/cpu_kernels.py [--threads 2] [--levels amx,avx512] [--json out.json]

First every usable level is compared with plain torch: linear layers in float64 on the same rounded numbers, attention
with the definition, and rows with the same rows beside others (bit by bit). Then two tables are printed:

- all linear layers of one pass (without the head), milliseconds, weights from memory as in a real pass: torch's
  F.linear in bfloat16 (float32 on a CPU without bfloat16 products), oneDNN on weights that it packed, and each
  level in bfloat16 and int8, with AMX also on tiled weights, as a model has them;
- attention of one layer, microseconds: decodes of 32 sequences of 250 tokens and of one of 1,000, and a prompt of 512.

Best of several rounds in one process, alternating. --threads N also binds the process to N cores.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HOPELESS_S = 0.4  # slower ones are not tried on more tokens
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FLAGS = (
    *("amx_tile", "amx_bf16", "amx_int8", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "fma", "f16c"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True)
class Shape:
    """Of a model: its layers' matrices as (outputs, inputs)."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        wide = self.heads * self.dim
        return [
            (wide + 2 * self.kv_heads * self.dim, self.hidden),
            (self.hidden, wide),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]


SHAPES = (
    Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64),
    Shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128),
)


def main() -> int:
    args = arguments()
    if args.threads:
        bind(args.threads)
    keep_memory()
    import torch

    from shoal.bench.cpu_noise import NoiseWatch, banner, noise_figures
    from shoal.kernels.cpu import Library, NativeOps, compiled, find

    torch.set_num_threads(args.threads or torch.get_num_threads())
    torch.manual_seed(0)
    features = compiled.cpu_features()
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "flags": [name for name in FLAGS if name in features],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "auto": str(find()),
        "levels": {},
    }
    for name, value in report.items():
        if value:
            print(f"{name:8}", " ".join(value) if isinstance(value, list) else value, flush=True)
    wanted = args.levels.split(",") if args.levels else compiled.usable_levels(features)
    usable: dict[str, NativeOps] = {}
    for level in wanted:
        found = find(level)
        if not isinstance(found, Library) or found.level != level:
            print(f"{level:8} cannot be used: {found}")
            continue
        usable[level] = NativeOps(found)
        with torch.inference_mode():
            wrong = check(usable[level])
        report["levels"][level] = {"bfloat16": found.bfloat16_products, "flags": found.flags, "wrong": wrong}
        print(f"{level:8} bfloat16 by {found.bfloat16_products}; {'; '.join(wrong) or 'right'}", flush=True)
    if not args.check:
        watch = NoiseWatch()
        with torch.inference_mode():
            report["linear"] = linear_table(usable, args)
            report["attention"] = attention_table(usable, args)
        report |= noise_figures(watch.noise())
        print(f"\n{banner([watch.noise()])}".rstrip())
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    return any(one["wrong"] for one in report["levels"].values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="number of threads, each bound to a core")
    parser.add_argument("--levels", help="instruction sets, comma-separated (default: all that this CPU has)")
    parser.add_argument("--seconds", type=float, default=40.0, help="most time for each table (default: 40)")
    parser.add_argument("--check", action="store_true", help="only compare, without measuring")
    parser.add_argument("--json", help="also write the report to this file")
    return parser.parse_args()


def bind(threads: int) -> None:
    """Before torch starts its threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def keep_memory() -> None:
    """Keep freed memory in the process, as in an engine: fresh pages would cost more than the sums."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for name, value in (
            (-3, 1 << 30),
            (-1, (1 << 31) - 1),
        ):  # mmap threshold, trim threshold
            library.mallopt(name, value)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


# ---------------------------------------------------------------- right?


def check(ops: Any) -> list[str]:
    """Descriptions of everything that is wrong."""
    return [f"{problem}" for test in (check_linear, check_company, check_attention) for problem in test(ops)]


def check_linear(ops: Any) -> Iterator[str]:
    """Against float64; sizes around every border of tile and vector."""
    import torch

    from shoal.kernels.weights import DenseWeight, quantize

    narrow = ops.library.bfloat16_products != "widened"
    for rows in (1, 2, 5, 15, 16, 17, 31, 32, 33, 70, 300):
        for outputs, inputs in ((960, 576), (50, 172), (7, 20), (64, 1536), (33, 64)):
            x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
            full, bias = torch.randn(outputs, inputs), torch.randn(outputs)
            for dtype in (torch.float32, torch.bfloat16):
                weight, extra = full.to(dtype), bias.to(dtype)
                seen = x.to(dtype) if narrow else x
                wanted = seen.double() @ weight.double().T + extra.double() + residual.double()
                found = ops.linear_add(x, DenseWeight(weight), extra, residual.clone())
                error = float((found.double() - wanted).abs().max())
                bound = 2e-6 * inputs  # of sums of so many products of about 1 in float32
                if not error <= bound:
                    yield f"linear {dtype} {rows}x{inputs}->{outputs}: error {error:.2e} above {bound:.2e}"
            small = quantize(full)
            wanted = x.double() @ small.dense().double().T + bias.double() + residual.double()
            found = ops.linear_add(x, small, bias, residual.clone())
            room = x.abs().amax(1, keepdim=True) / 254 * small.dense().abs().sum(1) * 1.01 + 1e-4
            if not ((found.double() - wanted).abs() <= room).all():
                yield f"linear int8 {rows}x{inputs}->{outputs}: inputs were rounded by more than half a step"


def check_company(ops: Any) -> Iterator[str]:
    """A row is bit-identical whatever the other rows and the number of threads."""
    import torch

    from shoal.kernels.weights import DenseWeight, quantize

    before = torch.get_num_threads()
    for inputs in (172, 576):
        x, full = torch.randn(140, inputs), torch.randn(200, inputs)
        for weight in (DenseWeight(full), DenseWeight(full.bfloat16()), quantize(full)):
            whole = ops.linear(x, weight, None)
            name = weight.dtype
            for first, end in ((0, 1), (3, 5), (7, 22), (20, 36), (30, 61), (11, 80)):
                if not torch.equal(ops.linear(x[first:end], weight, None), whole[first:end]):
                    yield f"linear {name} of {inputs}: rows {first} to {end} differ beside other rows"
            torch.set_num_threads(1)
            if not torch.equal(ops.linear(x, weight, None), whole):
                yield f"linear {name} of {inputs} differs with one thread"
            torch.set_num_threads(before)


def check_attention(ops: Any) -> Iterator[str]:
    import torch

    from shoal.kernels.ref import RefOps

    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for pieces in ([(249, 1), (0, 70), (500, 13), (0, 1)], [(700, 1)]):
                q, keys, values, batch = attention_case(shape, pieces, dtype)
                scale = shape.dim**-0.5
                wanted = RefOps().attention(q, keys.float(), values.float(), batch, scale, 0)
                error = float((ops.attention(q, keys, values, batch, scale, 0) - wanted).abs().max())
                bound = 1e-4 if dtype == torch.float32 else 3e-2
                if not error <= bound:
                    yield f"attention {shape.name} {dtype}: error {error:.2e} above {bound:.2e}"


def attention_case(shape: Shape, pieces: list[tuple[int, int]], dtype: Any) -> tuple[Any, ...]:
    """pieces: (tokens before, new tokens) of each sequence → queries, keys, values, batch."""
    import torch

    from shoal.kernels import Batch

    size = 16
    needed = [-(-(before + new) // size) for before, new in pieces]
    order = torch.randperm(sum(needed))
    tables = torch.zeros(len(pieces), max(needed), dtype=torch.int64)
    starts, contexts, slots, positions, used = [0], [], [], [], 0
    for row, (before, new) in enumerate(pieces):
        mine = order[used : used + needed[row]]
        used += needed[row]
        tables[row, : len(mine)] = mine
        places = torch.arange(before, before + new)
        positions.append(places)
        slots.append(mine[places // size] * size + places % size)
        starts.append(starts[-1] + new)
        contexts.append(before + new)
    batch = Batch(torch.cat(positions), torch.cat(slots), starts, contexts, tables, size)
    keys, values = torch.randn(2, used, size, shape.kv_heads, shape.dim).to(dtype)
    return torch.randn(starts[-1], shape.heads, shape.dim), keys, values, batch


# ---------------------------------------------------------------- fast?


def linear_table(usable: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    return {shape.name: linear_rows(shape, usable, args) for shape in SHAPES}


def linear_rows(shape: Shape, usable: dict[str, Any], args: argparse.Namespace) -> dict[str, dict[int, float]]:
    import torch

    weights = [[torch.randn(n, k).bfloat16() for n, k in shape.matrices] for _ in range(shape.layers)]
    ways = dict(linear_ways(shape, weights, usable))
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    total = sum(n * k for n, k in shape.matrices) * shape.layers
    print(f"\n{shape.name}: linear layers of a pass, {total / 1e6:.0f} million weights, ms")
    print(f"{'tokens':>7}" + "".join(f"{name:>15}" for name in ways), flush=True)
    each_s = args.seconds / len(SHAPES) / len(ROWS)
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k) for k in {k for _, k in shape.matrices}}
        take_turns({name: partial(way, inputs) for name, way in ways.items()}, rows, found, each_s)
        figures = [f"{found[name][rows] * 1e3:.2f}" if rows in found[name] else "" for name in found]
        print(f"{rows:>7}" + "".join(f"{figure:>15}" for figure in figures), flush=True)
        ways = {name: way for name, way in ways.items() if found[name][rows] < HOPELESS_S}
    return found


def take_turns(
    ways: dict[str, Callable[[], None]], key: Any, found: dict[str, dict[Any, float]], most_s: float
) -> None:
    """The best of each, alternating until time is up; at least once, and once before to warm up."""
    begun = time.perf_counter()
    for attempt in range(12):
        if attempt > 1 and time.perf_counter() - begun > most_s:
            return
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            took = time.perf_counter() - start
            if attempt:
                found[name][key] = min(took, found[name].get(key, math.inf))


def linear_ways(
    shape: Shape, weights: list[list[Any]], usable: dict[str, Any]
) -> Iterator[tuple[str, Callable[[dict[int, Any]], None]]]:
    """(name, a pass through all matrices)."""
    import torch

    from shoal.kernels.cpu import computes_natively
    from shoal.kernels.weights import DenseWeight, quantize

    natively = computes_natively(torch.bfloat16)
    known = weights if natively else [[weight.float() for weight in layer] for layer in weights]

    def plain(inputs: dict[int, Any]) -> None:
        narrow = {k: x.to(known[0][0].dtype) for k, x in inputs.items()}
        for layer in known:
            for weight in layer:
                torch.nn.functional.linear(narrow[weight.shape[1]], weight)

    yield "F.linear" if natively else "F.linear fp32", plain
    packed = onednn_weights(weights)
    if packed:
        product = torch.ops.mkldnn._linear_pointwise

        def onednn(inputs: dict[int, Any]) -> None:
            narrow = {k: x.bfloat16() for k, x in inputs.items()}
            for layer in packed:
                for (_, k), weight in zip(shape.matrices, layer, strict=True):
                    product(narrow[k], weight, None, "none", [], "")

        yield "oneDNN", onednn
    small = [[quantize(weight) for weight in layer] for layer in weights]
    dense = [[DenseWeight(weight) for weight in layer] for layer in weights]
    for level, ops in usable.items():
        for kind, those in (("bf16", dense), ("int8", small)):

            def ours(inputs: dict[int, Any], ops: Any = ops, those: Any = those) -> None:
                for layer in those:
                    for weight in layer:
                        ops.linear(inputs[weight.shape[1]], weight, None)

            yield f"{level} {kind}", ours
        if ops.calls.shoal_has_tiles():
            tiled = [[ops.prepare(DenseWeight(weight.clone())) for weight in layer] for layer in weights]
            yield f"{level} tiled", partial(ours, ops=ops, those=tiled)


def onednn_weights(weights: list[list[Any]]) -> list[list[Any]]:
    """In oneDNN's own layout; none if torch cannot do it."""
    import torch

    x, failed = torch.randn(2, weights[0][0].shape[1]).bfloat16(), ""
    for prepare in (lambda weight: weight, lambda weight: weight.to_mkldnn()):
        try:
            pack = torch.ops.mkldnn._reorder_linear_weight
            torch.ops.mkldnn._linear_pointwise(x, pack(prepare(weights[0][0]), None), None, "none", [], "")
            return [[pack(prepare(weight), None) for weight in layer] for layer in weights]
        except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
            failed = str(error).splitlines()[0][:120]
    print(f"oneDNN   cannot be used: {failed}")
    return []


def attention_table(usable: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    import torch

    cases = {"decode 32x250": [(249, 1)] * 32, "decode 1x1000": [(999, 1)], "prefill 512": [(0, 512)]}
    report: dict[str, Any] = {}
    print("\nattention of one layer, bfloat16 KV, us")
    print(f"{'':28}" + "".join(f"{level:>12}" for level in usable))
    for shape in SHAPES:
        for name, pieces in cases.items():
            q, keys, values, batch = attention_case(shape, pieces, torch.bfloat16)
            found: dict[str, dict[str, float]] = {level: {} for level in usable}
            ways = {
                level: lambda ops=ops, q=q, keys=keys, values=values, batch=batch, dim=shape.dim: ops.attention(
                    q, keys, values, batch, dim**-0.5, 0
                )
                for level, ops in usable.items()
            }
            take_turns(ways, name, found, args.seconds / 30)
            report[f"{shape.name} {name}"] = {level: one[name] for level, one in found.items()}
            figures = "".join(f"{one[name] * 1e6:>12.0f}" for one in found.values())
            print(f"{shape.name + ', ' + name:28}{figures}", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
