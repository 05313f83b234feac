"""What is counted of every observation, whether it holds evidence or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.stream_state import StreamState

Ints = NDArray[np.int64]

SECONDS_PER_DAY = 86_400.0
TOKENS_OF_A_REQUEST = 32
MOST_REQUESTS_OF_A_WINDOW = 25  # so that it takes several windows to say that drafting stopped


def windows_in(batch: ObservationBatch) -> NDArray[np.bool_]:
    if "window" not in batch.kind:  # as in nearly every batch
        return np.zeros(len(batch), dtype=np.bool_)
    return np.array([kind == "window" for kind in batch.kind], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one batch."""

    last_ordinal: int
    requests: int
    undrafted: int
    undrafted_at_end: int
    all_undrafted: bool
    first_ended_at: float  # earliest and latest end, seconds since 1970
    last_ended_at: float

    def after(self, before: StreamState) -> dict[str, Any]:
        """The fields of the state that follows `before` which this counts."""
        first = before.requests == 0
        return {
            "ordinal": self.last_ordinal,
            "requests": before.requests + self.requests,
            "undrafted": before.undrafted + self.undrafted,
            "undrafted_in_a_row": self.undrafted_at_end
            + (before.undrafted_in_a_row if self.all_undrafted else 0),
            "first_ended_at": self.first_ended_at
            if first
            else min(before.first_ended_at, self.first_ended_at),
            "last_ended_at": self.last_ended_at if first else max(before.last_ended_at, self.last_ended_at),
        }


def _requests_in(batch: ObservationBatch) -> Ints:
    """[N] how much an observation without a draft says about drafting: an idle window nothing, one in which
    tokens were generated as much as some requests of that many tokens."""
    tokens = np.maximum(batch.output_tokens, 0)
    of_window = np.minimum(tokens // TOKENS_OF_A_REQUEST, MOST_REQUESTS_OF_A_WINDOW)
    return np.where(windows_in(batch), of_window, 1)


def counts_of(batch: ObservationBatch, starts: Ints) -> list[Counts]:
    """Of batches that follow one another as one: each begins at its start and has an observation."""
    ends = np.append(starts[1:], len(batch))
    drafted = batch.drafted > 0
    last_drafted = np.maximum.reduceat(np.where(drafted, np.arange(len(batch)), -1), starts)
    so_far = np.concatenate([[0], np.cumsum(~drafted * _requests_in(batch))])
    columns = (
        batch.ordinal[ends - 1],
        ends - starts,
        np.add.reduceat((~drafted).astype(np.int64), starts),
        so_far[ends] - so_far[np.maximum(last_drafted + 1, starts)],
        last_drafted < starts,
        np.minimum.reduceat(batch.ended_at, starts),
        np.maximum.reduceat(batch.ended_at, starts),
    )
    return [Counts(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def counted(before: StreamState, state: StreamState, batch: ObservationBatch) -> StreamState:
    """`state` with the totals of `before` and the whole batch."""
    (counts,) = counts_of(batch, np.zeros(1, dtype=np.int64))
    return replace(state, **counts.after(before))


def requests_per_day(state: StreamState) -> float:
    """Traffic measured so far; 0 where all requests ended at one moment."""
    span = state.last_ended_at - state.first_ended_at
    return state.requests / span * SECONDS_PER_DAY if span > 0 else 0.0
