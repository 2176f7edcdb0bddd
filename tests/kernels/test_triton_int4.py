"""Products with weights in 4 bits in Triton against ref: on a GPU, or interpreted on the CPU if Triton is installed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.kernels.block_weight import BlockWeight, quantize_int4
from shoal.kernels.ref import RefOps
from tests.kernels.blocks import a_weight
from tests.kernels.interpreted import DEVICE, triton_ops

from shoal.kernels.triton import products4  # isort: skip  (after the interpreter has been chosen)

REF = RefOps()
KIND = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-5


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert difference < TOLERANCE, float(difference)


def weights(outputs: int, inputs: int) -> list[BlockWeight]:
    """As GGUF, AWQ and GPTQ files have them; the last has groups that fit no tile."""
    torch.manual_seed(inputs)
    found = [a_weight(outputs, inputs, group=group, dtype=dtype) for group, dtype in (
        (32, torch.float16), (32, torch.float32), (64, torch.float16), (4096, torch.float32), (96, torch.float16),
    )]  # fmt: skip
    return [one.to(DEVICE) for one in [*found, quantize_int4(torch.randn(outputs, inputs))]]


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 288)])
def test_the_matrix_as_numbers(outputs: int, inputs: int) -> None:
    for weight in weights(outputs, inputs):
        assert torch.equal(products4.widened(weight, torch.float32), weight.dense())


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 288), (40, 96)])
@pytest.mark.parametrize("rows", [1, 5, 20, 40])
def test_products(outputs: int, inputs: int, rows: int) -> None:
    """Every way, with and without bias and residual."""
    ops = triton_ops()
    for weight in weights(outputs, inputs):
        x = torch.randn(rows, inputs).to(KIND).to(DEVICE)
        bias, residual = (torch.randn(*size).to(KIND).to(DEVICE) for size in ((outputs,), (rows, outputs)))
        plain = REF.linear(x.float(), weight, None)
        close(ops.linear(x, weight, None), plain)
        close(ops.linear(x, weight, bias), plain + bias.float())
        close(ops.linear_add(x, weight, None, residual.clone()), plain + residual.float())
        close(ops.linear_add(x, weight, bias, residual.clone()), plain + bias.float() + residual.float())


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_programs_that_share_the_inputs(splits: int) -> None:
    weight, x = weights(64, 576)[0], torch.randn(20, 576).to(KIND).to(DEVICE)
    shape = products4.Tiling(16, 32, 128, splits, 4, 2)
    wanted = REF.linear(x.float(), weight, None)
    for _ in range(2):  # the counters are zero again
        close(products4.few_rows(x, weight, None, None, shape), wanted)


def test_groups_of_other_sizes_are_not_for_tiles() -> None:
    one = weights(32, 288)
    assert [products4.fits(weight, 128) for weight in one] == [True, True, True, True, False, True]
    assert not products4.fits(replace(one[0], offset_group=64), 128)
