"""What the status counts of the last day, and of the last minutes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from driftguard.store.database import Database
from driftguard.store.folding import watched_versions
from driftguard.store.records import insert_batches
from driftguard.store.retrain_runs import in_states, last_judged, latest, unended
from driftguard.store.status_queries import (
    last_retrains,
    lengths,
    requests_per_day,
    speeds,
    watched_runs,
)
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Stream
from tests.store.explained import pages_read, pages_spilled
from tests.store.long_history import populate
from tests.store.samples import make_records

NOW = datetime.now(UTC)


def test_requests_that_a_clock_which_was_ahead_has_dated_are_not_of_the_last_day(database: Database) -> None:
    batches = [
        make_records(3, server="chat", ended_at=NOW),
        make_records(40, seed=1, server="chat", ended_at=NOW + timedelta(days=2)),
    ]
    with database.session() as session:
        insert_batches(session, batches, StreamRegistry(), NOW)
        session.execute(update(Stream).values(first_seen_at=NOW - timedelta(days=3)))
        stream_id = session.scalars(select(Stream.id)).one()
        assert requests_per_day(session, NOW, [stream_id]) == {stream_id: pytest.approx(3.0)}


def test_records_that_were_kept_back_before_their_stream_was_known_make_no_day_of_an_hour(
    database: Database,
) -> None:
    """As those that an engine kept on disk while the sidecar was away."""
    kept_back = [
        make_records(10, seed=hours, server="chat", ended_at=NOW - timedelta(hours=hours))
        for hours in range(12)
    ]
    with database.session() as session:
        insert_batches(session, kept_back, StreamRegistry(), NOW)
        session.execute(update(Stream).values(first_seen_at=NOW - timedelta(hours=2)))
        stream_id = session.scalars(select(Stream.id)).one()
        assert requests_per_day(session, NOW, [stream_id]) == {
            stream_id: pytest.approx(120 * 24 / 11, rel=0.01)
        }


def test_requests_that_a_clock_which_was_ahead_has_dated_are_not_of_the_last_minutes(
    database: Database,
) -> None:
    """Else tokens per second and acceptance length are those of then, for as long as it was ahead."""
    batches = [
        make_records(3, segments=1, steps=10, emitted=20, ended_at=NOW),
        make_records(40, seed=1, segments=1, ended_at=NOW + timedelta(days=2)),
    ]
    with database.session() as session:
        insert_batches(session, batches, StreamRegistry(), NOW)
        stream_id = session.scalars(select(Stream.id)).one()
        (speed,) = speeds(session, NOW, [stream_id])[stream_id].values()
        length = lengths(session, NOW, [stream_id])[stream_id]
    assert (speed.recent.requests, length.steps, length.emitted) == (3, 30, 60)


@pytest.mark.parametrize("ask", [last_retrains, last_judged])
def test_the_last_run_of_each_server_is_told_without_sorting_the_documents_of_all(
    database: Database, ask: Callable[[Session], object]
) -> None:
    """It is asked every few seconds: temporary files of all runs of a year would be written each time."""
    populate(database, days=800, kilobytes=1)
    with database.session() as session:
        assert pages_spilled(database, lambda: ask(session)) == 0


@pytest.mark.parametrize(
    "ask",
    [
        unended,
        watched_versions,
        watched_runs,
        lambda session: latest(session, "server-1", "target"),
        lambda session: in_states(session, "server-1", "target", ("watching", "rolling_back")),
    ],
    ids=["unended", "watched_versions", "watched_runs", "latest", "in_states"],
)
def test_runs_that_are_under_way_are_found_without_reading_those_that_have_ended(
    database: Database, ask: Callable[[Session], object]
) -> None:
    """The sidecar asks every two seconds, for as many years as it has run."""
    populate(database, days=800, kilobytes=1)
    with database.session() as session:
        assert pages_read(database, lambda: ask(session)) < 30


def test_what_the_gate_decided_last_is_found_without_reading_the_documents_of_all(
    database: Database,
) -> None:
    populate(database, days=300, kilobytes=3)
    with database.session() as session:
        assert pages_read(database, lambda: last_judged(session)) < 150
