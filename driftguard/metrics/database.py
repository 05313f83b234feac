"""The database, as this sidecar observes it."""

from __future__ import annotations

import time
from itertools import product
from typing import Final

from driftguard.metrics.labels import TIMEOUTS, WORKS
from driftguard.metrics.series import Series

# How long refused records are remembered where no others are sent: what was full or locked may be so no more.
REFUSED_SECONDS: Final = 60.0


class DatabaseMetrics:
    def __init__(self, series: Series) -> None:
        self.up = series.gauge(
            "driftguard_database_up",
            "1 if the last use of the database worked; 0 while it takes no records, as with a full disk.",
        )
        self._refused_at: float | None = None  # monotonic seconds; None: it took the last records
        self.embedded_restarts = series.counter(
            "driftguard_embedded_database_restarts",
            "How often the embedded PostgreSQL had stopped and was started again.",
        )
        self.timeouts = series.counter(
            "driftguard_database_timeouts",
            "Units of work that took longer than the limit of their kind, and were rolled back.",
            "work",
            "reason",
        )
        for labels in product(WORKS, TIMEOUTS):
            self.timeouts.labels(*labels)  # the first of a kind is an increase

    def stored(self) -> None:
        """It took records."""
        self._refused_at = None
        self.up.set(1)

    def refused(self) -> None:
        """It took no records."""
        self._refused_at = time.monotonic()
        self.up.set(0)

    def worked(self) -> None:
        """It did what else it was asked for, which a full disk does not prevent where nothing is written."""
        refused_at = self._refused_at
        if refused_at is None or time.monotonic() - refused_at > REFUSED_SECONDS:
            self.up.set(1)
