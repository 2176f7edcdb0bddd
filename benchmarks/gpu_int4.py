"""Products with weights in 4 bits on one GPU: every way against its meaning, then times beside bfloat16.

    PYTHONPATH=src python benchmarks/gpu_int4.py                        # about two minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_int4.py --rows 1,16 --tune     # shapes of the kernels, best last

Shapes of Llama-3.1-8B and Qwen3-0.6B in a CUDA graph, weights from memory rather than cache, in microseconds. `way` is
what kernels/triton/products4.py chooses; the floor is the bytes of the weights. Needs a CUDA device; reads no model.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from gpu_times import microseconds
from torch import Tensor

from shoal.kernels.block_weight import BlockWeight, quantize_int4
from shoal.kernels.triton import products4
from shoal.kernels.triton.products4 import Tiling
from shoal.kernels.triton.skinny import linear

SHAPES = {
    "llama qkv": (4096, 6144), "llama out": (4096, 4096), "llama gate-up": (4096, 28672), "llama down": (14336, 4096),
    "qwen qkv": (1024, 4096), "qwen out": (2048, 1024), "qwen gate-up": (1024, 6144), "qwen down": (3072, 1024),
}  # fmt: skip
BANDWIDTH = 4.24e12  # measured on an H200
CACHE = 150e6  # bytes of weights that no cache holds


def candidates(rows: int, outputs: int) -> list[Tiling]:
    if rows == 1:
        sizes = product((1, 2, 4, 8), (256, 512, 1024, 2048), (2, 4), (2, 3))
        return [Tiling(1, columns, tile, 1, warps, stages) for columns, tile, warps, stages in sizes]
    tall = 16 if rows <= 16 else 32 if rows <= 32 else 64
    sizes = product({tall, 64 if rows > 64 else tall}, (32, 64, 128), (64, 128, 256), (1, 2, 4), (4, 8), (3, 4))
    return [Tiling(*one) for one in sizes if outputs % one[1] == 0]


def timed(works: Sequence[Callable[[], object]]) -> float:
    """Infinite for a shape that the card cannot run."""
    try:
        return microseconds(works)
    except Exception:
        torch.cuda.synchronize()
        return float("inf")


def copies(weight: BlockWeight) -> list[BlockWeight]:
    count = max(1, int(CACHE / weight.nbytes))
    return [weight.to("cuda"), *(BlockWeight(
        weight.values.clone(), weight.scales.clone(), None if weight.offsets is None else weight.offsets.clone(),
        weight.inputs, weight.scale_group, weight.offset_group,
    ) for _ in range(count - 1))]  # fmt: skip


def report(name: str, rows: int, group: int, tune: bool) -> None:
    inputs, outputs = SHAPES[name]
    numbers = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
    weight = quantize_int4(numbers, group)
    x = torch.randn(rows, inputs, device="cuda").to(torch.bfloat16)
    many = copies(weight)
    dense = [numbers.to(torch.bfloat16).clone() for _ in range(max(1, int(CACHE / (2 * numbers.numel()))))]
    wanted = x.float() @ weight.dense().T
    found: Tensor = products4.linear4(x, weight, None)
    apart = float((found.float() - wanted).norm() / wanted.norm())
    assert apart < 1e-2, f"{name}, {rows} rows: {apart}"
    ours = microseconds([partial(products4.linear4, x, one, None) for one in many])
    unpacked = microseconds([lambda one=one: linear(x, products4.widened(one, x.dtype), None) for one in many])
    theirs = microseconds([partial(linear, x, one, None) for one in dense])
    floor = weight.nbytes / BANDWIDTH * 1e6
    line = f"{name:<14} {group:>5} {rows:>5}  int4 {ours:8.1f}  unpacked first {unpacked:8.1f}  bf16 {theirs:8.1f}"
    print(f"{line}  floor {floor:6.1f}  {products4.shape_for(rows, outputs)}", flush=True)
    if tune and rows <= 256:
        kernel = products4.one_row if rows == 1 else products4.few_rows
        tried = [
            (timed([partial(kernel, x, one, None, None, shape) for one in many]), shape)
            for shape in candidates(rows, outputs) if products4.fits(weight, shape.tile)
        ]  # fmt: skip
        for us, shape in sorted(tried, key=lambda one: one[0])[:4][::-1]:
            print(f"    {us:8.1f}  {shape}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,16,32,64,128,256,2048")
    parser.add_argument("--groups", default="128,32", help="inputs that share a scale: 128 as AWQ, 32 as GGUF")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tune", action="store_true", help="time other shapes of the kernels, too")
    args = parser.parse_args()
    for name, group, rows in product(args.shapes.split(","), args.groups.split(","), args.rows.split(",")):
        report(name, int(rows), int(group), args.tune)


if __name__ == "__main__":
    main()
