"""Generic webhook: one JSON document per incident event, posted until the receiver answers 2xx.

The notification row is the truth, the procrastinate job only the reminder. A job locks its row while it
posts, so that two workers never post the same event at once, and stores `delivered_at` with the answer.
Only a crash between the answer and that commit can post twice; the `Idempotency-Key` header tells then.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

import httpx
import procrastinate
import structlog
from procrastinate.jobs import Job
from procrastinate.retry import BaseRetryStrategy, RetryDecision

from driftguard.alerting.message import document
from driftguard.metrics import Metrics
from driftguard.store import incidents, notifications
from driftguard.store.database import Database
from driftguard.store.tables import Notification

PREFIX: Final = "webhook:"
QUEUE: Final = "notifications"
TASK: Final = "webhook:deliver"
TIMEOUT_SECONDS: Final = 10.0
RETRY_LATER_STATUSES: Final = frozenset({408, 429})

log = structlog.get_logger(__name__)


class Undelivered(Exception):
    """{url} did not take the notification: {error}"""

    def __init__(self, url: str, error: str, *, refused: bool) -> None:
        super().__init__(f"{url} did not take the notification: {error}")
        self.refused = refused  # a 4xx: repeating it soon will not help


class Backoff(BaseRetryStrategy):
    """Doubles from `first_seconds` up to five minutes; a refusal waits from five minutes up to an hour."""

    def __init__(self, first_seconds: float = 1.0) -> None:
        self.first_seconds = first_seconds

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision:
        refused = isinstance(exception, Undelivered) and exception.refused
        first, longest = (300.0, 3600.0) if refused else (self.first_seconds, 300.0)
        seconds = min(first * 2.0 ** min(job.attempts, 20), longest)
        return RetryDecision(retry_in={"seconds": max(1, round(seconds))})


def destinations(urls: Collection[str]) -> list[str]:
    return [PREFIX + url for url in urls]


class WebhookSink:
    """Delivers notifications. `blueprint` belongs into the procrastinate app, `defer_new` into a loop."""

    def __init__(
        self,
        database: Database,
        urls: Collection[str],
        external_url: str,
        metrics: Metrics,
        client: httpx.Client | None = None,
    ) -> None:
        self._database = database
        self._destinations = destinations(urls)
        self._external_url = external_url
        self._metrics = metrics
        self._client = client or httpx.Client(timeout=TIMEOUT_SECONDS)
        self._deferred: set[int] = set()  # by this process: a fresh process defers every open row again

    @property
    def blueprint(self) -> procrastinate.Blueprint:
        """A new one each time: procrastinate renames the tasks of a blueprint when an app takes it."""
        blueprint = procrastinate.Blueprint()
        blueprint.task(name="deliver", queue=QUEUE, retry=Backoff())(self.deliver)
        return blueprint

    def defer_new(self, app: procrastinate.App) -> None:
        """Queues a job for each notification that needs one; a queued one is left alone."""
        with self._database.session() as session:
            waiting = {row.id for row in notifications.sendable(session, self._destinations)}
        for notification_id in sorted(waiting - self._deferred):
            job = app.configure_task(TASK, queue=QUEUE, queueing_lock=f"notification-{notification_id}")
            try:
                job.defer(notification_id=notification_id)
            except procrastinate.exceptions.AlreadyEnqueued:
                log.debug("notification is queued already", notification=notification_id)
        self._deferred = waiting

    def deliver(self, notification_id: int) -> None:
        """One attempt. Raises Undelivered, whereupon procrastinate repeats it later."""
        failure: Undelivered | None = None
        with self._database.session() as session:
            row = notifications.lock(session, notification_id)
            if row is None or row.delivered_at is not None:
                return
            if row.destination not in self._destinations:
                log.warning("notification dropped: its webhook is no longer configured", id=notification_id)
                row.last_error = "this webhook is no longer configured"
                return
            body = document(*incidents.find(session, row.incident_id), row.event, self._external_url)
            failure = self._post(row, body)
            row.attempts += 1
            row.last_error = str(failure) if failure else None
            row.delivered_at = None if failure else datetime.now(UTC)
        outcome = "failed" if failure else "delivered"
        self._metrics.notifications.labels("webhook", row.event, outcome).inc()
        if failure is not None:
            raise failure

    def _post(self, row: Notification, body: dict[str, object]) -> Undelivered | None:
        url = row.destination.removeprefix(PREFIX)
        headers = {"Idempotency-Key": f"{row.incident_id}:{row.event}:{row.severity}"}
        try:
            answer = self._client.post(url, json=body, headers=headers)
        except httpx.HTTPError as error:
            return Undelivered(url, f"{type(error).__name__}: {error}", refused=False)
        if answer.is_success:
            return None
        refused = answer.is_client_error and answer.status_code not in RETRY_LATER_STATUSES
        return Undelivered(url, f"HTTP {answer.status_code}: {answer.text[:200]}", refused=refused)
