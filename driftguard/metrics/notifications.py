"""Notifications that are posted to webhooks and Alertmanagers."""

from __future__ import annotations

from itertools import product
from typing import Final

from driftguard.metrics.series import Series

DESTINATIONS: Final = ("alertmanager", "webhook")
EVENTS: Final = ("firing", "resolved")
OUTCOMES: Final = ("delivered", "failed", "refused")  # refused: the message itself, tried again slowly


class NotificationMetrics:
    def __init__(self, series: Series) -> None:
        self.attempts = series.counter(
            "driftguard_notifications",
            "Attempts to deliver a notification, by kind of destination and outcome.",
            "destination",
            "event",
            "outcome",
        )
        for labels in product(DESTINATIONS, EVENTS, OUTCOMES):
            self.attempts.labels(*labels)  # the first of a kind is an increase
        self.undelivered = series.gauge(
            "driftguard_notifications_undelivered",
            "Notifications that are not delivered to their destination yet.",
        )
