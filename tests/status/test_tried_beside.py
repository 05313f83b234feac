"""A target that was tried beside the one before, and then took over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from driftguard.metrics import Metrics
from driftguard.pipeline.look_around import LookAround
from driftguard.status.verdict import standings
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.alerting.incident_rows import add_incident

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def served(database: Database, target: str, first: timedelta, last: timedelta = timedelta()) -> int:
    """From so long ago until so long ago."""
    ended_at = NOW - last
    names = {"server": "chat", "target": target, "draft": "d", "draft_version": "v1", "method": "draft_model"}
    traffic = {"traffic_arrived_at": ended_at, "traffic_ended_at": ended_at}
    with database.session() as session:
        stream = Stream(**names, first_seen_at=NOW - first, last_seen_at=ended_at, **traffic)
        session.add(stream)
        session.flush()
        return stream.id


def verdicts(database: Database) -> dict[str, tuple[str, str]]:
    """By target: the verdict, and which target serves in its place."""
    with database.session() as session:
        found = standings(session, NOW)
    return {item.stream.target: (item.verdict, item.target_in_service) for item in found}


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        (timedelta(minutes=4), ("insufficient_data", "old")),
        (timedelta(hours=20), ("stale", "old")),  # of two that are meant to stay, one may have failed
        (6 * DAY, ("stale", "old")),
        (8 * DAY, ("replaced", "new")),  # a source counts as retired after a week
    ],
)
def test_the_one_before_is_replaced_after_a_week_of_silence(
    database: Database, silent: timedelta, told: tuple[str, str]
) -> None:
    served(database, "old", 90 * DAY, silent)
    served(database, "new", silent + timedelta(minutes=30))
    assert verdicts(database) == {"old": told, "new": ("insufficient_data", "new")}


def test_the_one_that_was_tried_and_given_up_is_replaced_too(database: Database) -> None:
    served(database, "old", 90 * DAY)
    served(database, "new", 9 * DAY, 8 * DAY)
    assert verdicts(database) == {"old": ("insufficient_data", "old"), "new": ("replaced", "old")}


def test_where_the_other_is_silent_as_well_neither_is_replaced(database: Database) -> None:
    served(database, "old", 90 * DAY, 8 * DAY)
    served(database, "new", 20 * DAY, 7 * DAY)
    assert verdicts(database) == {"old": ("stale", "old"), "new": ("stale", "new")}


def test_a_target_that_only_paused_is_in_service_again_with_its_fall(database: Database) -> None:
    """A month between two batches: nothing but a person, or its own requests, ends its fall."""
    old = served(database, "old", 90 * DAY, 30 * DAY)
    served(database, "new", 40 * DAY)
    incident_id = add_incident(database, [], stream_id=old, opened_at=NOW - 31 * DAY)
    assert verdicts(database)["old"] == ("stale", "old")
    LookAround(database, Metrics()).look(NOW)
    with database.session() as session:
        assert incidents.find(session, incident_id)[0].state == "open"
        session.execute(
            update(Stream)
            .where(Stream.id == old)
            .values(traffic_arrived_at=NOW, traffic_ended_at=NOW, last_seen_at=NOW)
        )
    assert verdicts(database)["old"] == ("degraded", "old")
