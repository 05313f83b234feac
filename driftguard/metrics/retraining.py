"""Retraining runs, the gate and drafts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from driftguard.metrics.labels import PLACE
from driftguard.metrics.series import Series


class RetrainingMetrics:
    def __init__(self, series: Series) -> None:
        self._ended_runs: dict[tuple[str, str, str], tuple[int, datetime | None]] = {}
        self.runs = series.counter(
            "driftguard_retrain_runs", "Ended retraining runs by outcome.", *PLACE, "outcome"
        )
        self.last_outcome = series.gauge(
            "driftguard_retrain_last_run_outcome",
            "1 for the outcome of the newest retraining run; no series for the others, and none at all while "
            "its draft is still watched on live traffic.",
            *PLACE,
            "outcome",
        )
        self.last_run = series.gauge(
            "driftguard_retrain_last_run_timestamp_seconds",
            "When a retraining run last ended, with any outcome, by its trigger.",
            *PLACE,
            "trigger",  # incident | nightly | manual
        )
        self.rejected_in_a_row = series.gauge(
            "driftguard_retrain_rejected_in_a_row",
            "Candidates that the gate rejected since a draft was last put into service.",
            *PLACE,
        )
        self.last_success = series.gauge(
            "driftguard_retrain_last_success_timestamp_seconds",
            "When a retraining last ended well: promoted, or nothing to do.",
            *PLACE,
        )
        self.drafts = series.gauge(
            "driftguard_drafts",
            "Known drafts by state; lost: promoted, and its engine was started again without it.",
            *PLACE,
            "state",
        )
        self.draft_in_service_since = series.gauge(
            "driftguard_draft_in_service_since_timestamp_seconds",
            "When the draft that is in service was put into service.",
            *PLACE,
            "draft_version",
        )
        self.stage = series.gauge(
            "driftguard_retrain_stage",
            "1 for the stage that a retraining is in; no series for the others.",
            *PLACE,
            "stage",
        )
        self.gate_acceptance = series.gauge(
            "driftguard_gate_acceptance_ratio",
            "Accepted per draft token at the K in use, predicted from held-out requests of the changed "
            "traffic, when the gate last decided.",
            *PLACE,
            "draft",  # in_service | candidate
        )
        self.gate_gain_lower = series.gauge(
            "driftguard_gate_gain_lower_ratio",
            "Lower 95% bound of the candidate's gain on the changed traffic, in single draft tokens kept.",
            *PLACE,
        )
        self.gate_loss_upper = series.gauge(
            "driftguard_gate_loss_upper_ratio",
            "Upper 95% bound of the candidate's loss in the tested group of the traffic where it is largest, "
            "in single draft tokens kept.",
            *PLACE,
        )
        self.gate_passed = series.gauge(
            "driftguard_gate_passed", "1 if the gate accepted the last candidate.", *PLACE
        )

    def set_ended_runs(self, totals: Mapping[tuple[str, str, str], tuple[int, datetime | None]]) -> None:
        """`totals`: (server, target, outcome) -> how many have ended so, and when the newest has. Runs end in
        other processes too (the nightly job), so the counter follows the number in the database; it never
        decreases. That number may: a rollback by hand takes a promoted run up again. Where it is refused the
        run counts among them again, and has not ended anew."""
        for key, (total, newest) in totals.items():
            known = self._ended_runs.get(key)
            if known is None:
                self.runs.labels(*key).inc(total)
                self._ended_runs[key] = (total, newest)
                continue
            counted, last = known
            if newest is not None and (last is None or newest > last):
                self.runs.labels(*key).inc(max(total - counted, 1))
                last = newest
            self._ended_runs[key] = (total, last)
