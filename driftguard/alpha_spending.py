"""How one level, or one unit of wealth, is shared among tests whose number nobody knows beforehand. Pure."""

from __future__ import annotations

import math
from typing import Final

# sum over n >= 2 of 1 / (n ln^2 n) = 2.10974...: the first 10^7 terms, and 1 / ln(10^7 - 1/2) for all others.
_TOTAL: Final = 2.11


def share(before: int) -> float:
    """What the test that follows `before` >= 0 others gets: 1 / (2.11 n ln^2 n) with n = before + 2.

    Derivation: by the integral test the sum over n >= 2 of 1 / (n ln^p n) is infinite for p = 1 and finite
    for every p > 1, as the integral of 1 / (x ln^p x) is ln^(1 - p) x / (1 - p). With p = 2 it is 2.1097, so
    that all shares together are just below 1. The n-th falls hardly faster than 1 / n: what is found after n
    tests needs about log n + 2 log log n more evidence than at once.

    Uses: a level a that is spent as a share(0), a share(1), ... on tests that follow each other holds for all
    of them together, however they depend on each other (Bonferroni). One unit of wealth that is put as
    share(t) on bets that begin at time t stays a supermartingale (a mixture): Ville's inequality applies.
    Source: Lan, DeMets 1983, "Discrete sequential boundaries for clinical trials" (spending a level over
    looks); Howard, Ramdas, McAuliffe, Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence
    sequences" (series like this one).
    """
    n = before + 2
    return 1.0 / (_TOTAL * n * math.log(n) ** 2)
