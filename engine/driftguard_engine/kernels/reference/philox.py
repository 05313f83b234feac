"""Philox4x32-10: random numbers as a pure function of (request seed, position, purpose).

A request draws the same numbers whatever shares its batch, and a replay draws them again.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# One stream per purpose. A number that drew a draft token must never also decide its acceptance, nor
# replace it: the decision would then depend on the token, and the output would not have the target's
# distribution.
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3  # the token that the target itself adds: resampled after a rejection, or the bonus

# Added to the purpose of a token: which of the tokens proposed for it, from 1 on (`verify.propose`), and the
# two words more that such a token needs.
PROPOSED, MORE = 1 << 8, 1 << 16

RandomWords = NDArray[np.uint64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniforms_of(word: RandomWords) -> NDArray[np.float64]:
    """One uniform in [0, 1) for each random word: its upper 53 bits."""
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def words(seed: ArrayLike, position: ArrayLike, purpose: ArrayLike) -> RandomWords:
    """Two independent random words of 64 bits for each element: [2, ...], each two of 32, the first on top.

    seed, position, purpose: integers of 64 bits, broadcast together. Key = seed; counter = (position,
    purpose), low halves first.

    One integer of Python's holds the same 32-bit word of all N counters, 64 bits apart, so that products do
    not meet: for a few counters an operation on it takes a tenth of the time of numpy's.
    """
    given = np.empty((3, *np.broadcast(seed, position, purpose).shape), "<i8")
    given[0], given[1], given[2] = position, purpose, seed
    size = given[0].nbytes
    one = int.from_bytes(size // 8 * b"\1\0\0\0\0\0\0\0", "little")  # 1 of every counter
    low = one * 0xFFFFFFFF
    joined = (int.from_bytes(each.tobytes(), "little") for each in given)
    (word0, word1), (word2, word3), (key0, key1) = ((each & low, each >> 32 & low) for each in joined)
    for _ in range(10):
        # Words 0 and 2 take the high halves of each other's product, words 1 and 3 the low halves.
        product0, product2 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        word0, word1 = (product2 >> 32 & low) ^ word1 ^ key0, product2 & low
        word2, word3 = (product0 >> 32 & low) ^ word3 ^ key1, product0 & low
        key0, key1 = key0 + one * _WEYL[0] & low, key1 + one * _WEYL[1] & low
    drawn = (word0 << 32 | word1).to_bytes(size, "little") + (word2 << 32 | word3).to_bytes(size, "little")
    return np.frombuffer(drawn, "<u8").reshape(2, *given.shape[1:])
