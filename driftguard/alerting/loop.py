"""The thread that sees to it that what was stored as a notification leaves the house."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import procrastinate
import structlog

from driftguard.alerting.alertmanager import RESEND_SECONDS, AlertmanagerSink
from driftguard.alerting.webhook import WebhookSink
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics

LOOK_SECONDS = 1.0
log = structlog.get_logger(__name__)


class AlertLoop:
    """Every second: queue jobs for new webhook notifications. Every 30 s, or at once when there is
    something new: post to the Alertmanagers. `app` is the procrastinate app that holds the webhook's
    blueprint under the namespace "webhook"; it is open for deferring."""

    def __init__(
        self, app: procrastinate.App, webhooks: WebhookSink, alertmanagers: AlertmanagerSink, metrics: Metrics
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._webhooks = webhooks
        self._alertmanagers = alertmanagers
        self._next_round = 0.0  # monotonic seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            # One failing must not keep the other silent.
            self._attempt(lambda: self._webhooks.defer_new(self._app))
            self._attempt(self._post_alerts)

    def _post_alerts(self) -> None:
        if time.monotonic() >= self._next_round or self._alertmanagers.news():
            self._next_round = time.monotonic() + RESEND_SECONDS
            self._alertmanagers.send(datetime.now(UTC))

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except DatabaseUnavailable as error:
            log.warning("alerts wait for the database", error=str(error))
        except Exception:
            self._metrics.loop_failures.labels("alerts").inc()
            log.exception("sending alerts failed and will be tried again")
