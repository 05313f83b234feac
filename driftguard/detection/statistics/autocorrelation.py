"""How far are neighbouring requests alike, where no session says which of them belong together?

Requests of one conversation are alike. Where nothing names the conversation, the reference period of a
stratum tells how far the likeness reaches, by the variance between neighbouring blocks of B = 2^k requests

    W_B = mean over pairs of neighbouring blocks of (sum of the one - sum of the other)^2 / (2 B)

for residuals around the line (`baseline.py`). Every W_B is the variance of a request where requests are
independent. Where they are alike over a short distance, W_B grows with B up to n times the variance of a
mean of n requests. A slow movement (the hours of a day) hardly shows, because only neighbours are compared.

Demanded: blocks are used where requests of one block are alike, shown at DEMAND_LEVEL by the F test of a
one-way layout with the blocks as groups, over every B tried, with Bonferroni's correction.
Length: the smallest B with W_B >= REACHED of the largest W, once the next scale was measured too; until
then the reference period is lengthened. Neighbouring blocks are then correlated by about .1 (conversations
of 8 to 12 requests one after the other: mostly B = 16). Where that B is 1, what the F test saw moves more
slowly than any block could mend, and there are none.
Assumption: likeness ends within an hour; what lasts longer is no conversation.
Not seen: likeness too weak for the requests of a reference period. Of 20 conversations that take turns at
random, neighbours are alike by .025, which some 400 requests cannot show.
Papers: Allan 1966 and Percival 1995 (variances of neighbouring averages, the Haar wavelet variance);
Flegal, Jones 2010 (batch means).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

Floats = NDArray[np.float64]

SCALES = 10  # B = 1, 2, 4, .. 512
# sums over pairs: squared difference of x, that of x times that of l, squared difference of l;
# then x and l of the block that waits for its neighbour (0 where none does)
PAIRED = 5
BLOCK = 3  # length in requests (0: no blocks), W_B, pairs that W_B is from
DEMAND_LEVEL = 1e-3
LEAST_PAIRS = 16  # before a W_B is looked at
LEAST_SCALES = 5  # before W_B is said not to grow
REACHED = 0.8


def add_neighbours(neighbours: Floats, before: int, x: Floats, log_length: Floats) -> Floats:
    """Sums [SCALES, PAIRED] of a stratum's first `before` requests, and of T more.

    Blocks are joined two by two, so that every sum is the same to the last bit however requests arrive.
    """
    after, blocks = neighbours.copy(), np.stack([x, log_length], axis=1)
    for scale in range(SCALES):
        if len(blocks) == 0:
            break
        if before >> scale & 1:
            blocks = np.vstack([after[scale, 3:], blocks])
        pairs = len(blocks) // 2
        first, second = blocks[: 2 * pairs : 2], blocks[1 : 2 * pairs : 2]
        dx, dl = (first - second).T
        added = np.stack([dx * dx, dx * dl, dl * dl], axis=1)
        after[scale, :3] = np.add.accumulate(np.vstack([after[scale, :3], added]), axis=0)[-1]
        after[scale, 3:] = blocks[-1] if len(blocks) % 2 else 0.0
        blocks = first + second
    return after


def blocks_needed(
    neighbours: Floats, requests: int, slope: float, squares: float, requests_per_hour: float
) -> tuple[Floats, int]:
    """The blocks of a stratum [BLOCK], and the size of the reference period from which they can be told.

    `squares` is the sum of squared residuals of the `requests`. A size above `requests`: not yet.
    """
    sizes = np.exp2(np.arange(SCALES, dtype=np.float64))
    pairs = np.floor(requests / (2.0 * sizes))
    within_hour = sizes <= max(requests_per_hour, 1.0)
    told = int(((pairs >= LEAST_PAIRS) & within_hour).sum())
    sums = neighbours[:told]
    variance = (sums[:, 0] - 2.0 * slope * sums[:, 1] + slope**2 * sums[:, 2]) / (2.0 * sizes * pairs)[:told]
    variance = np.maximum(variance, 0.0)
    if not _alike(variance, pairs[:told], requests, squares):
        return np.zeros(BLOCK), requests
    reach = int((variance >= REACHED * variance.max()).argmax())
    wanted = max(reach + 2, LEAST_SCALES)  # to see that it does not grow further
    if told < wanted and within_hour[:wanted].sum() > told:
        return np.zeros(BLOCK), math.ceil(2 * LEAST_PAIRS * sizes[within_hour][:wanted].max())
    if reach == 0:
        return np.zeros(BLOCK), requests
    return np.array([sizes[reach], variance[reach], pairs[reach]]), requests


def _alike(variance: Floats, pairs: Floats, requests: int, squares: float) -> bool:
    """The F tests: blocks of 2, 4, .. requests as groups. Inside them vary the finer differences."""
    within, freedom = np.cumsum(variance * pairs), np.cumsum(pairs)
    between, left = squares - within, requests - 1.0 - freedom
    ratio = between / left / np.maximum(within / freedom, 1e-12)
    return bool((fdtrc(left, freedom, np.maximum(ratio, 0.0)) < DEMAND_LEVEL / max(len(pairs), 1)).any())
