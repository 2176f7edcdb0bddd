"""Arrays of the host onto a device, without waiting for the device. Knows arrays and tensors only."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: "np.ndarray[tuple[int, ...], np.dtype[Any]]", device: torch.device) -> Tensor:
    """The array as a tensor: the same memory on a CPU, a queued copy from pinned memory elsewhere."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
