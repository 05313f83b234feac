"""Gauges that mirror the database, set by the detector's thread so that a scrape never waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from driftguard.metrics import Metrics
from driftguard.records import StreamKey
from driftguard.status import StreamStatus
from driftguard.store import detector_states, incidents, notifications, retrain_runs, status


def refresh(session: Session, metrics: Metrics, found: Sequence[StreamStatus]) -> None:
    metrics.fold_lag_records.set(detector_states.unfolded(session))
    metrics.set_open_incidents(incidents.unresolved_counts(session))
    metrics.notifications_undelivered.set(notifications.count_undelivered(session))
    metrics.set_ended_runs(status.ended_runs(session))
    metrics.set_last_successes(retrain_runs.last_success_at(session))
    for item in found:
        stream = item.stream
        key = StreamKey(stream.server, stream.target, stream.draft_version, stream.method)
        baselines = {part.segment: part.baseline.rate for part in item.segments if part.baseline}
        metrics.set_verdict(key, item.verdict, baselines)
