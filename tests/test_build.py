"""Wiring: what cannot be built is refused before anything is loaded."""

import pytest
import torch

from shoal.build import pick_device
from shoal.errors import BadConfig, UnknownName


def test_auto_is_a_device_that_is_there() -> None:
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadConfig, match="no usable NVIDIA GPU"):
        pick_device("cuda")


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="known: auto, cpu, cuda"):
        pick_device("tpu")
