"""Kernels with a fixed order of sums against ref: on a GPU, or interpreted on the CPU where Triton is installed.

That no bit depends on the batch can only be seen on a GPU (tests/gpu/test_ordered.py): an interpreted product is
numpy's, whose order depends on shapes.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.interpreted import DEVICE, triton_ops
from tests.kernels.test_triton import KINDS, close, compare


@pytest.fixture(scope="module")
def ops() -> Any:
    return triton_ops(ordered=True)


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 64), (2, 2, 80)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 3, 70])
def test_few_queries_beside_single_ones_and_prompts(ops: Any, shape: Any, kind: Any, window: int) -> None:
    """Pasts that end on the border of a tile, before it and behind it."""
    queries, pasts = [2, 5, 1, 4, 16, 33], [0, 60, 127, 63, 190, 20]
    pieces = [(at, past, new) for at, (past, new) in enumerate(zip(pasts, queries, strict=True))]
    compare(ops, pieces, shape, kind, window)


@pytest.mark.parametrize("new", [1, 4, 20])
@pytest.mark.parametrize("past", [1023, 1024, 2100])
@pytest.mark.parametrize("window", [0, 1100])
def test_pasts_of_several_spans(ops: Any, new: int, past: int, window: int) -> None:
    compare(ops, [(0, past, new)], (4, 1, 64), torch.float16, window)


def test_one_program_for_all_spans(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many sequences."""
    from shoal.kernels.triton import ordered_attention

    monkeypatch.setattr(ordered_attention, "PARTS", 0)
    compare(ops, [(0, 2100, 1), (1, 5, 1), (2, 1024, 3)], (4, 1, 64), torch.float16, 0)


@pytest.mark.parametrize("rows", [1, 16, 17, 50, 100, 129, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(300, 96), (1300, 64), (512, 200)])
def test_products(ops: Any, rows: int, inputs: int, outputs: int) -> None:
    from shoal.kernels.weights import DenseWeight

    torch.manual_seed(rows)
    kind = torch.float16
    x, weight = torch.randn(rows, inputs).to(kind), (torch.randn(outputs, inputs) / inputs**0.5).to(kind)
    bias, residual = torch.randn(outputs).to(kind), torch.randn(rows, outputs).to(kind)
    there, stored = x.to(DEVICE), DenseWeight(weight.to(DEVICE))
    plain = linear(x.float(), weight.float(), bias.float())
    close(ops.linear(there, stored, bias.to(DEVICE)).cpu(), plain.to(kind))
    close(
        ops.linear_add(there, stored, bias.to(DEVICE), residual.to(DEVICE)).cpu(), (plain + residual.float()).to(kind)
    )
    close(ops.linear_add(there, stored, None, residual.to(DEVICE)).cpu(), (plain - bias + residual.float()).to(kind))


@pytest.mark.parametrize("inputs", [256, 300])
def test_tiles_of_every_size(ops: Any, inputs: int) -> None:
    """Lines of 300 numbers of two bytes are too crooked for the copy engine, those of 256 are not."""
    from shoal.kernels.triton import ordered_products as products

    torch.manual_seed(inputs)
    x, weight = (torch.randn(rows, inputs).to(torch.float16).to(DEVICE) for rows in (70, 200))
    assert products.is_aligned(x) == products.is_aligned(weight) == (inputs == 256)
    plain = linear(x.float(), weight.float()).to(torch.float16).cpu()
    for tiles in (*products.FEW, products.SMALL, products.MIDDLE, products.LARGE, products.WIDE):
        close(products.multiply(x, weight, None, None, torch.float16, tiles).cpu(), plain)


def test_a_gpu_has_room_for_the_tiles_and_enough_of_them() -> None:
    from shoal.kernels.triton import ordered_products as products

    for rows, columns in product((1, 16, 17, 33, 64, 65, 128, 129, 500, 9000), (64, 1000, 4096, 28672, 128256)):
        tiles = products.tiles_for(rows, columns)
        assert (tiles.rows + tiles.columns) * tiles.inputs * tiles.stages <= 227 * 1024
        assert tiles.rows * tiles.columns <= 128 * 32 * tiles.warps  # sums in half of the registers
        if tiles in (products.MIDDLE, products.LARGE, products.WIDE):
            assert -(-rows // tiles.rows) * -(-columns // tiles.columns) >= products.ENOUGH
