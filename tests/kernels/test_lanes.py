"""Linear layers over tiled weights with vector instructions (lanes.c): right, and the same bits for any rows, threads
and sizes of blocks."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shoal import kernels
from shoal.kernels.cpu import NativeOps
from shoal.kernels.weights import DenseWeight, Int8Weight, TiledWeight, quantize
from shoal.models.layer import run_layers
from tests.effort import covering
from tests.kernels.layers import a_layer, in_one_call, prepared, with_weights
from tests.kernels.pretended import older, pretended
from tests.kernels.ragged import Tables

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES = [
    pytest.param(ops, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, ops in [*kernels.available(), *pretended(), *older()]
    if isinstance(ops, NativeOps)
    for dtype, kind in TYPES.items()
    if ops.calls.shoal_reads_tiles(kind)
]
SIZES = [(32, 16), (96, 48), (576, 80), (1600, 32), (3072, 112)]  # inputs, outputs: one slice or several, odd panels
ROWS = (*range(1, 26), 31, 32, 33, 47, 48, 49, 70, 192, 193, 400)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tiled(ops: NativeOps, values: torch.Tensor) -> TiledWeight:
    found = ops.prepare(DenseWeight(values.clone()))
    assert isinstance(found, TiledWeight), "nothing was tiled"
    return found


def rounds_inputs(ops: NativeOps, dtype: torch.dtype) -> bool:
    """Whether the inputs are multiplied in bfloat16 too."""
    return dtype == torch.bfloat16 and ops.library.bfloat16_products != "widened"


@pytest.mark.parametrize(("ops", "dtype"), LANES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_of_any_number_of_rows(ops: NativeOps, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Close to exact ones, and each row to the last bit as it is alone."""
    values, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x, residual = torch.randn(max(ROWS), inputs), torch.randn(max(ROWS), outputs)
    weight = tiled(ops, values)
    assert torch.equal(weight.dense(), values)
    exact = (x.to(dtype) if rounds_inputs(ops, dtype) else x).double() @ values.double().T
    whole = ops.linear(x, weight, None)
    torch.testing.assert_close(whole.double(), exact, atol=3e-6 * inputs, rtol=1e-5)
    added = ops.linear_add(x, weight, bias, residual.clone())
    torch.testing.assert_close(added.double(), exact + bias + residual, atol=3e-6 * inputs, rtol=1e-5)
    for rows in ROWS:
        first = max(ROWS) - rows
        assert torch.equal(ops.linear(x[first:], weight, None), whole[first:]), rows
        assert torch.equal(ops.linear_add(x[:rows], weight, bias, residual[:rows].clone()), added[:rows]), rows


@pytest.mark.parametrize("ops", [param.values[0] for param in LANES if param.values[1] == torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_numbers_of_bfloat16_stay_in_16_bits(ops: NativeOps, inputs: int, outputs: int) -> None:
    """In a float32 model, where they are widened exactly: the same bits, whatever the number of rows."""
    values = torch.randn(outputs, inputs).to(torch.bfloat16).float()
    bias, x = torch.randn(outputs), torch.randn(max(ROWS), inputs)
    weight, wide = tiled(ops, values), ops._tiled(DenseWeight(values.clone()))
    assert weight.dtype == (torch.bfloat16 if ops.widens else torch.float32)
    assert ops.widens or ops.library.bfloat16_products != "widened"
    assert torch.equal(weight.dense().float(), values)
    assert torch.equal(ops.embed(torch.tensor([3, outputs - 1]), weight), values[[3, outputs - 1]])
    for rows in ROWS:
        residual = torch.randn(rows, outputs)
        assert torch.equal(ops.linear(x[:rows], weight, bias), ops.linear(x[:rows], wide, bias)), rows
        found, wanted = (ops.linear_add(x[:rows], one, None, residual.clone()) for one in (weight, wide))
        assert torch.equal(found, wanted), rows
    values[outputs // 2, inputs // 3] += 2**-20  # one number that has more bits
    assert tiled(ops, values).dtype == torch.float32


@pytest.mark.parametrize(("ops", "dtype"), LANES[::2])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 16), (300, 48), (576, 80), (5000, 32)])
def test_tiled_bytes_give_the_same_bits(ops: NativeOps, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """As bytes in torch's layout, for every number of rows; inputs that fill no tile are padded."""
    small, bias = quantize(torch.randn(outputs, inputs)), torch.randn(outputs).bfloat16()
    small_tiles = ops.prepare(replace(small, stored=DenseWeight(small.stored.values.clone())))
    assert isinstance(small_tiles, Int8Weight)
    assert small_tiles.stored.tiled
    assert torch.equal(small_tiles.dense(), small.dense())
    for rows in ROWS:
        x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
        added = ops.linear_add(x, small_tiles, bias, residual.clone())
        assert torch.equal(added, ops.linear_add(x, small, bias, residual.clone())), rows


@pytest.mark.parametrize(("ops", "dtype"), LANES)
def test_bytes_of_extreme_size(ops: NativeOps, dtype: torch.dtype) -> None:
    """Sums of the largest products are exact; NaN stays in its row."""
    small = Int8Weight(DenseWeight(torch.full((32, 4096), 127, dtype=torch.int8)), torch.ones(32), 4096)
    small.stored.values[16:] = -127
    x = torch.tensor([[1.0], [-1.0], [float("nan")]]).repeat(1, 4096)
    wanted = torch.tensor([[1.0] * 16 + [-1.0] * 16, [-1.0] * 16 + [1.0] * 16]) * 127 * 4096
    found = ops.linear(x, ops.prepare(small), None)
    torch.testing.assert_close(found[:2], wanted, rtol=1e-6, atol=0)
    assert found[2].isnan().all()


@pytest.mark.parametrize(("ops", "dtype"), LANES)
def test_threads_change_no_bit(ops: NativeOps, dtype: torch.dtype, threads: None) -> None:
    x, values = torch.randn(230, 800), torch.randn(336, 800)
    weight, small = tiled(ops, values.to(dtype)), ops.prepare(quantize(values))
    found = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        found.append([ops.linear(rows, those, None) for rows in (x, x[:33], x[:1]) for those in (weight, small)])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("ops", "dtype", "hidden", "inner", "biased", "tokens"),
    covering(LANES, [(64, 96, False), (96, 32, True), (576, 160, False)], [1, 5, 13, 70, 200]),
)
def test_layers_in_one_call_give_the_same_bits(
    ops: NativeOps, dtype: torch.dtype, hidden: int, inner: int, biased: bool, tokens: int
) -> None:
    """Norms before and SwiGLU after are part of the products; in floating point, in 8 bits, and where weights are kept
    in 16 bits beside biases of 32."""
    layer = a_layer(dtype, 4, 2, 32, False, biased, hidden, inner)
    tables = Tables([tokens], 16)
    angles, start = torch.randn(tokens, 16), torch.randn(tokens, hidden)
    rope, cache = (angles.cos(), angles.sin()), torch.zeros(2, tables.blocks, 16, 2, 32).to(dtype)
    full = with_weights(layer, lambda weight: prepared(ops, weight))
    small = with_weights(layer, lambda weight: ops.prepare(quantize(weight.dense())))
    narrow = with_weights(layer, lambda weight: prepared(ops, DenseWeight(weight.dense().bfloat16().to(dtype))))
    for model in (full, small, narrow):
        found = []
        for run in (in_one_call, run_layers):
            keys, values = cache.clone()
            batch = tables.batch([(0, 0, tokens)])
            found.append(run(ops, [model], start.clone(), rope, batch, [(keys, values)]))
        assert torch.equal(found[0], found[1])
