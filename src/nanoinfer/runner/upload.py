"""From the host to the device without waiting for what the device is doing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `array` on `device`; the array may change at once."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    # The pinned allocator knows of the copy under way and does not hand the buffer out before it has run.
    return tensor.pin_memory().to(device, non_blocking=True)
