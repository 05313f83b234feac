"""From the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """int64 or float32, [len(values)].

    A copy from pageable memory would wait for all that is queued. torch keeps pinned memory that it has
    handed out until the copies from it are done.
    """
    tensor = torch.tensor(values)
    if tensor.dtype == torch.float64:  # never torch's default here, but a caller may have set it
        tensor = tensor.float()
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
