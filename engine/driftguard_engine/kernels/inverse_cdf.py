"""From masses and random bits to an index, in integers: exact, so that no order of addition can change it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftguard_engine.kernels.philox import RandomWords

MASS_BITS = 44  # of the largest mass in a row; 2**18 masses still add up to less than 2**63


def pick(mass: Tensor, word: RandomWords) -> Tensor:
    """First index whose cumulative mass exceeds the fraction word / 2**64 of the total: int64 [B].

    mass [B, N]: not negative, with a positive maximum in every row (without one: N - 1), any float dtype;
    word [B]: random. A mass below 2**-44 of its row's largest counts as none.
    """
    wide = mass.double()
    exponent = torch.frexp(wide.amax(-1, keepdim=True)).exponent
    held = torch.ldexp(wide, MASS_BITS - exponent).long().cumsum(-1)
    threshold = torch.from_numpy(_high_product(held[:, -1].cpu().numpy(), word)).to(mass.device)
    return (
        torch.searchsorted(held, threshold.unsqueeze(1), right=True).squeeze(1).clamp_(max=mass.shape[-1] - 1)
    )


def _high_product(total: NDArray[np.int64], word: RandomWords) -> NDArray[np.int64]:
    """Upper 64 bits of total x word, by halves: floor(total x word / 2**64), which is below total."""
    half, low_bits = np.uint64(32), np.uint64(0xFFFFFFFF)
    a = total.astype(np.uint64)
    a_high, a_low, b_high, b_low = a >> half, a & low_bits, word >> half, word & low_bits
    middle = a_high * b_low + (a_low * b_low >> half)
    carried = a_low * b_high + (middle & low_bits)
    product: RandomWords = a_high * b_high + (middle >> half) + (carried >> half)
    return product.astype(np.int64)
