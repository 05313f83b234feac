"""Generic webhook: one JSON document per incident event, posted until the receiver answers 2xx.

The notification row holds the state: a lease while a sidecar posts it, and the time of the next attempt. A
notification is posted twice only if a process dies between the answer and storing it; the receiver sees that
by the same `Idempotency-Key`. A receiver that is new, say as its address has a new token, is told of the
pages that are not over.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog

from driftguard.alerting.destination import identity, shown
from driftguard.alerting.retries import Failure, failure_of, wait_seconds
from driftguard.incidents.message import document
from driftguard.metrics import Metrics
from driftguard.outgoing.posting import DEADLINE_SECONDS, NotAnswered, post
from driftguard.store import incidents, notifications
from driftguard.store.database import Database

# After this time another process takes over from one that died.
LEASE: Final = timedelta(seconds=3 * DEADLINE_SECONDS)
LOOK_SECONDS: Final = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A notification that is leased to this sidecar, and its message."""

    id: int
    attempt: int
    event: str
    idempotency_key: str
    body: dict[str, Any]


class Webhook:
    """One receiver. `deliver` is called by one thread, again and again."""

    def __init__(self, database: Database, url: str, external_url: str, metrics: Metrics) -> None:
        self.name = identity("webhook", url)
        self._database = database
        self._url = url
        self._external_url = external_url
        self._metrics = metrics
        self._unsettled: tuple[Claimed, Failure | None] | None = None
        self._knows_open = False  # it was told, or is to be told, of what was open as the sidecar started

    def deliver(self) -> float:
        """Posts what has been due for longest. Returns the seconds to wait before the next call.

        Raises DatabaseUnavailable. The outcome of a post is then stored by the next call, before anything
        else: otherwise a delivered notification would be posted again when its lease ends.
        """
        if not self._knows_open:
            with self._database.session() as session:
                is_all = incidents.announce_open(session, self.name, datetime.now(UTC))
            self._knows_open = is_all
        if self._unsettled is None:
            claimed = self._claim()
            if claimed is None:
                return LOOK_SECONDS
            self._unsettled = claimed, self._post(claimed)
        claimed, failure = self._unsettled
        self._settle(claimed, failure)
        self._unsettled = None
        return 0.0 if failure is None else LOOK_SECONDS

    def _claim(self) -> Claimed | None:
        with self._database.session() as session:
            row = notifications.claim(session, self.name, LEASE)
            if row is None:
                return None
            incident, stream = incidents.find(session, row.incident_id)
            body = document(incident, stream, row.event, self._external_url)
            # Of what is told: it may have become graver since the claim, which is announced as well.
            key = f"{row.incident_id}:{row.event}:{incident.severity}"
            return Claimed(row.id, row.attempts, row.event, key, body)

    def _post(self, claimed: Claimed) -> Failure | None:
        try:
            answer = post(self._url, claimed.body, {"Idempotency-Key": claimed.idempotency_key})
        except NotAnswered as error:
            failure: Failure | None = Failure("away", str(error))
        else:
            failure = failure_of(answer)
        outcome = "delivered" if failure is None else "refused" if failure.kind == "refused" else "failed"
        self._metrics.notifications.attempts.labels("webhook", claimed.event, outcome).inc()
        return failure

    def _settle(self, claimed: Claimed, failure: Failure | None) -> None:
        if failure is None:
            with self._database.session() as session:
                notifications.settle_delivered(session, claimed.id)
            return
        wait = timedelta(seconds=wait_seconds(failure, claimed.attempt, random.random()))
        with self._database.session() as session:
            notifications.settle_failed(session, claimed.id, claimed.attempt, failure.reason, wait)
        tell = log.error if failure.kind == "refused" else log.warning
        tell(
            "webhook did not take the notification",
            webhook=shown(self.name),
            notification=claimed.id,
            attempt=claimed.attempt,
            error=failure.reason,
            again_in_seconds=round(wait.total_seconds(), 1),
        )
