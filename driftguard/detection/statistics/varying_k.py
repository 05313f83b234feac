"""Requests of a stream whose K changes again and again: chosen by their sender, by the load, or by what was
accepted before.

K that follows acceptance selects: at a high load only the requests that accept best keep a large K, so that
the mean at one K moves with the load although no request accepts less. So in a stream whose K has changed
VARIES times,

- a request that gives counts of its first position is judged by that, whatever its K (as where K is not told:
  `driftguard.records.positions`);
- any other is compared with those of the same K, and what selection may explain is no change: SELECTION
  standard deviations between requests. A stratum that keeps the better half of requests that came evenly
  before has its mean moved by .8 of them, one that keeps the better two thirds by .55.

A K that is set anew now and then is no such stream, unless VARIES times: then the first position tells less
than all of them, and as true.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VARIES = 8  # changes of K from one drafted request to the next, over the life of a stream
SELECTION = 0.55


def varying(newest: int, changes: int, k: NDArray[np.int64]) -> tuple[NDArray[np.bool_], int, int]:
    """Which of N drafted requests that told their `k` [N] have one that varies; the newest K told (-1: none)
    and how often it changed, VARIES at most. `newest` and `changes` are those before them.
    """
    if len(k) == 0:
        return np.zeros(0, dtype=np.bool_), newest, changes
    before = np.concatenate([[k[0] if newest < 0 else newest], k[:-1]])
    so_far = changes + np.cumsum(k != before)
    return so_far >= VARIES, int(k[-1]), min(int(so_far[-1]), VARIES)
