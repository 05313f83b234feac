"""The database, as this sidecar observes it."""

from __future__ import annotations

from driftguard.metrics.series import Series


class DatabaseMetrics:
    def __init__(self, series: Series) -> None:
        self.up = series.gauge("driftguard_database_up", "1 if the last use of the database worked.")
        self.embedded_restarts = series.counter(
            "driftguard_embedded_database_restarts",
            "How often the embedded PostgreSQL had stopped and was started again.",
        )
        self.timeouts = series.counter(
            "driftguard_database_timeouts",
            "Units of work that took longer than the limit of their kind, and were rolled back.",
            "work",
            "reason",  # statement | lock | idle | silence
        )
