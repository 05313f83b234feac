"""Notifications that are posted to webhooks and Alertmanagers."""

from __future__ import annotations

from driftguard.metrics.series import Series


class NotificationMetrics:
    def __init__(self, series: Series) -> None:
        self.attempts = series.counter(
            "driftguard_notifications",
            "Attempts to deliver a notification, by kind of destination and outcome.",
            "destination",  # alertmanager | webhook
            "event",  # firing | resolved
            "outcome",  # delivered | failed | refused: the message itself, which is tried again slowly
        )
        self.undelivered = series.gauge(
            "driftguard_notifications_undelivered",
            "Notifications that are not delivered to their destination yet.",
        )
