"""The look-around goes on while the fold fails, and shows nothing that it could not measure."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import text, update
from structlog.testing import capture_logs

from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.pipeline import look_around
from driftguard.pipeline.look_around import LookAround
from driftguard.status import gauges
from driftguard.store import incidents
from driftguard.store.database import Database, Work
from driftguard.store.tables import Stream
from tests.alerting.http_receiver import wait_until
from tests.pipeline.traffic import Traffic, store
from tests.retraining import world
from tests.retraining.world import drift, incident_of


def shown(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"driftguard_{name}", labels)


def test_the_lag_is_shown_while_nothing_is_folded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_around, "LOOK_SECONDS", 0.01)
    metrics = Metrics()
    looking = LookAround(database, metrics)
    looking.start()
    try:
        wait_until(lambda: bool(shown(metrics, "gauges_last_refresh_timestamp_seconds")), "the first look")
        assert shown(metrics, "fold_lag_records") == 0
        store(database, Traffic(seed=1).draw(30, {"code": 0.75}))
        wait_until(lambda: shown(metrics, "fold_lag_records") == 30, "the lag")
    finally:
        looking.stop()


def test_the_lag_is_shown_while_somebody_locks_what_the_other_gauges_need(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_around, "LOOK_SECONDS", 0.01)
    patient = Work("chore", statement_seconds=300, lock_seconds=300, idle_seconds=300)
    monkeypatch.setattr(look_around, "CHORE", patient)
    metrics = Metrics()
    looking = LookAround(database, metrics)
    with database.engine.connect() as other:
        other.execute(text("LOCK TABLE detector_states IN ACCESS EXCLUSIVE MODE"))
        looking.start()
        try:
            wait_until(lambda: blocked(database) > 0, "a look to wait for the lock")
            store(database, Traffic(seed=1).draw(30, {"code": 0.75}))
            wait_until(lambda: shown(metrics, "fold_lag_records") == 30, "the lag")
        finally:
            other.rollback()
            looking.stop()


def blocked(database: Database) -> int:
    with database.session() as session:
        return session.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0


@pytest.mark.slow
def test_a_look_that_fails_is_counted_and_repeated_and_the_lag_is_measured_before_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_around, "LOOK_SECONDS", 0.01)
    store(database, Traffic(seed=1).draw(30, {"code": 0.75}))
    failing = True
    refresh = gauges.refresh

    def sometimes(*arguments: object) -> None:
        if failing:
            raise RuntimeError("a gauge that cannot be set")
        refresh(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gauges, "refresh", sometimes)
    metrics = Metrics()
    looking = LookAround(database, metrics)
    with capture_logs() as logs:
        looking.start()
        try:
            failures = "loop_failures_total"
            wait_until(lambda: (shown(metrics, failures, loop="look_around") or 0) >= 2, "two failures")
            assert shown(metrics, "fold_lag_records") == 30
            failing = False
            wait_until(lambda: bool(shown(metrics, "gauges_last_refresh_timestamp_seconds")), "a look")
        finally:
            looking.stop()
    assert "looking around failed and will be tried again" in {line["event"] for line in logs}


def test_a_lag_that_cannot_be_measured_is_not_shown_as_it_was(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    looking = LookAround(database, metrics)
    looking.look(datetime.now(UTC))
    assert shown(metrics, "fold_lag_records") == 0

    def away(_: object) -> int:
        raise DatabaseUnavailable("database 'driftguard' at db.internal:5432: connection refused")

    monkeypatch.setattr("driftguard.store.folding.lag", away)
    with capture_logs() as logs:
        looking._attempt(lambda: looking.look(datetime.now(UTC)))
    assert math.isnan(shown(metrics, "fold_lag_records") or 0)
    assert shown(metrics, "database_up") == 0
    assert [line["event"] for line in logs] == ["the gauges wait for the database"]


def test_an_incident_that_ends_while_a_look_ends_it_is_no_failure(database: Database) -> None:
    """Another sidecar looks around too, and somebody may resolve it by hand."""
    now = datetime.now(UTC)
    incident_id = drift(database, "v1", now - timedelta(hours=1))
    with database.session() as session:
        session.execute(update(Stream).values(last_seen_at=now - timedelta(hours=1)))
    without = {"draft": "none", "draft_version": "none", "method": "none", "drafted": 0, "accepted": 0}
    world.store(database, [msgspec.structs.replace(world.record("v1", "code", 0.0, now), **without)])
    with ThreadPoolExecutor(1) as threads:
        with database.session() as session:
            incidents.move(session, incident_id, "resolved", "by somebody else", now)
            looked = threads.submit(LookAround(database, Metrics()).look, now)
            wait_until(lambda: blocked(database) > 0 or looked.done(), "a look to wait for the incident")
        looked.result()
    assert incident_of(database, incident_id).resolution == "by somebody else"
