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

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch

VARIES = 8  # changes of K from one drafted request to the next, over the life of a stream
SELECTION = 0.55


def with_varying_k(
    newest: int, changes: int, batch: ObservationBatch
) -> tuple[ObservationBatch, NDArray[np.bool_], int, int]:
    """The batch without the K of requests that are judged by their first position instead, which others [N]
    have a K that varies; and the newest K told (-1: none) and how often it changed, VARIES at most.

    `newest` and `changes` are those before the batch.
    """
    k = batch.num_speculative_tokens
    told = (k >= 0) & (batch.drafted > 0)
    if "window" in batch.kind:
        told &= np.array([kind == "request" for kind in batch.kind], dtype=np.bool_)
    places = np.flatnonzero(told)
    varies = np.zeros(len(batch), dtype=np.bool_)
    if len(places) == 0:
        return batch, varies, newest, changes
    own = k[places]
    before = np.concatenate([[own[0] if newest < 0 else newest], own[:-1]])
    so_far = changes + np.cumsum(own != before)
    varies[places] = so_far >= VARIES
    by_first = varies & (batch.first_drafted >= 0)
    if by_first.any():
        batch = replace(batch, num_speculative_tokens=np.where(by_first, -1, k))
    return batch, varies & ~by_first, int(own[-1]), min(int(so_far[-1]), VARIES)
