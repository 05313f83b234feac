"""The fold of records into detector states."""

from __future__ import annotations

from driftguard.metrics.series import Series


class FoldMetrics:
    def __init__(self, series: Series) -> None:
        self.lag_records = series.gauge(
            "driftguard_fold_lag_records", "Stored records not yet folded; NaN while that is not known."
        )
        self.failures = series.counter(
            "driftguard_fold_failures",
            "Batches whose fold failed and was rolled back, without those caused by an unavailable database.",
        )
        self.stream_failures = series.counter(
            "driftguard_stream_failures",
            "Failures of one stream's part of a batch, which continued without it.",
        )
        self.states_lost = series.counter(
            "driftguard_detector_states_lost",
            "Stored detector states that were damaged, so that their streams learn new baselines.",
        )
        self.states_of_other_version = series.counter(
            "driftguard_detector_states_of_other_version",
            "Stored detector states of another version of DriftGuard, so that their streams learn new "
            "baselines.",
        )
        self.last_round = series.gauge(
            "driftguard_detector_last_round_timestamp_seconds",
            "When the detector last made a round: it folded what was there, or there was nothing, or another "
            "sidecar folds.",
        )
