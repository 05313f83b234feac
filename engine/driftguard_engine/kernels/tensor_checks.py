"""Checks of logits and sampling parameters before anything is computed from them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.reference.exp2 import Singles
from driftguard_engine.kernels.reference.sampling import SamplingBatch, Truths


class InvalidLogits(ValueError):
    """{argument}{index}: NaN, +inf, or nothing above -inf; a row of logits needs a finite maximum.

    `rows` are the batch rows concerned: the others can be verified without them.
    """

    def __init__(self, argument: str, indices: list[list[int]]) -> None:
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        super().__init__(
            f"{argument}{indices[0]}{more}: NaN, +inf, or nothing above -inf; "
            "a row of logits needs a finite maximum"
        )
        self.rows = tuple(sorted({index[0] for index in indices}))


def expect(
    name: str,
    value: Tensor,
    shape: tuple[int | None, ...],
    *,
    floating: bool,
    device: torch.device | None = None,
) -> None:
    """Refuse what is not a tensor of this shape (None: any size from 1), kind of number and device."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")  # noqa: TRY004
    sizes = tuple(value.shape)
    if sizes != shape and not _fits(sizes, shape):
        wanted = ", ".join("at least 1" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(sizes)}")
    kind = value.dtype.is_floating_point
    if kind != floating or (not kind and (value.dtype == torch.bool or value.dtype.is_complex)):
        raise ValueError(f"{name} must hold {'floats' if floating else 'integers'}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like the logits, got {value.device}")


def _fits(sizes: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(sizes) == len(shape) and all(
        size > 0 if want is None else size == want for size, want in zip(sizes, shape, strict=True)
    )


def expect_range(name: str, value: Tensor, least: float, most: float) -> None:
    for row, number in enumerate(value.tolist()):
        if not least <= number <= most:  # nor is NaN
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise ValueError(f"{name}[{row}] must be at least {least:g}{limit}, got {number}")


def without_distribution(logits: Singles, read: Truths) -> Truths:
    """Which rows of [..., V] will be read and have no finite maximum."""
    lacking: Truths = ~np.isfinite(logits.max(-1)) & read
    return lacking


def expect_distributions(argument: str, logits: Singles, read: Truths) -> None:
    """Refuse a row of [..., V] that will be read and has no finite maximum: it has no distribution."""
    wrong = without_distribution(logits, read)
    if wrong.any():
        raise InvalidLogits(argument, np.argwhere(wrong).tolist())


def checked_sampling(
    temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, batch: int, device: torch.device
) -> SamplingBatch:
    """Arguments [batch], on this device, as in `verify.verify_chain`. Raises ValueError."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        expect(name, value, (batch,), floating=True, device=device)
    for name, value in (("top_k", top_k), ("seed", seed)):
        expect(name, value, (batch,), floating=False, device=device)
    expect_range("temperature", temperature, 0, torch.finfo(temperature.dtype).max)
    expect_range("top_p", top_p, 0, math.inf)
    return SamplingBatch.of(temperature, top_k, top_p, seed)
