"""The loops of the sidecar and its recurring chores."""

from __future__ import annotations

from driftguard.metrics.labels import CHORES, LOOPS
from driftguard.metrics.series import Series


class LoopMetrics:
    def __init__(self, series: Series) -> None:
        self.gauges_last_refresh = series.gauge(
            "driftguard_gauges_last_refresh_timestamp_seconds",
            "When every gauge of a stream, an incident or a retraining was last set.",
        )
        self.chore_failures = series.counter(
            "driftguard_chore_failures",
            "Failures of a recurring chore, without those caused by an unavailable database.",
            "chore",
        )
        self.chore_last_success = series.gauge(
            "driftguard_chore_last_success_timestamp_seconds",
            "When a recurring chore last succeeded, or the sidecar started.",
            "chore",
        )
        self.failures = series.counter(
            "driftguard_loop_failures",
            "Unexpected failures in a loop that continues, without those caused by an unavailable database.",
            "loop",
        )
        for chore in CHORES:
            self.chore_failures.labels(chore)
        for loop in LOOPS:
            self.failures.labels(loop)
