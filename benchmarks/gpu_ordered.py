"""What a fixed order of sums costs on one GPU: products and attention of --batch-invariant beside the default ones.

    PYTHONPATH=src python benchmarks/gpu_ordered.py                       # about two minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_ordered.py --rows 1,128 --tune   # tiles of the products, best last

Shapes of Llama-3.1-8B and Qwen3-0.6B in bfloat16, in a CUDA graph, weights from memory rather than cache; microseconds.
First every number of rows is compared bit for bit with the same rows among all. Needs a CUDA device; reads no model.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from gpu_int4 import BANDWIDTH, CACHE, SHAPES, timed
from gpu_times import microseconds
from torch import Tensor

from shoal.kernels.triton import TritonOps
from shoal.kernels.triton import ordered_products as products
from shoal.kernels.triton.ordered import OrderedOps
from shoal.kernels.triton.ordered_products import Tiles
from shoal.kernels.triton.skinny import linear

BLOCK = 16
SHARED = 227 * 1024  # bytes of shared memory that one program may have


def candidates(rows: int) -> list[Tiles]:
    """Of as many rows as there are, or the next powers of two; more columns for more rows."""
    least = next((size for size in (16, 32, 64, 128) if size >= rows), 256)
    tall = [size for size in (16, 32, 64, 128, 256) if least // 4 <= size <= least]
    found = product(tall, (64, 128, 256), (128, 256), (4, 8), (3, 4, 6))
    return [one for one in (Tiles(*sizes) for sizes in found) if fits(one)]


def fits(tiles: Tiles) -> bool:
    """Its stages into shared memory, its sums into registers."""
    shared = (tiles.rows + tiles.columns) * tiles.inputs * tiles.stages
    return shared <= SHARED and tiles.rows * tiles.columns <= 128 * 32 * tiles.warps


def report_product(name: str, rows: int, tune: bool) -> None:
    inputs, outputs = SHAPES[name]
    count = max(1, int(CACHE / (2 * inputs * outputs)))
    weights = [torch.randn(outputs, inputs, device="cuda").mul_(inputs**-0.5).bfloat16() for _ in range(count)]
    everything = torch.randn(max(rows, 3000), inputs, device="cuda").bfloat16()
    x = everything[:rows]
    same = torch.equal(products.linear(x, weights[0], None), products.linear(everything, weights[0], None)[:rows])
    ours = microseconds([partial(products.linear, x, one, None) for one in weights])
    theirs = microseconds([partial(linear, x, one, None) for one in weights])
    floor = max(2 * inputs * outputs / BANDWIDTH, 2 * rows * inputs * outputs / 790e12) * 1e6
    line = f"{name:<14} {rows:>5}  ordered {ours:8.1f}  default {theirs:8.1f}  ratio {ours / theirs:5.2f}"
    print(f"{line}  floor {floor:7.1f}  same bits {'yes' if same else 'NO'}", flush=True)
    if tune:
        tried = [
            (timed([partial(products.multiply, x, one, None, None, x.dtype, tiles) for one in weights]), tiles)
            for tiles in candidates(rows)
        ]
        for us, tiles in sorted(tried, key=lambda one: one[0])[:4][::-1]:
            print(f"    {us:8.1f}  {tiles}", flush=True)


def attention_work(ops: TritonOps, sequences: int, past: int, new: int) -> Callable[[], Tensor]:
    """`new` queries each after `past` tokens, heads as in Llama-3.1-8B; the batch is on the device already."""
    from shoal.kernels import Batch

    length, (heads, kv_heads, dim) = past + new, (32, 8, 128)
    wide = -(-length // BLOCK)
    tables = torch.randperm(sequences * wide, device="cuda").view(sequences, wide).to(torch.int32)
    cache = torch.randn(2, sequences * wide, BLOCK, kv_heads, dim, device="cuda").bfloat16()
    q = torch.randn(sequences * new, heads, dim, device="cuda").bfloat16()
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    batch = Batch(none, none, list(range(0, sequences * new + 1, new)), [length] * sequences, tables, BLOCK)
    ops.attention(q, cache[0], cache[1], batch, dim**-0.5, 0)  # its tables are remembered
    return lambda: ops.attention(q, cache[0], cache[1], batch, dim**-0.5, 0)


def report_attention(sequences: int, past: int, new: int) -> None:
    ours, theirs = (
        microseconds([attention_work(ops, sequences, past, new)] * 4) for ops in (OrderedOps(), TritonOps())
    )
    what = f"{sequences} times {new} queries after {past}"
    print(f"{what:<32} ordered {ours:8.1f}  default {theirs:8.1f}  ratio {ours / theirs:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,128,256,2048,8192")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tune", action="store_true", help="time other tiles, too")
    args = parser.parse_args()
    for size in ((1, 800, 1), (8, 4000, 1), (64, 800, 1), (128, 1100, 1), (256, 800, 1), (8, 0, 1024), (1, 0, 8192)):
        report_attention(*size)
    for name, rows in product(args.shapes.split(","), args.rows.split(",")):
        report_product(name, int(rows), args.tune)


if __name__ == "__main__":
    main()
