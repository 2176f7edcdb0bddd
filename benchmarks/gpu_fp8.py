"""fp8 on one GPU: every kernel against its meaning, then times of products, attention and row kernels beside bfloat16.

    PYTHONPATH=src python benchmarks/gpu_fp8.py            # all; about two minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_fp8.py --only products --rows 1,64

Products of the shapes of Llama-3.1-8B and Qwen3-0.6B in a CUDA graph, weights from memory rather than cache, in µs.
`way` is what kernels/triton/products8.py chooses; the floor is the bytes of the weights, or the arithmetic if that is
longer. Needs a CUDA device; reads no model.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_times import microseconds
from torch import Tensor

from shoal.kernels import Batch, fp8
from shoal.kernels.ref import RefOps
from shoal.kernels.triton import AttentionTables, products8, rows, rows8
from shoal.kernels.triton import attention as attention_kernels
from shoal.kernels.triton.attention import DecodeShape
from shoal.kernels.triton.skinny import linear
from shoal.kernels.weights import Fp8Weight, quantize_fp8

SHAPES = {
    "llama qkv": (4096, 6144), "llama out": (4096, 4096), "llama gate-up": (4096, 28672), "llama down": (14336, 4096),
    "qwen qkv": (1024, 4096), "qwen out": (2048, 1024), "qwen gate-up": (1024, 6144), "qwen down": (3072, 1024),
}  # fmt: skip
BANDWIDTH, RATE8 = 4.24e12, 1137e12  # measured on an H200
CACHE = 150e6  # bytes of weights that no cache holds
ONE_ROW = [
    (2, 2048, 4, 3),
    (4, 1024, 4, 3),
    (4, 1024, 2, 3),
    (2, 1024, 2, 3),
    (4, 2048, 4, 3),
    (8, 1024, 4, 3),
    (1, 4096, 4, 3),
]
DECODES = [(128, 4, 3), (128, 4, 4), (64, 2, 3), (64, 2, 4), (64, 4, 3), (32, 1, 3), (32, 1, 4), (256, 8, 3)]
PROMPTS = [(64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 8, 3), (128, 4, 3), (32, 4, 4)]
REF = RefOps()


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def finished(product: rows8.Product) -> Tensor:
    values = product.values.float()
    if product.rows is not None and product.columns is not None:
        values = values * product.rows.unsqueeze(1) * product.columns
    return values if product.bias is None else values + product.bias.float()


def check(what: str, found: Tensor, wanted: Tensor, most: float) -> None:
    by = difference(found, wanted)
    assert found.isfinite().all(), what
    assert by < most, f"{what}: differs by {by}"
    print(f"  ok {what}: {by:.1e}")


def fp8_rows(count: int, size: int) -> rows8.Fp8Rows:
    return rows8.quantize(torch.randn(count, size, device="cuda").to(torch.bfloat16))


def correctness() -> None:
    print("correctness (relative norm of the difference to ref)")
    torch.manual_seed(1)
    for count, inputs, outputs in ((1, 4096, 6144), (1, 1040, 48), (3, 96, 32), (17, 1024, 4096), (1300, 4096, 4096)):
        weight = quantize_fp8(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5)
        x = torch.randn(count, inputs, device="cuda").to(torch.bfloat16)
        bias = torch.randn(outputs, device="cuda").to(torch.bfloat16)
        made, wanted = rows8.quantize(x), REF.linear(x, weight, bias)
        for way in (products8.unit(made, weight, bias, torch.bfloat16), products8.rowwise(made, weight, bias)):
            check(f"product {count} x {inputs} x {outputs}", finished(way), wanted, 5e-3)
        if count == 1:
            for shape in (products8.one_row_shape(inputs, outputs), *ONE_ROW):
                if outputs % shape[0] == 0:
                    one = products8.one_row(made, weight, bias, torch.bfloat16, shape)
                    assert difference(finished(one), wanted) < 5e-3, shape
    for count, heads, kv_heads, dim in ((9, 32, 8, 128), (5, 6, 2, 64)):
        k_cache, v_cache = new_cache(40, kv_heads, dim), new_cache(40, kv_heads, dim)
        other = [new_cache(40, kv_heads, dim) for _ in "kv"]
        qkv = torch.randn(count, (heads + 2 * kv_heads) * dim, device="cuda").to(torch.bfloat16)
        angles, slots = torch.randn(count, dim // 2, device="cuda"), torch.randperm(640, device="cuda")[:count]
        rope = (angles.cos(), angles.sin())
        q = rows.rotate_and_store(qkv, None, rope, (k_cache, v_cache), slots)
        check("rotate", q, REF.rotate_and_store(qkv, None, rope, (other[0], other[1]), slots), 1e-2)
        every = torch.arange(40, device="cuda")
        for ours, theirs in ((k_cache, other[0]), (v_cache, other[1])):
            check("stored", *(fp8.gathered(cache, every, torch.float32) for cache in (ours, theirs)), 1e-2)


def new_cache(blocks: int, kv_heads: int, dim: int, block: int = 16) -> Tensor:
    data = torch.zeros(blocks, fp8.block_bytes(block, kv_heads, dim), dtype=torch.uint8, device="cuda")
    return fp8.blocks_in(data, block, kv_heads, dim)


# ---- products -------------------------------------------------------------------------------------------------------


def products(counts: Sequence[int]) -> list[str]:
    head = ("bf16", "unit", "rowwise", "one row")
    lines = [f"{'product':<14} {'rows':>5} " + " ".join(f"{name:>7}" for name in head) + "      way  floor share"]
    for name, (inputs, outputs) in SHAPES.items():
        copies = max(2, int(CACHE / (inputs * outputs)))
        matrices = [torch.randn(outputs, inputs, device="cuda").to(torch.bfloat16) for _ in range(copies)]
        weights = [quantize_fp8(matrix) for matrix in matrices]
        for count in counts:
            x = torch.randn(count, inputs, device="cuda").to(torch.bfloat16)
            lines.append(f"{name:<14} {count:>5} " + product_line(x, matrices, weights, head))
    return lines


def product_line(x: Tensor, matrices: list[Tensor], weights: list[Fp8Weight], head: Sequence[str]) -> str:
    made, (count, inputs), outputs, kind = rows8.quantize(x), x.shape, weights[0].shape[0], torch.bfloat16
    times = {
        "bf16": microseconds([partial(linear, x, matrix, None) for matrix in matrices]),
        "unit": microseconds([partial(products8.unit, made, weight, None, kind) for weight in weights]),
        "rowwise": microseconds([partial(products8.rowwise, made, weight, None) for weight in weights]),
    }
    shown = ""
    if count == 1:
        shapes = {products8.one_row_shape(inputs, outputs), *ONE_ROW}
        found = {
            shape: microseconds([partial(products8.one_row, made, weight, None, kind, shape) for weight in weights])
            for shape in shapes
            if outputs % shape[0] == 0
        }
        times["one row"] = found[products8.one_row_shape(inputs, outputs)]
        shown = "  " + "; ".join(
            f"{','.join(map(str, shape))}: {found[shape]:.1f}" for shape in sorted(found, key=found.__getitem__)[:4]
        )
    way = products8.way_for(count, inputs, outputs)
    floor = 1e6 * max(inputs * outputs / BANDWIDTH, 2 * count * inputs * outputs / RATE8)
    columns = " ".join(f"{times[name]:>7.1f}" if name in times else "      -" for name in head)
    return f"{columns} {way:>8} {floor:>6.1f} {floor / times[way]:>4.0%}{shown}"


# ---- attention ------------------------------------------------------------------------------------------------------


def decode_tables(count: int, mean: int) -> tuple[AttentionTables, int, int]:
    source = random.Random(count)
    contexts = [source.randint(mean // 2, mean * 3 // 2) for _ in range(count)]
    widest = -(-max(contexts) // 16)
    ids = list(range(sum(-(-context // 16) for context in contexts)))
    source.shuffle(ids)
    tables = torch.zeros(count, widest, dtype=torch.int32)
    for row, context in enumerate(contexts):
        blocks = -(-context // 16)
        tables[row, :blocks] = torch.tensor([ids.pop() for _ in range(blocks)], dtype=torch.int32)
    decodes = torch.tensor([[row, context, row, 1] for row, context in enumerate(contexts)], dtype=torch.int32).T
    empty = torch.empty(5, 0, dtype=torch.int32, device="cuda")
    made = AttentionTables(tables.cuda(), decodes.contiguous().cuda(), empty)
    return made, int(tables.max()) + 1, sum(contexts)


def attention() -> list[str]:
    lines = [f"{'decode':<12} {'bf16':>8} {'TB/s':>5} {'fp8':>8} {'TB/s':>5}   fp8 by tile, warps, stages"]
    lines += [decode_line(*size) for size in ((1, 800), (8, 800), (64, 800), (128, 1100), (256, 800), (32, 4000))]
    lines.append(f"{'prompts':<12} {'bf16':>8} {'TFLOP/s':>8} {'fp8':>8} {'TFLOP/s':>8}   fp8 by tile, warps, stages")
    return lines + [prompt_line(*size) for size in ((14, 562), (8, 1024), (1, 8192))]


def in_fp8(plain: Tensor) -> list[Tensor]:
    """The keys and values of a cache [2, blocks, 16, kv_heads, dim] in fp8."""
    _, blocks, _, kv_heads, dim = plain.shape
    made = [new_cache(blocks, kv_heads, dim) for _ in "kv"]
    for cache, values in zip(made, plain, strict=True):
        fp8.store(values.flatten(0, 1), cache, torch.arange(blocks * 16, device="cuda"))
    return made


def decode_line(count: int, mean: int, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> str:
    tables, blocks, tokens = decode_tables(count, mean)
    arrived = torch.zeros(2**15, dtype=torch.int32, device="cuda")
    q = torch.randn(count, heads, dim, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(q)
    copies = max(1, int(CACHE / (tokens * kv_heads * dim * 2)))
    plain = [torch.randn(2, blocks, 16, kv_heads, dim, device="cuda").to(torch.bfloat16) for _ in range(copies)]
    small = [in_fp8(one) for one in plain]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shape, shape8 = (
        attention_kernels.decode_shape(count, heads, kv_heads, dim, False, False, processors, from_fp8=from_fp8)
        for from_fp8 in (False, True)
    )

    def timed(caches: Sequence[Any], shape: DecodeShape) -> float:
        more = (tables.tables, tables.decodes, out, arrived, dim**-0.5, 0, shape)
        return microseconds([partial(attention_kernels.decode, q, pair[0], pair[1], *more) for pair in caches])

    batch = Batch(
        torch.empty(0), torch.empty(0), [*range(count + 1)], tables.decodes[1].tolist(), tables.tables.long(), 16
    )
    timed(small, shape8)
    wanted = REF.attention(q, small[-1][0], small[-1][1], batch, dim**-0.5, 0)
    assert difference(out, wanted) < 1e-2, f"decode {count} x {mean}: differs by {difference(out, wanted)}"
    line = f"{count:>3} x {mean:<6} "
    for caches, used, size in ((plain, shape, 2 * dim), (small, shape8, dim + 1)):
        time = timed(caches, used)
        line += f" {time:>8.1f} {2 * tokens * kv_heads * size / time / 1e6:>5.2f}"
    for tile, warps, stages in DECODES:
        other = DecodeShape(tile, warps, stages, shape8.splits, max(1, shape8.least * shape8.tile // tile))
        line += f"  {tile},{warps},{stages}: {timed(small, other):.1f}"
    return line


def prompt_line(count: int, length: int, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> str:
    each = -(-length // 16)
    tables = torch.randperm(count * each).view(count, each).to(torch.int32).cuda()
    queries = attention_kernels.queries_per_block(heads // kv_heads, dim, torch.bfloat16)
    entries = [(row, row * length, length, at, length) for row in range(count) for at in range(0, length, queries)]
    entries.sort(key=lambda entry: -entry[3])
    blocks = torch.tensor(entries, dtype=torch.int32).T.contiguous().cuda()
    q = torch.randn(count * length, heads, dim, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(q)
    plain = torch.randn(2, count * each, 16, kv_heads, dim, device="cuda").to(torch.bfloat16)
    flop = 4 * count * heads * dim * length * length / 2
    line = f"{count:>3} x {length:<6} "
    for pair in (plain, in_fp8(plain)):
        work = partial(attention_kernels.prefill, q, pair[0], pair[1], tables, blocks, out, dim**-0.5, 0)
        time = microseconds([work])
        line += f" {time:>8.1f} {flop / time / 1e6:>8.0f}"
    for shape in PROMPTS:
        line += f"  {','.join(map(str, shape))}: {microseconds([partial(work, shape=shape)]):.1f}"
    return line


# ---- row kernels ----------------------------------------------------------------------------------------------------


def row_kernels() -> list[str]:
    head = ("norm", "add+norm8", "SwiGLU", "SwiGLU8", "rotate", "rotate8", "quantize")
    lines = [f"{'Llama rows':<11}" + " ".join(f"{name:>9}" for name in head)]
    return lines + [row_line(count) for count in (1, 64, 128, 256, 2048)]


def row_line(count: int) -> str:
    residual, both, qkv = (torch.randn(count, size, device="cuda").to(torch.bfloat16) for size in (4096, 28672, 6144))
    weight, scales = torch.rand(4096, device="cuda").to(torch.bfloat16), torch.rand(count, device="cuda")
    due, gate_up, raw = (
        rows8.Product(values.clone(), scales, torch.rand(values.shape[1], device="cuda"), None)
        for values in (residual, both, qkv)
    )
    angles = torch.randn(count, 64, device="cuda")
    rope, slots = (angles.cos(), angles.sin()), torch.randperm(4096, device="cuda")[:count]
    plain = torch.zeros(2, 256, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    works: list[Callable[[], object]] = [
        partial(rows.rms_norm, residual, weight, 1e-5),
        partial(rows8.add_norm, residual, due, weight, 1e-5),
        partial(rows.silu_mul, both),
        partial(rows8.silu_mul, gate_up),
        partial(rows.rotate_and_store, qkv, None, rope, (plain[0], plain[1]), slots),
        partial(rows.rotate_and_store, raw, None, rope, (new_cache(256, 8, 128), new_cache(256, 8, 128)), slots),
        partial(rows8.quantize, residual),
    ]
    return f"{count:<11}" + " ".join(f"{microseconds([work] * 20):>9.2f}" for work in works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("products", "attention", "rows"))
    parser.add_argument("--rows", default="1,8,32,64,128,256,2048")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    correctness()
    parts: dict[str, Callable[[], list[str]]] = {
        "rows": row_kernels, "attention": attention,
        "products": lambda: products([int(count) for count in args.rows.split(",")]),
    }  # fmt: skip
    tables = [part() for name, part in parts.items() if args.only in (None, name)]
    print(f"\n{torch.cuda.get_device_name()}, µs")
    for table in tables:
        print("\n".join(["", *table]))


if __name__ == "__main__":
    main()
