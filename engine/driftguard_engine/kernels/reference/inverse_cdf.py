"""From masses and random bits to an index, in integers: exact, so that no order of addition can change it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from driftguard_engine.kernels.reference.philox import RandomWords
from driftguard_engine.kernels.reference.tiles import Number

MASS_BITS = 44  # of the largest mass in a row; 2**18 masses still add up to less than 2**63


def pick(mass: NDArray[Number], word: RandomWords) -> NDArray[np.int64]:
    """First index whose cumulative mass exceeds the fraction word / 2**64 of the total: [B].

    mass [B, N]: not negative, with a positive maximum in every row (without one: N - 1), any float dtype;
    word [B]: random. A mass below 2**-44 of its row's largest counts as none.
    """
    wide = mass.astype(np.float64)
    exponent = np.frexp(wide.max(-1, keepdims=True))[1]
    wide *= np.ldexp(1.0, MASS_BITS - exponent)  # by a power of two: exact
    held = wide.astype(np.int64).cumsum(-1)
    # floor(total x word / 2**64), which is below total: in Python's integers, which do not overflow.
    both = zip(held[:, -1].tolist(), word.tolist(), strict=True)
    threshold = np.array([total * fraction >> 64 for total, fraction in both], np.int64)
    index: NDArray[np.int64] = np.minimum((held <= threshold[:, np.newaxis]).sum(-1), mass.shape[-1] - 1)
    return index
