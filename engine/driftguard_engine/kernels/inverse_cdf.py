"""From masses and random bits to an index, in integers: exact, so that no order of addition can change it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from driftguard_engine.kernels.philox import RandomWords
from driftguard_engine.kernels.tiles import Number

MASS_BITS = 44  # of the largest mass in a row; 2**18 masses still add up to less than 2**63


def pick(mass: NDArray[Number], word: RandomWords) -> NDArray[np.int64]:
    """First index whose cumulative mass exceeds the fraction word / 2**64 of the total: [B].

    mass [B, N]: not negative, with a positive maximum in every row (without one: N - 1), any float dtype;
    word [B]: random. A mass below 2**-44 of its row's largest counts as none.
    """
    wide = mass.astype(np.float64)
    exponent = np.frexp(wide.max(-1, keepdims=True))[1]
    np.ldexp(wide, MASS_BITS - exponent, out=wide)
    held = wide.astype(np.int64).cumsum(-1)
    threshold = _high_product(held[:, -1], word)
    index: NDArray[np.int64] = (held <= threshold[:, np.newaxis]).sum(-1)
    return index.clip(max=mass.shape[-1] - 1)


def _high_product(total: NDArray[np.int64], word: RandomWords) -> NDArray[np.int64]:
    """Upper 64 bits of total x word, by halves: floor(total x word / 2**64), which is below total."""
    half, low_bits = np.uint64(32), np.uint64(0xFFFFFFFF)
    a = total.astype(np.uint64)
    a_high, a_low, b_high, b_low = a >> half, a & low_bits, word >> half, word & low_bits
    middle = a_high * b_low + (a_low * b_low >> half)
    carried = a_low * b_high + (middle & low_bits)
    product: RandomWords = a_high * b_high + (middle >> half) + (carried >> half)
    return product.astype(np.int64)
