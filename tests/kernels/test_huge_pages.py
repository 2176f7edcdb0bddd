"""Weights in huge pages: the same values, side by side, in memory that is given back."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.kernels.cpu.huge_pages import ALIGN, CHUNK, HUGE, HugePages
from shoal.kernels.weights import DenseWeight, quantize

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def area_of(values: Tensor) -> dict[str, str]:
    """What Linux knows of the memory that a tensor lies in."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and ":" not in name:
            first, last = (int(one, 16) for one in name.split("-"))
            inside = first <= values.data_ptr() < last
        elif inside:
            found[name.rstrip(":")] = rest.strip()
    return found


def test_values_are_the_same_whatever_their_sizes_and_types() -> None:
    memory = HugePages()
    tensors = [
        torch.randn(3, 5),
        torch.randn(64, 7).to(torch.bfloat16),
        torch.randint(-128, 128, (17, 3), dtype=torch.int8),
        torch.randn(8, 6).t(),
        torch.randn(CHUNK // 4 + 100, 1),  # more than a chunk
        torch.empty(0, 4),
        torch.randn(2, 2),
    ]
    moved = [memory.copied(one) for one in tensors]
    for before, after in zip(tensors, moved, strict=True):
        assert torch.equal(before, after)
        assert after.is_contiguous()
        assert not after.numel() or after.data_ptr() % ALIGN == 0


def test_small_weights_share_a_chunk_that_begins_with_a_huge_page() -> None:
    memory = HugePages()
    first, second = (memory.moved(DenseWeight(torch.randn(40, 100))).dense() for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 40 * 100 * 4
    if sys.platform == "linux":
        assert first.data_ptr() % HUGE == 0


def test_weights_in_8_bits_are_moved_too() -> None:
    weight = quantize(torch.randn(32, 64))
    values = weight.stored.dense()
    moved = HugePages().moved(weight)
    assert moved is not weight
    assert torch.equal(moved.stored.dense(), values)  # type: ignore[attr-defined]


@linux
def test_huge_pages_are_asked_for() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no huge pages")
    assert "hg" in area_of(HugePages().copied(torch.ones(1000)))["VmFlags"].split()


@linux
def test_a_chunk_goes_back_to_the_system_with_its_last_weight() -> None:
    memory = HugePages()
    kept = memory.copied(torch.ones(CHUNK // 4))  # a whole chunk
    memory.copied(torch.ones(4))  # the newest one is another
    address = kept.data_ptr()
    assert int(area_of(kept)["Rss"].split()[0]) >= CHUNK // 1024
    del kept
    gc.collect()
    regions = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    assert not any(int(first, 16) <= address < int(last, 16) for first, last in regions)
