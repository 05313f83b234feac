"""Everything a detector remembers about one stream, as columns over segments.

A state is a value: folding never changes one, it makes the next. The arrays with a first dimension C
run over the stream's segments in order of first appearance; LANES are the bets (`bets.py`): ten that
acceptance fell, then ten that it rose.

Sessions (design §7) will need one more block of columns here (open sessions and their sums); the
version in the codec tells old states from new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.baseline import FIRST_CHECK, SUMS
from driftguard.detection.bets import LANES
from driftguard.detection.findings import Direction
from driftguard.records import MAX_SEGMENTS_PER_STREAM, OTHER_SEGMENT

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DIRECTIONS: tuple[Direction, Direction] = ("down", "up")
NOT_READY = -1


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The newest observations with drafted tokens, oldest first, all columns of one length H."""

    ordinal: Ints
    ended_ms: Ints  # milliseconds since 1970 UTC
    drafted: Ints
    accepted: Ints
    segment: NDArray[np.uint8]  # index into the stream's segments

    @classmethod
    def empty(cls) -> History:
        zero = _ints(0)
        return cls(zero, zero, zero, zero, np.zeros(0, dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.ordinal)


@dataclass(frozen=True, slots=True, eq=False)
class OpenIncident:
    """A change that was reported and is not over.

    D changed segments, strongest evidence first. Each belongs to one of K recovery tests: its own, or
    one common test when the alarm came from the stream as a whole.
    """

    opened_ordinal: int
    change_point: int  # ordinal
    change_point_ms: int  # milliseconds since 1970 UTC
    segments: NDArray[np.uint8]  # [D]
    evidence: Floats  # [D] each segment's sum M_c at the alarm
    midpoint: Floats  # [D] per request, between before and after
    test: Ints  # [D] index of the recovery test
    wealth: Floats  # [K, BETS]
    seen: Ints  # [K] requests tested
    last_seen: Ints  # [K] count of the stream's drafted observations when last seen
    outcome: Ints  # [K] see recovery.py


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamState:
    """One stream's detector. `StreamState()` starts one; `to_bytes` and `from_bytes` keep it."""

    ordinal: int = -1  # of the last observation folded
    requests: int = 0  # observations, with or without drafted tokens
    undrafted: int = 0
    undrafted_in_a_row: int = 0
    first_ended_at: float = 0.0  # earliest and latest end of any observation, seconds since 1970
    last_ended_at: float = 0.0
    requests_per_day: float = 0.0  # measured when the first segment became ready
    steady_since: float = 0.0  # seconds since 1970: first segment ready, or the last incident ended
    names: tuple[str, ...] = ()  # [C]
    drafted_requests: Ints = field(default_factory=lambda: _ints(0))  # [C]
    reference: Floats = field(default_factory=lambda: np.zeros((0, SUMS)))  # [C, SUMS]
    reference_size: Ints = field(default_factory=lambda: _ints(0))  # [C] requests at the next check
    reference_since: Floats = field(default_factory=lambda: np.zeros(0))  # [C] seconds since 1970
    ready_ordinal: Ints = field(default_factory=lambda: _ints(0))  # [C] or NOT_READY
    segment_evidence: Floats = field(default_factory=lambda: np.zeros((0, LANES)))  # [C, LANES] R_cj
    stream_evidence: Floats = field(default_factory=lambda: np.zeros(LANES))  # [LANES] G_j
    evidence_since: tuple[int, int] = (-1, -1)  # ordinal after which evidence counts: down, up
    incidents: tuple[OpenIncident | None, OpenIncident | None] = (None, None)  # down, up
    history: History = field(default_factory=History.empty)

    @property
    def ready(self) -> NDArray[np.bool_]:
        ready: NDArray[np.bool_] = self.ready_ordinal != NOT_READY
        return ready

    def to_bytes(self) -> bytes:
        """The state in a versioned format; equal states give equal bytes."""
        from driftguard.detection.codec import encode_state

        return encode_state(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> StreamState:
        """Raises UnreadableState: another version, or bytes that are damaged."""
        from driftguard.detection.codec import decode_state

        return decode_state(data)


def with_segments(state: StreamState, names: list[str]) -> StreamState:
    """The state with every new name given its row; beyond the limit all new names share 'other'."""
    known = dict.fromkeys(state.names)
    for name in dict.fromkeys(names):
        if name not in known:
            known[
                name if len(known.keys() - {OTHER_SEGMENT}) < MAX_SEGMENTS_PER_STREAM - 1 else OTHER_SEGMENT
            ] = None
    added = len(known) - len(state.names)
    if added == 0:
        return state
    return replace(
        state,
        names=tuple(known),
        drafted_requests=np.concatenate([state.drafted_requests, _ints(added)]),
        reference=np.concatenate([state.reference, np.zeros((added, SUMS))]),
        reference_size=np.concatenate([state.reference_size, _ints(added) + FIRST_CHECK]),
        reference_since=np.concatenate([state.reference_since, np.zeros(added)]),
        ready_ordinal=np.concatenate([state.ready_ordinal, _ints(added) + NOT_READY]),
        segment_evidence=np.concatenate([state.segment_evidence, np.zeros((added, LANES))]),
    )


def _ints(length: int) -> Ints:
    return np.zeros(length, dtype=np.int64)
