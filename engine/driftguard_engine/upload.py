"""Copies from the host to the device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The values on the device: [len(values)].

    A copy from pageable memory would wait for all that is queued. This one is from pinned memory, which torch
    does not reuse before the copy is done.
    """
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
