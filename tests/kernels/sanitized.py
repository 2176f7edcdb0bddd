"""A program: random calls of a C library that was compiled with the address sanitizer, each compared with ref.

python -m tests.kernels.sanitized LIBRARY SEED CASES
"""

import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shoal.kernels.cpu import Library, NativeOps, compiled
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import DenseWeight, quantize
from shoal.models.layer import run_layers
from tests.kernels.blocks import a_weight
from tests.kernels.draw_rows import greedy_rows
from tests.kernels.layers import NAMES, a_layer, in_8_bits, in_one_call, prepared, with_weights
from tests.kernels.ragged import Tables

REF = RefOps()
LENGTHS = (1, 2, 5, 16, 63, 64, 65, 130, 300, 513, 700)


def main(path: str, seed: str, cases: str) -> None:
    ops = NativeOps(Library(compiled._opened(Path(path)), "sanitized", (), "", Path(path)))
    chance = random.Random(int(seed))
    torch.manual_seed(int(seed))
    with torch.inference_mode():
        for _ in range(int(cases)):
            torch.set_num_threads(chance.choice((1, 2, 3)))
            attention(ops, chance)
            products(ops, chance)
            blocks(ops, chance)
            rows(ops, chance)
            layers(ops, chance)
    print(f"{cases} cases")


def attention(ops: NativeOps, chance: random.Random) -> None:
    """Prompts, pieces of prompts and decodes, in blocks of all sizes and with windows."""
    dim, kv_heads = chance.choice((16, 32, 48, 64, 96, 128, 256)), chance.choice((1, 2, 3, 5, 8))
    heads, size = kv_heads * chance.choice((1, 2, 3, 4, 7, 16, 17, 33)), chance.choice((5, 16, 32))
    window, dtype = chance.choice((0, 0, 90, 700)), chance.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    lengths = [chance.choice(LENGTHS) for _ in range(chance.randint(1, 8))]
    tables = Tables(lengths, size)
    cache = torch.randn(2, tables.blocks, size, kv_heads, dim).to(dtype)
    pieces = [(row, n - new, new) for row, n in enumerate(lengths) for new in (chance.choice((1, 1, n, (n + 1) // 2)),)]
    batch = tables.batch(pieces)
    q = torch.randn(batch.starts[-1], heads, dim).to(dtype).float()
    found = ops.attention(q, cache[0], cache[1], batch, dim**-0.5, window)
    wanted = REF.attention(q, cache[0].float(), cache[1].float(), batch, dim**-0.5, window)
    bound = 3e-2 if dtype == torch.bfloat16 and ops.library.bfloat16_products == "tiles" else 1e-4
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


def products(ops: NativeOps, chance: random.Random) -> None:
    """Linear layers of odd and of whole sizes, as torch has them and as a model does."""
    outputs, inputs = chance.choice((7, 16, 33, 48, 160)), chance.choice((5, 20, 32, 64, 96, 172, 192))
    count, dtype = chance.choice((1, 3, 5, 16, 17, 31, 33, 100, 300)), chance.choice((torch.float32, torch.bfloat16))
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x, residual = torch.randn(count, inputs), torch.randn(count, outputs)
    plain = ops.linear_add(x, DenseWeight(weight), bias, residual.clone())
    narrow = dtype == torch.bfloat16 and ops.library.bfloat16_products != "widened"
    wanted = (x.to(dtype) if narrow else x).double() @ weight.double().T + bias.double() + residual.double()
    torch.testing.assert_close(plain.double(), wanted, atol=2e-6 * inputs + 1e-5, rtol=1e-4)
    model = prepared(ops, DenseWeight(weight))
    tiled = ops.linear_add(x, model, bias, residual.clone())
    torch.testing.assert_close(tiled.double(), wanted, atol=2e-6 * inputs + 1e-5, rtol=1e-4)
    ids = torch.randint(outputs, (count,))
    assert torch.equal(ops.embed(ids, model), weight[ids].float())
    small = quantize(weight)
    small_model = prepared(ops, small)
    assert torch.equal(ops.linear(x, small_model, bias), ops.linear(x, small, bias))
    for stored in (small, small_model):
        assert torch.equal(ops.embed(ids, stored), small.rows(ids))


def blocks(ops: NativeOps, chance: random.Random) -> None:
    """Weights in blocks of 4 and 8 bits, of outputs that are whole panels and of others."""
    outputs, inputs = chance.choice((1, 7, 16, 33, 64, 130)), chance.choice((32, 96, 160, 256))
    count, group = chance.choice((1, 2, 3, 4, 5, 17, 33, 70)), chance.choice((32, 64, 4096))
    dtype, bias = chance.choice((torch.float16, torch.float32)), chance.choice((None, torch.randn(outputs)))
    weight = a_weight(outputs, inputs, chance.choice((4, 8)), group, dtype)
    x, residual = torch.randn(count, inputs), torch.randn(count, outputs)
    found = ops.linear_add(x, ops.prepare(weight), bias, residual.clone())
    wanted = REF.linear_add(x, weight, bias, residual)
    size = x.abs() @ weight.dense().abs().T
    assert ((found - wanted).abs() <= 0.01 * size + 1e-3).all()


def rows(ops: NativeOps, chance: random.Random) -> None:
    """What is done row by row."""
    count, n = chance.choice((1, 3, 17, 200)), chance.choice((2, 14, 64, 90, 576))
    x = torch.randn(count, n)
    torch.testing.assert_close(ops.silu_mul(x), REF.silu_mul(x), atol=1e-5, rtol=1e-5)
    weight = torch.randn(n)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), REF.rms_norm(x, weight, 1e-5), atol=1e-4, rtol=1e-4)
    tokens, _ = ops.choose(x, np.arange(count), np.arange(count), greedy_rows(count, n), None)
    assert torch.equal(tokens, x.argmax(dim=1))


def layers(ops: NativeOps, chance: random.Random) -> None:
    """All layers in one call, of weights as a model has them and in 8 bits: to the last bit as one after the other."""
    hidden, inner, kv_heads = (
        chance.choice((32, 48, 64, 160)),
        chance.choice((24, 48, 96, 160)),
        chance.choice((1, 2, 3)),
    )
    heads, dtype = kv_heads * chance.choice((1, 2, 17)), chance.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    tokens, past = chance.choice((1, 2, 9, 16, 17, 31, 32, 33, 40, 90, 150, 300)), chance.choice((0, 5, 70))
    layer = a_layer(dtype, heads, kv_heads, 32, chance.random() < 0.5, chance.random() < 0.5, hidden, inner)
    kept = chance.choice((*NAMES, ""))  # in torch's layout
    names = [name for name in NAMES if name != kept]
    tables = Tables([past + tokens], 16)
    angles = torch.randn(tokens, 16)
    rope, start = (angles.cos(), angles.sin()), torch.randn(tokens, hidden)
    cache = torch.randn(2, tables.blocks, 16, kv_heads, 32).to(dtype)
    tiled, small = with_weights(layer, partial(prepared, ops), names), with_weights(layer, in_8_bits, names)
    for model in (layer, tiled, small):
        found = []
        for run in (in_one_call, run_layers):
            keys, values = cache.clone()
            found.append(run(ops, [model], start.clone(), rope, tables.batch([(0, past, tokens)]), [(keys, values)]))
        assert torch.equal(found[0], found[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
