"""How many requests were answered and not recorded, until the sidecar knows it. Not thread-safe."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Final
from uuid import uuid4

from driftguard.client.protocol import Outcome
from driftguard.errors import DriftGuardError
from driftguard.records import (
    UnrecordedReason,
    UnrecordedRequests,
    decode_unrecorded,
    encode_unrecorded,
    hour_of,
)

log = logging.getLogger("driftguard.client")

KEPT: Final = timedelta(days=1)  # the status tells of one day
MOST_COUNTS: Final = 10_000
MOST_AT_ONCE: Final = 30  # with the longest names that is less than the sidecar takes at once

Key = tuple[datetime, str, UnrecordedReason]  # hour, server


class Tally:
    """Counts per hour, server and reason. What is reported is each count so far, under an id of this tally's
    own: the sidecar keeps the largest, so that a report whose answer was lost is sent again."""

    def __init__(self) -> None:
        self._reporter = uuid4()
        self._counts: dict[Key, int] = {}  # the oldest first
        self._unreported: dict[Key, None] = {}
        self._is_away = False

    def add(self, server: str, reason: UnrecordedReason, requests: int, now: datetime) -> None:
        """Takes microseconds, never raises. `now`: UTC. Beyond MOST_COUNTS the oldest is lost."""
        key = (hour_of(now), server, reason)
        try:
            decode_unrecorded(encode_unrecorded(self._count(key, requests)), now)
        except (TypeError, ValueError) as error:
            log.error("refused a count of unrecorded requests: %s", error)
            return
        if key not in self._counts:
            self._make_room(key[0] - KEPT)
        self._counts[key] = self._counts.get(key, 0) + requests
        self._unreported[key] = None

    def _make_room(self, before: datetime) -> None:
        while self._counts and (
            (oldest := next(iter(self._counts)))[0] < before or len(self._counts) >= MOST_COUNTS
        ):
            del self._counts[oldest]
            self._unreported.pop(oldest, None)

    def _count(self, key: Key, requests: int) -> UnrecordedRequests:
        hour, server, reason = key
        return UnrecordedRequests(
            reporter=self._reporter, server=server, hour=hour, reason=reason, requests=requests
        )

    def reports(self) -> list[list[UnrecordedRequests]]:
        """What the sidecar does not know yet, in parts to be sent one by one."""
        counts = [self._count(key, self._counts[key]) for key in self._unreported]
        return [counts[place : place + MOST_AT_ONCE] for place in range(0, len(counts), MOST_AT_ONCE)]

    def answered(self, report: list[UnrecordedRequests], outcome: Outcome) -> None:
        """The sidecar has taken a report, or refuses some of it for good."""
        self._is_away = False
        for count in report:
            key = (count.hour, count.server, count.reason)
            if self._counts.get(key) == count.requests:
                self._unreported.pop(key, None)
        if outcome.refused:
            log.error("the sidecar refused counts of unrecorded requests: %s", "; ".join(outcome.reasons))

    def failed(self, error: DriftGuardError) -> None:
        """A report will be sent again."""
        if not self._is_away:
            self._is_away = True
            log.warning("the sidecar takes no counts of unrecorded requests; they wait: %s", error.detail)
