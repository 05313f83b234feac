"""What the detector reads: requests (or counter windows) of one stream, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftguard.records import AcceptanceRecord

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LARGEST_SECONDS = 253_402_300_800.0  # the year 10,000


@dataclass(frozen=True, slots=True, eq=False)
class ObservationBatch:
    """N observations of one stream, oldest first. A window of a counter is one observation.

    `ordinal` [N] is any strictly increasing number by which the caller finds the record again (the
    store's seq, a line number); `drafted` and `accepted` [N] are tokens, 0 <= accepted <= drafted;
    `ended_at` [N] is in seconds since 1970 UTC. Raises ValueError when a column breaks this.
    """

    ordinal: Ints  # [N]
    segment: Sequence[str]  # [N]
    drafted: Ints  # [N] tokens
    accepted: Ints  # [N] tokens
    ended_at: Floats  # [N] seconds since 1970 UTC

    def __post_init__(self) -> None:
        lengths = {
            len(column) for column in (self.ordinal, self.segment, self.drafted, self.accepted, self.ended_at)
        }
        if len(lengths) > 1:
            raise ValueError(f"columns of a batch must have one length, not {sorted(lengths)}")
        if (np.diff(self.ordinal) <= 0).any() or (self.ordinal[:1] < 0).any():
            raise ValueError("ordinal must be at least 0 and increase from observation to observation")
        if (self.accepted < 0).any() or (self.accepted > self.drafted).any():
            raise ValueError("accepted must lie between 0 and drafted in every observation")
        if not (np.abs(self.ended_at) < LARGEST_SECONDS).all():
            raise ValueError("ended_at must be seconds since 1970, before the year 10,000")

    def __len__(self) -> int:
        return len(self.ordinal)

    def __getitem__(self, part: slice) -> ObservationBatch:
        return ObservationBatch(
            self.ordinal[part],
            self.segment[part],
            self.drafted[part],
            self.accepted[part],
            self.ended_at[part],
        )

    @classmethod
    def of(
        cls,
        ordinal: Sequence[int] | Ints,
        segment: Sequence[str],
        drafted: Sequence[int] | Ints,
        accepted: Sequence[int] | Ints,
        ended_at: Sequence[float] | Floats,
    ) -> ObservationBatch:
        """From plain sequences."""
        return cls(
            np.asarray(ordinal, dtype=np.int64),
            segment,
            np.asarray(drafted, dtype=np.int64),
            np.asarray(accepted, dtype=np.int64),
            np.asarray(ended_at, dtype=np.float64),
        )

    @classmethod
    def from_records(cls, ordinals: Sequence[int], records: Sequence[AcceptanceRecord]) -> ObservationBatch:
        """From records of one stream; probes are the caller's to leave out."""
        return cls.of(
            ordinals,
            [record.segment for record in records],
            [record.drafted for record in records],
            [record.accepted for record in records],
            [record.ended_at.timestamp() for record in records],
        )
