"""Weights in blocks of 4 and 8 bits: what they mean, and products with them on every CPU level that runs here."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal import kernels
from shoal.kernels.block_weight import BLOCK, PanelWeight, in_panels, joined_blocks, quantize_int4
from shoal.kernels.cpu import CpuOps, NativeOps
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import Weight
from shoal.models.layer import run_layers
from tests.kernels.blocks import a_weight, on_grid
from tests.kernels.layers import a_layer, in_one_call, with_weights
from tests.kernels.pretended import older, pretended
from tests.kernels.ragged import Tables

NATIVE = [
    pytest.param(ops, id=name)
    for name, ops in [*kernels.available(), *pretended(), *older()]
    if isinstance(ops, NativeOps)
]
SIZES = [(1, 32), (7, 64), (12, 96), (25, 160), (130, 576), (64, 512)]
ROWS = (1, 2, 3, 4, 5, 9, 33, 70)


def rounded(x: Tensor) -> Tensor:
    """As C rounds it: in double precision, the nearest of 255 steps of each block."""
    blocks = x.double().unflatten(1, (-1, BLOCK))
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / steps.clamp(min=1e-30)).round() * steps).flatten(1)


def without_ties(x: Tensor) -> Tensor:
    """Numbers that no precision rounds to another step: at most 0.49 of a step from theirs."""
    blocks = x.double().unflatten(1, (-1, BLOCK))
    steps = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    nearest = (blocks / steps).round()
    return ((nearest + (blocks / steps - nearest).clamp(-0.49, 0.49)) * steps).flatten(1).float()


def test_numbers_of_four_bits() -> None:
    """Written out: byte j of a block holds inputs j and j + 16."""
    weight = a_weight(3, 96, group=96)
    assert weight.offsets is not None
    for output in range(3):
        for n in range(96):
            byte = int(weight.values[output, n // 32 * 16 + n % 16])
            integer = byte >> 4 if n % 32 >= 16 else byte & 15
            number = integer * weight.scales[output, 0].float() + weight.offsets[output, 0].float()
            assert weight.dense()[output, n] == number
    assert (weight.bits, weight.shape, weight.dtype) == (4, (3, 96), torch.uint8)
    assert weight.nbytes == 3 * 48 + 2 * 3 * 2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_panels_change_no_number(bits: int, group: int, lanes: int) -> None:
    weight = a_weight(21, 320, bits, group)
    for float16 in (True, False):
        found = in_panels(weight, lanes, float16)
        assert torch.equal(found.dense(), weight.dense())
        assert torch.equal(found.rows(torch.tensor([4, 0, 20, 4])), weight.dense()[[4, 0, 20, 4]])
        assert (found.shape, found.bits) == ((21, 320), bits)
        assert found.scales.dtype == (torch.float16 if float16 else torch.float32)


def test_joining_changes_no_number() -> None:
    parts = [a_weight(4, 256, 4, 128), a_weight(2, 256, 4, 32, torch.float32), a_weight(3, 256, 4, 256)]
    found = joined_blocks(parts)
    assert torch.equal(found.dense(), torch.cat([part.dense() for part in parts]))
    bytes_of = [a_weight(4, 64, 8), a_weight(2, 64, 8)]
    assert torch.equal(joined_blocks(bytes_of).dense(), torch.cat([part.dense() for part in bytes_of]))


@pytest.mark.parametrize("inputs", [96, 256])
def test_rounding_to_four_bits(inputs: int) -> None:
    numbers = torch.randn(9, inputs)
    found = quantize_int4(numbers)
    assert found.scale_group == (128 if inputs == 256 else 32)
    widest = found.scales.float().max()
    assert (found.dense() - numbers).abs().max() <= 0.51 * widest + 0.5 * widest  # a step, where the zero is rounded


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "dtype"), [(32, torch.float16), (64, torch.float32), (4096, torch.float32)])
def test_products_are_those_of_the_numbers(ops: NativeOps, bits: int, group: int, dtype: torch.dtype) -> None:
    for outputs, inputs in SIZES:
        weight = a_weight(outputs, inputs, bits, group, dtype)
        model = ops.prepare(weight)
        assert isinstance(model, PanelWeight)
        for rows in ROWS:
            x, bias, residual = on_grid(rows, inputs), torch.randn(outputs), torch.randn(rows, outputs)
            plain = x.double() @ weight.dense().double().T
            size = (x.abs().double() @ weight.dense().abs().double().T).max() + 200
            torch.testing.assert_close(ops.linear(x, model, None).double(), plain, atol=2e-6 * float(size), rtol=0)
            found = ops.linear_add(x, model, bias, residual.clone())
            torch.testing.assert_close(
                found.double(), plain + bias.double() + residual.double(), atol=2e-6 * float(size), rtol=0
            )


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_are_rounded_block_by_block(ops: NativeOps, bits: int) -> None:
    weight, x = a_weight(20, 576, bits), torch.randn(6, 576)
    x[1, 32:64] = 0
    x[2] *= 1e-35
    x[3, 100] = 1000.0
    x = without_ties(x)
    found = ops.linear(x, ops.prepare(weight), None)
    wanted = rounded(x) @ weight.dense().double().T
    size = (x.abs().double() @ weight.dense().abs().double().T).max(dim=1, keepdim=True).values
    assert ((found - wanted).abs() <= 1e-4 * size + 1e-20).all()
    exact = x.double() @ weight.dense().double().T
    assert (found - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("bits", [4, 8])
def test_no_row_and_no_thread_changes_another_row(ops: NativeOps, bits: int) -> None:
    weight, x = ops.prepare(a_weight(150, 320, bits)), torch.randn(70, 320)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([ops.linear(row[None], weight, None) for row in x])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert torch.equal(ops.linear(x[:rows], weight, None), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("ops", NATIVE)
def test_what_is_not_a_number_stays_in_its_row(ops: NativeOps) -> None:
    weight, x = ops.prepare(a_weight(9, 96)), torch.randn(5, 96)
    wanted = ops.linear(x, weight, None)
    x[2, 40], x[4, 3] = float("nan"), float("inf")
    found = ops.linear(x, weight, None)
    assert not found[[2, 4]].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], wanted[[0, 1, 3]])


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding(ops: NativeOps, bits: int) -> None:
    weight, ids = a_weight(50, 96, bits), torch.tensor([3, 49, 0, 3])
    assert torch.equal(ops.embed(ids, ops.prepare(weight)), weight.dense()[ids])


@pytest.mark.parametrize("ops", NATIVE)
def test_as_stored_it_is_multiplied_by_plain_torch(ops: NativeOps) -> None:
    """C reads panels alone."""
    weight, x = a_weight(9, 96), torch.randn(5, 96)
    for plain_ops in (CpuOps(), RefOps(), ops):
        wanted = torch.nn.functional.linear(x, weight.dense())
        torch.testing.assert_close(plain_ops.linear(x, weight, None), wanted, atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(
            plain_ops.linear_add(x, weight, None, wanted.clone()), 2 * wanted, atol=1e-3, rtol=1e-5
        )


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_layers_in_one_call(ops: NativeOps, dtype: torch.dtype, tokens: int) -> None:
    """To the last bit as one operation after the other; the MLP's second projection is in 8 bits."""
    layer = a_layer(dtype, 4, 2, 32, normed=True, biased=True, hidden=96, inner=160)

    def in_blocks(weight: Weight) -> Weight:
        return ops.prepare(quantize_int4(weight.dense().float()))

    model = with_weights(layer, in_blocks)
    down = replace(model.mlp.out, weight=ops.prepare(a_weight(96, 160, 8)))
    model = replace(model, mlp=replace(model.mlp, out=down))
    tables = Tables([7 + tokens], 16)
    angles = torch.randn(tokens, 16)
    rope, start = (angles.cos(), angles.sin()), torch.randn(tokens, 96)
    cache = torch.randn(2, tables.blocks, 16, 2, 32).to(dtype)
    found = []
    for run in (in_one_call, run_layers):
        keys, values = cache.clone()
        found.append(run(ops, [model], start.clone(), rope, tables.batch([(0, 7, tokens)]), [(keys, values)]))
    assert torch.equal(found[0], found[1])
