"""A bounded buffer of records to send: the oldest is dropped first, and everything is counted. Not
thread-safe."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from driftguard.client.protocol import Outcome, SidecarUnavailable
from driftguard.records import AcceptanceRecord, encode_record

log = logging.getLogger("driftguard.client")


@dataclass(slots=True)
class Counts:
    """Records given to `send`, by outcome; `waiting` records may still get any other outcome."""

    sent: int = 0
    refused: int = 0
    dropped: int = 0
    waiting: int = 0
    failed_attempts: int = 0  # of batches


class Buffer:
    """At most `max_records` wait, apart from the batch of at most `max_batch` that is being sent."""

    def __init__(self, max_records: int, max_batch: int) -> None:
        """Raises ValueError."""
        for name, value in (("max_buffered", max_records), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name}: {value} is less than 1")
        self._max_records = max_records
        self._max_batch = max_batch
        self._lines: deque[bytes] = deque()
        self._is_away = False
        self._dropped_before: int | None = None  # of counts.dropped, while records are being dropped
        self.counts = Counts()

    def add(self, record: AcceptanceRecord) -> None:
        """Never raises: a record that cannot be written as JSON is refused here, as the sidecar would refuse
        it."""
        try:
            line = encode_record(record)
        except (TypeError, ValueError, RecursionError) as error:
            self.counts.refused += 1
            log.error("refused a record that cannot be written as JSON: %s", error)
            return
        while len(self._lines) >= self._max_records:  # more, where a batch was put back
            self._note_drop()
            self._lines.popleft()
            self.counts.dropped += 1
            self.counts.waiting -= 1
        self._lines.append(line)
        self.counts.waiting += 1

    @property
    def is_empty(self) -> bool:
        return not self._lines

    @property
    def has_a_batch(self) -> bool:
        return len(self._lines) >= self._max_batch

    def take(self) -> list[bytes]:
        """The next batch; it still counts as waiting until one of the methods below is called for it."""
        return [self._lines.popleft() for _ in range(min(self._max_batch, len(self._lines)))]

    def take_smaller_batches(self, batch: list[bytes]) -> None:
        """Puts a batch that was too large for the sidecar back, to be taken in halves."""
        self._max_batch = max(1, len(batch) // 2)
        self._lines.extendleft(reversed(batch))

    def answered(self, outcome: Outcome) -> None:
        self.counts.sent += outcome.sent
        self.counts.refused += outcome.refused
        self.counts.waiting -= outcome.sent + outcome.refused
        if outcome.refused:
            log.error("the sidecar refused %d records: %s", outcome.refused, "; ".join(outcome.reasons))
        if self._is_away:
            self._is_away = False
            log.warning("the sidecar answers again; %d records were dropped so far", self.counts.dropped)
        if self._dropped_before is not None and 2 * len(self._lines) <= self._max_records:
            dropped, self._dropped_before = self.counts.dropped - self._dropped_before, None
            log.warning("there is room again; %d records were dropped meanwhile, and are lost", dropped)

    def failed(self, error: SidecarUnavailable) -> None:
        """Notes a failed attempt; the batch will be sent again."""
        self.counts.failed_attempts += 1
        if not self._is_away:
            self._is_away = True
            log.warning("the sidecar accepts no records; they wait in memory: %s", error.detail)

    def _note_drop(self) -> None:
        if self._dropped_before is None:
            self._dropped_before = self.counts.dropped
            log.warning("%d records wait: from now on the oldest are dropped", self._max_records)

    def give_up(self) -> None:
        """Drops all records that wait or are being sent."""
        if self.counts.waiting:
            log.warning("closed with %d records unsent; they are lost", self.counts.waiting)
        self.counts.dropped += self.counts.waiting
        self.counts.waiting = 0
        self._lines.clear()
