"""A target that was tried beside the one before, and then took over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from driftguard.status.verdict import standings
from driftguard.store.database import Database
from driftguard.store.tables import Stream

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)


def served(database: Database, target: str, first: timedelta, last: timedelta = timedelta()) -> None:
    """From so long ago until so long ago."""
    ended_at = NOW - last
    names = {"server": "chat", "target": target, "draft": "d", "draft_version": "v1", "method": "draft_model"}
    traffic = {"traffic_arrived_at": ended_at, "traffic_ended_at": ended_at}
    with database.session() as session:
        session.add(Stream(**names, first_seen_at=NOW - first, last_seen_at=ended_at, **traffic))


def verdicts(database: Database) -> dict[str, tuple[str, str]]:
    """By target: the verdict, and which target serves in its place."""
    with database.session() as session:
        found = standings(session, NOW)
    return {item.stream.target: (item.verdict, item.target_in_service) for item in found}


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        (timedelta(minutes=4), ("insufficient_data", "old")),
        (timedelta(minutes=20), ("stale", "old")),  # of two that are meant to stay, one may have failed
        (timedelta(minutes=31), ("replaced", "new")),
    ],
)
def test_the_one_before_is_replaced_once_it_was_silent_for_as_long_as_both_were_served(
    database: Database, silent: timedelta, told: tuple[str, str]
) -> None:
    served(database, "old", timedelta(days=30), silent)
    served(database, "new", silent + timedelta(minutes=30))
    assert verdicts(database) == {"old": told, "new": ("insufficient_data", "new")}


def test_one_that_was_served_beside_another_for_months_is_replaced_after_a_week(database: Database) -> None:
    served(database, "old", timedelta(days=90), timedelta(days=8))
    served(database, "new", timedelta(days=60))
    assert verdicts(database)["old"] == ("replaced", "new")


def test_the_one_that_was_tried_and_given_up_replaces_nothing(database: Database) -> None:
    served(database, "old", timedelta(days=30))
    served(database, "new", timedelta(hours=10), timedelta(hours=9))
    assert verdicts(database) == {"old": ("insufficient_data", "old"), "new": ("stale", "new")}
