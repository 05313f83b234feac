"""What is counted of every observation, whether it holds evidence or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state import StreamState

SECONDS_PER_DAY = 86_400.0


def windows_in(batch: ObservationBatch) -> NDArray[np.bool_]:
    return np.array([kind == "window" for kind in batch.kind], dtype=np.bool_)


def counted(before: StreamState, state: StreamState, batch: ObservationBatch) -> StreamState:
    """`state` with the totals of `before` and the whole batch."""
    earliest, latest = float(batch.ended_at.min()), float(batch.ended_at.max())
    first = before.requests == 0
    drafted = np.flatnonzero(batch.drafted > 0)
    undrafted = (batch.drafted == 0) & ~windows_in(batch)  # an idle window says nothing about drafting
    in_a_row = int(undrafted[drafted[-1] + 1 :].sum() if len(drafted) else undrafted.sum())
    in_a_row += 0 if len(drafted) else before.undrafted_in_a_row
    return replace(
        state,
        ordinal=int(batch.ordinal[-1]),
        requests=before.requests + len(batch),
        undrafted=before.undrafted + len(batch) - len(drafted),
        undrafted_in_a_row=in_a_row,
        first_ended_at=earliest if first else min(before.first_ended_at, earliest),
        last_ended_at=latest if first else max(before.last_ended_at, latest),
    )


def requests_per_day(state: StreamState) -> float:
    """Traffic measured so far; 0 where all requests ended at one moment."""
    span = state.last_ended_at - state.first_ended_at
    return state.requests / span * SECONDS_PER_DAY if span > 0 else 0.0
