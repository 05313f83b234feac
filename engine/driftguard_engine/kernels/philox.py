"""Philox4x32-10: random numbers as a pure function of (request seed, position, purpose).

A request draws the same numbers whatever shares its batch, and a replay draws them again.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# One stream per purpose. A number that drew a draft token must never also decide its acceptance, nor
# replace it: the decision would then depend on the token, and the output would leave the target's law.
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3  # the token that the target itself adds: resampled after a rejection, or the bonus

Words = NDArray[np.uint32]
RandomWords = NDArray[np.uint64]

_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint32)  # of words 2 and 0
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint32)
_KEY_STEPS = np.arange(10, dtype=np.uint32).reshape(-1, 1, 1) * _WEYL  # [10, 2, 1], modulo 2**32


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds over N counters at once: counter [4, N], key [2, N] -> [4, N], low words first."""
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for round_key in key + _KEY_STEPS:
        # Words 0 and 2 take the high halves of each other's product, words 1 and 3 the low halves.
        product = np.multiply(even[::-1], _MULTIPLIERS, dtype="<u8", order="C").view("<u4")
        even, odd = product[:, 1::2] ^ odd ^ round_key, product[:, 0::2]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seed: ArrayLike, position: ArrayLike, purpose: ArrayLike) -> NDArray[np.float64]:
    """One uniform in [0, 1) for each element, with all 53 bits random: the upper bits of word 0.

    seed, position, purpose: integers, broadcast together.
    """
    return uniforms_of(words(seed, position, purpose)[0])


def uniforms_of(word: RandomWords) -> NDArray[np.float64]:
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def words(seed: ArrayLike, position: ArrayLike, purpose: ArrayLike) -> RandomWords:
    """Two independent random words of 64 bits for each element: [2, ...].

    seed, position, purpose: integers, broadcast together. Key = the seed's 64 bits; counter = (position's
    64 bits, purpose, 0).
    """
    arrays = np.broadcast_arrays(position, seed, purpose)
    shape = arrays[0].shape
    halves = np.stack(arrays).astype("<i8", copy=False).reshape(3, -1).view("<u4")
    low, high = halves[:, 0::2], halves[:, 1::2]  # [3, N]: of position, seed, purpose
    drawn = philox4x32(np.stack((low[0], high[0], low[2], high[2])), np.stack((low[1], high[1])))
    wide = drawn.astype(np.uint64)
    return ((wide[0::2] << np.uint64(32)) | wide[1::2]).reshape(2, *shape)
