"""Counts of each worker, in shared memory, so that every worker can compute the totals."""

from __future__ import annotations

import mmap
from typing import Final, Literal, get_args

from driftguard.proxy.recording import REASONS

RECORDED: Final = "recorded"
Outcome = Literal[
    "answered",  # whatever the status
    "client_gone",
    "unreachable",
    "timeout",
    "broken_off",  # the upstream ended the connection before the end of its answer
    "refused",  # not passed on: WebSocket, CONNECT, ambiguous requests
]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
RECORDS: Final = (RECORDED, *REASONS)
ADDED_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)  # seconds

# Places in a row.
PROCESS_ID: Final = 0
IN_FLIGHT: Final = 1
QUEUED: Final = 2
SENT, REFUSED, DROPPED, SEND_FAILURES = range(3, 7)
RESTARTS: Final = 7
MADE_ROOM: Final = 8
ADDED_SECONDS: Final = 9
ADDED: Final = 10  # a place for each bucket, and one for longer times
REQUESTS: Final = ADDED + len(ADDED_BUCKETS) + 1  # outcome by outcome, a place for each of RECORDS
_PLACES: Final = REQUESTS + len(OUTCOMES) * len(RECORDS)
_BYTES: Final = 8


class SharedCounts:
    """A row per worker, which that worker alone writes. It outlives a worker that is killed."""

    def __init__(self, workers: int = 1) -> None:
        numbers = memoryview(mmap.mmap(-1, workers * _PLACES * _BYTES)).cast("d")
        self.rows = [numbers[first : first + _PLACES] for first in range(0, workers * _PLACES, _PLACES)]

    def total(self, place: int) -> float:
        return sum([row[place] for row in self.rows])

    def bury(self, worker: int) -> None:
        """After a worker was killed: records that waited in its memory are lost, and another worker takes its
        place."""
        row = self.rows[worker]
        row[DROPPED] += row[QUEUED]
        row[QUEUED] = row[IN_FLIGHT] = row[PROCESS_ID] = 0
        row[RESTARTS] += 1
